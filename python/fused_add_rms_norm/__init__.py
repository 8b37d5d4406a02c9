"""Fused residual-add + RMSNorm for PyTorch: ``h = input + residual; out = rms_norm(h) * weight`` in one pass.

The operators are ``torch.ops.fused.add_rms_norm`` and its family; this package gives them typed wrappers and
a module, and :mod:`fused_add_rms_norm.hf` puts them into Hugging Face models.
"""

from . import _torch  # noqa: F401  (tells torch of vmap, decompositions and sharding)
from ._ops import add_rms_norm, add_rms_norm_, rms_norm
from .decompositions import decompose_table
from .module import AddRMSNorm

__all__ = ["AddRMSNorm", "add_rms_norm", "add_rms_norm_", "decompose_table", "rms_norm"]
