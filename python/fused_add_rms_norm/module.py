"""The layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._ops import CastingMode, add_rms_norm, rms_norm


class AddRMSNorm(nn.Module):
    """RMSNorm of a residual stream: ``out, residual = norm(x, residual)``.

    Args:
        hidden_size: ``H``, the size of the last dimension.
        eps: added to the mean of squares, inside the root.
        offset: added to the weight in fp32; 1 for Gemma, whose weights are stored less one.
        casting_mode: see :func:`fused_add_rms_norm.add_rms_norm`.
        elementwise_affine: whether there is a weight.
        device, dtype: of the weight, as in every module of torch.

    Shape:
        input and residual ``(..., hidden_size)``; the results have the same shape.

    Raises:
        RuntimeError: as :func:`fused_add_rms_norm.add_rms_norm`.

    Example:
        >>> norm = AddRMSNorm(64)
        >>> x, residual = torch.randn(2, 64), None
        >>> x, residual = norm(x, residual)  # the first layer has no residual yet: x becomes it
        >>> x, residual = norm(x, residual)
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        casting_mode: CastingMode = "fp32",
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.offset = offset
        self.casting_mode: CastingMode = casting_mode
        weight = (
            nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        )
        self.register_parameter("weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight so that the scale ``offset + weight`` is one."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns ``(out, residual_out)``; without a residual, ``residual_out`` is the input itself."""
        if residual is None:
            out = rms_norm(input, self.weight, self.eps, offset=self.offset, casting_mode=self.casting_mode)
            return out, input
        return add_rms_norm(
            input, residual, self.weight, self.eps, offset=self.offset, casting_mode=self.casting_mode
        )

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, casting_mode={self.casting_mode!r}, "
            f"elementwise_affine={self.weight is not None}"
        )
