"""Typed wrappers of the operators in ``torch.ops.fused``, and what torch is told about them from Python."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ._load import _C  # noqa: F401  (registers torch.ops.fused)

CastingMode: TypeAlias = Literal["fp32", "llama", "gemma"]


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: CastingMode = "fp32",
    out_dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Adds a residual and normalises the sum by its root mean square, in one pass over memory.

    For every row of length ``H`` (the last dimension), in fp32 arithmetic (fp64 for fp64 inputs):

    .. math::
        h = input + residual \qquad
        out = h \cdot \frac{1}{\sqrt{\frac{1}{H}\sum h^2 + eps}} \cdot (offset + weight)

    which is RMSNorm (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467) of the residual stream.
    Differentiable in ``input``, ``residual`` and ``weight``, through both results.

    Args:
        input: ``(..., H)``, fp16, bf16, fp32 or fp64; any strides.
        residual: input's shape and dtype, or fp32 under a 16-bit input.
        weight: ``(H,)`` of any of these dtypes; ``None`` leaves the scale out.
        eps: added to the mean of squares, inside the root; finite and > 0.
        offset: added to the weight in fp32 (1 for Gemma); without a weight it has no effect.
        casting_mode: where the computation rounds on its way. ``"fp32"``: nowhere. ``"llama"``: ``h`` and the
            normalised value to residual's dtype, as Hugging Face Llama does. ``"gemma"``: ``h`` alone, as
            Hugging Face Gemma does and as ``add`` then ``F.rms_norm`` does.
        out_dtype: dtype of ``out``: input's (the default) or residual's.
        out: ``(out, residual_out)`` to write into; each may be exactly ``input`` or exactly ``residual``. For
            inference.

    Returns:
        ``(out, residual_out)``: the normalised value in input's dtype (or ``out_dtype``), and ``h`` in
        residual's dtype; both contiguous and new unless ``out`` is given.

    Raises:
        RuntimeError: for a wrong shape, dtype, device, eps, offset or casting mode; with ``out``, for partial
            overlaps and where a gradient would be lost.

    Example:
        >>> x, residual = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
        >>> out, residual = add_rms_norm(x, residual, torch.ones(64), 1e-5)
        >>> out.shape
        torch.Size([2, 5, 64])
    """
    if out is None:
        return torch.ops.fused.add_rms_norm.default(
            input, residual, weight, eps, offset=offset, casting_mode=casting_mode, out_dtype=out_dtype
        )
    if out_dtype is not None and out_dtype != out[0].dtype:
        raise RuntimeError(f"add_rms_norm: expected out of dtype out_dtype {out_dtype}, got {out[0].dtype}")
    torch.ops.fused.add_rms_norm_out.default(
        input,
        residual,
        weight,
        eps,
        offset=offset,
        casting_mode=casting_mode,
        out=out[0],
        residual_out=out[1],
    )
    return out


def add_rms_norm_(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: CastingMode = "fp32",
) -> None:
    """:func:`add_rms_norm` in place, the vLLM and FlashInfer convention: ``input`` becomes ``out``,
    ``residual`` becomes ``residual_out``.

    Takes the arguments of :func:`add_rms_norm`, writes through any strides whose last dimension is dense, and
    allocates nothing, unless the weight is strided or of neither input's dtype nor fp32: then it is copied.
    For inference.

    Raises:
        RuntimeError: as :func:`add_rms_norm`; also where input and residual share memory, where strides
            cannot be followed, and where a gradient would be lost.

    Example:
        >>> x, residual = torch.randn(3, 64), torch.randn(3, 64)
        >>> add_rms_norm_(x, residual, torch.ones(64))
    """
    torch.ops.fused.add_rms_norm_.default(
        input, residual, weight, eps, offset=offset, casting_mode=casting_mode
    )


def rms_norm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: CastingMode = "fp32",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The norm of :func:`add_rms_norm` where there is no residual yet: ``h = input``.

    Takes the arguments of :func:`add_rms_norm` and follows the same contract.

    Returns:
        The normalised value, contiguous and new, of input's shape.

    Raises:
        RuntimeError: as :func:`add_rms_norm`.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), eps=1e-12)
        tensor([[0.8485, 1.1314]])
    """
    return torch.ops.fused.rms_norm.default(
        input, weight, eps, offset=offset, casting_mode=casting_mode, out_dtype=out_dtype
    )
