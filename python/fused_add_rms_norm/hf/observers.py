"""Who may be watching a module. Whoever does gets upstream's tensors, and what he watches is not fused.

`of_norm` and `of_layer` return the reason in words, or None. All of these run at every forward, and inside
torch.compile: plain reads only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.utils.output_capturing import _active_collector

_CAPTURE = "transformers.utils.output_capturing"
_FSDP = "torch.distributed.fsdp"

# What upstream may capture without looking at the stream between layers.
_INSIDE_LAYERS = ("attentions", "router_logits")


def of_norm(norm: nn.Module) -> str | None:
    """Why the norm must run as upstream's module. FSDP2's hooks are no friends here: they unshard weights."""
    if norm._forward_pre_hooks or norm._forward_hooks:
        return "a forward hook"
    return _of_any(norm)


def of_layer(layer: nn.Module) -> str | None:
    """Why what enters and leaves the layer must be tensors."""
    if layer._forward_pre_hooks or layer._forward_hooks:
        for hook in (*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()):
            module = getattr(hook, "__module__", None) or ""
            if module == _CAPTURE:
                # These stay after their first use. What they will do in this call, their collector knows.
                collected = _active_collector.get()
                if collected is not None and any(key not in _INSIDE_LAYERS for key in collected):
                    return "output_hidden_states"
            elif not module.startswith(_FSDP):
                return "a forward hook"
    # Two tensors would be kept instead of one, and reentrant checkpointing follows gradients of tensors only.
    if getattr(layer, "gradient_checkpointing", False) and layer.training:
        return "gradient checkpointing"
    return _of_any(layer)


def is_plain_call(layer: nn.Module) -> bool:
    """Whether ``nn.Module.__call__`` would do nothing but call the class's forward: an eager call is then
    spared its frames. A traced one is not: every look here would be a guard, and graphs name their modules.
    """
    if torch.compiler.is_compiling() or layer._compiled_call_impl:
        return False
    return not (layer._forward_pre_hooks or layer._forward_hooks or "forward" in layer.__dict__)


def _of_any(module: nn.Module) -> str | None:
    if module._backward_pre_hooks or module._backward_hooks:
        return "a backward hook"
    if _has_any_global_hook():
        return "a global module hook"
    forward = module.__dict__.get("forward")
    if forward is not None and not _harmless(module, forward):
        return "a forward of its own"
    return None


def _harmless(module: nn.Module, forward: Any) -> bool:
    """The class's own forward bound to the instance, or accelerate's wrapper where it only moves inputs."""
    if getattr(forward, "__func__", None) is type(module).forward:
        return True
    hook: Any = module.__dict__.get("_hf_hook")
    return (
        getattr(getattr(forward, "func", None), "__module__", None) == "accelerate.hooks"
        and type(hook).__name__ == "AlignDevicesHook"
        and not hook.offload
    )
