"""Experts of Hugging Face transformers 5 by fusedmoe.

    fusedmoe.integrations.transformers.register()
    model.set_experts_implementation("fusedmoe")

The experts of a layer are packed at its first forward, from where they are: the model keeps its own
copy. Packing happens again after weights have moved or changed in place. A layer that cannot be
served raises NotImplementedError that says why; nothing else runs instead. For inference: there is
no backward.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
from transformers.integrations import moe

from ..layer import MoELayer

_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_PACKED = "_fusedmoe_packed"  # attribute of an experts module: (what it was made of, the layer)


def register(name: str = "fusedmoe") -> None:
    """Adds the implementation to transformers' experts interface."""
    moe.ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The forward of an experts module.

    hidden_states (num_tokens, hidden); top_k_index and top_k_weights (num_tokens, topk). Ids of
    num_experts and more mean "no expert". Returns (num_tokens, hidden).
    """
    if torch.is_grad_enabled() and (
        hidden_states.requires_grad or top_k_weights.requires_grad
    ):
        raise NotImplementedError("fusedmoe has no backward: run the model under torch.no_grad()")
    num_experts = int(getattr(self, "num_experts"))
    ids = top_k_index.masked_fill(top_k_index >= num_experts, -1).to(torch.int32)
    layer = _layer_of(self, num_experts, ids.shape[-1], hidden_states)
    result = layer.forward_routed(
        hidden_states.contiguous(), top_k_weights.to(torch.float32).contiguous(), ids.contiguous()
    )
    assert isinstance(result, torch.Tensor)
    return result


def _layer_of(
    self: torch.nn.Module, num_experts: int, topk: int, hidden_states: torch.Tensor
) -> MoELayer:
    tensors = _tensors_of(self)
    made_of: Tuple[Any, ...] = (topk, hidden_states.dtype, hidden_states.device)
    for tensor in tensors.values():
        made_of += (tensor.data_ptr(), tensor._version, tensor.dtype)
    packed = self.__dict__.get(_PACKED)
    if packed is not None and packed[0] == made_of:
        layer = packed[1]
        assert isinstance(layer, MoELayer)
        return layer
    self.__dict__.pop(_PACKED, None)  # its memory goes before the new layer takes its own
    if hidden_states.dtype not in _DTYPES:
        raise NotImplementedError(f"fusedmoe: hidden states of {hidden_states.dtype}")
    w13, w2 = tensors.pop("w13"), tensors.pop("w2")
    weights: Dict[str, Any] = {**_activation_of(self), **tensors}
    weights["transposed"] = bool(getattr(self, "is_transposed"))
    if getattr(self, "has_gate") and not getattr(self, "is_concatenated"):
        weights["gate_up_layout"] = "interleaved"
    layer = MoELayer.from_tensors(
        w13,
        w2,
        topk=topk,
        num_experts=num_experts,
        weights=weights,
        dtype=_DTYPES[hidden_states.dtype],
        device=str(hidden_states.device),
    )
    self.__dict__[_PACKED] = (made_of, layer)
    return layer


def _tensors_of(self: torch.nn.Module) -> Dict[str, torch.Tensor]:
    """w13 and w2, and their biases where the module has some."""
    first = "gate_up_proj" if getattr(self, "has_gate") else "up_proj"
    names = {"w13": first, "w2": "down_proj"}
    if getattr(self, "has_bias"):
        names.update(w1_bias=first + "_bias", w2_bias="down_proj_bias")
    tensors = {ours: getattr(self, theirs, None) for ours, theirs in names.items()}
    for ours, theirs in names.items():
        if not isinstance(tensors[ours], torch.Tensor):
            raise NotImplementedError(f"fusedmoe: {type(self).__name__}.{theirs} is no tensor")
    return {ours: tensor for ours, tensor in tensors.items() if tensor is not None}


def _activation_of(self: torch.nn.Module) -> Dict[str, Any]:
    """Settings of the activation between the two GEMMs."""
    module = type(self).__name__
    if getattr(self, "has_post_expert_norm", False):
        raise NotImplementedError(f"fusedmoe: {module} normalizes the output of each expert")
    if module == "GptOssExperts":
        alpha, limit = float(getattr(self, "alpha")), float(getattr(self, "limit"))
        return {"activation": "swigluoai", "alpha": alpha, "limit": limit}
    if getattr(type(self), "_apply_gate", None) is not moe._default_apply_gate:
        raise NotImplementedError(f"fusedmoe: {module} has a gate of its own, _apply_gate")
    function: Optional[torch.nn.Module] = getattr(self, "act_fn", None)
    name = _ACTIVATIONS.get(type(function).__name__)
    if name is None or (name == "relu2" and getattr(self, "has_gate")):
        raise NotImplementedError(f"fusedmoe: {module} has the activation {function}")
    return {"activation": name if getattr(self, "has_gate") else name + "_no_mul"}
