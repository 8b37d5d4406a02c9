"""Memory in which every byte that nobody wrote is 0xFF: NaN in each dtype of the operators."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

GAP = 512  # bytes at least between two tensors, and what they start on: as the allocators of torch do


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in a buffer: one entry per dimension of the tensor, `offset` elements in."""

    order: tuple[int, ...]  # dimensions from the slowest to the fastest
    steps: tuple[int, ...]  # of the buffer's elements for one of the tensor's
    pads: tuple[int, ...]  # elements of the buffer beyond the tensor's last
    expanded: tuple[bool, ...]  # stride 0
    offset: int

    def strides(self, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """The strides, and the elements of the whole buffer."""
        strides, extent = [0] * len(shape), 1
        for dim in reversed(self.order):
            if not self.expanded[dim]:
                strides[dim] = extent * self.steps[dim]
                extent *= max(shape[dim], 1) * self.steps[dim] + self.pads[dim]
        return tuple(strides), self.offset + extent


def dense(rank: int) -> Layout:
    return Layout(tuple(range(rank)), (1,) * rank, (0,) * rank, (False,) * rank, 0)


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, NaN or not."""
    return tensor.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a).cpu(), bits(b).cpu())


def writable(tensor: Tensor) -> Tensor:
    """Each element once, where dimensions are expanded."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class Arena:
    """Tensors with guard bytes around them.

    ``with arena:`` hands out memory by `place` and, within `serving()`, to `at::empty` in C++ and Python. At
    its end all that was handed out is made 0xFF again; a byte that then differs lies outside every tensor.
    Whoever reads outside a tensor, or reads fresh memory, gets NaN.
    """

    def __init__(self, device: str, size: int) -> None:
        self.device = torch.device(device)
        self.bytes = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
        self.used = GAP
        self.placed: list[Tensor] = []
        self.fresh: list[int] = []  # addresses

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for tensor in self.placed:
                bits(writable(tensor)).fill_(-1)
            written = self.bytes[: self.used] != 0xFF
            first = int(written.int().argmax()) if written.any() else None
        self.bytes[: self.used].fill_(0xFF)
        self.used = GAP
        self.placed.clear()
        self.fresh.clear()
        if kind is None and first is not None:
            raise AssertionError(f"byte {first} of the arena was written, which lies outside every tensor")

    def _take(self, size: int) -> int:
        start = self.used
        self.used += math.ceil(size / GAP) * GAP + GAP
        if self.used > len(self.bytes):
            raise MemoryError(f"expected at most {len(self.bytes)} bytes in the arena, got {self.used}")
        return start

    def _tensor(self, byte: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        """No view of `bytes`: to autograd each tensor is one of its own."""
        tensor = torch.empty_strided((0,), (1,), dtype=dtype, device=self.device)
        tensor.set_(self.bytes.untyped_storage(), byte // dtype.itemsize, tuple(shape), tuple(strides))
        self.placed.append(tensor)
        return tensor

    def place(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        layout: Layout,
        *,
        over: tuple[Tensor, int] | None = None,
        room: int = 0,
    ) -> Tensor:
        """In memory of its own with `room` bytes to spare, or `over` a tensor, elements behind its start."""
        strides, extent = layout.strides(shape)
        if over is None:
            start = self._take(extent * dtype.itemsize + room) + layout.offset * dtype.itemsize
        else:
            target, shift = over
            start = (target.storage_offset() + shift) * target.element_size()
        return self._tensor(start, shape, strides, dtype)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Within, `at::empty` on this device takes from the arena."""

        def empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):  # type: ignore[no-untyped-def]
            dtype = dtype or torch.get_default_dtype()
            start = self._take(math.prod(size) * dtype.itemsize)
            self.fresh.append(self.bytes.data_ptr() + start)
            return self._tensor(start, size, torch.empty(size, device="meta").stride(), dtype)

        library = torch.library.Library("aten", "IMPL")
        library.impl("empty.memory_format", empty, self.device.type.upper(), allow_override=True)
        try:
            yield
        finally:
            library._destroy()
