"""The experts modules of transformers, computed by fusedmoe."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, Dict, NamedTuple, Tuple, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.integrations import moe
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from ..layer import MoELayer
from ..options import ExpertSettings

_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class FusedExperts(torch.nn.Module):
    """The experts of one layer, packed from a checkpoint. It has no parameters."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer
        self.num_experts = int(layer.info["num_experts"])

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As the experts module that it stands for; see experts_forward()."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)

    def extra_repr(self) -> str:
        return self.layer.plan_line


class _Packed(NamedTuple):
    made_of: Tuple[Any, ...]
    layer: MoELayer


# Beside the modules, so that a model can still be copied and saved.
_packed: "weakref.WeakKeyDictionary[torch.nn.Module, _Packed]" = weakref.WeakKeyDictionary()
_modules: "weakref.WeakValueDictionary[int, torch.nn.Module]" = weakref.WeakValueDictionary()


def forget(model: torch.nn.Module) -> None:
    """Drops what the model's experts are packed into; the next forward packs them again."""
    for module in model.modules():
        _packed.pop(module, None)


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The forward of an experts module.

    Args:
        self: the module, whose parameters are the weights.
        hidden_states: (num_tokens, hidden).
        top_k_index: (num_tokens, topk); ids of num_experts and more mean "no expert".
        top_k_weights: (num_tokens, topk).

    Returns:
        (num_tokens, hidden).
    """
    if torch.is_grad_enabled() and (
        hidden_states.requires_grad or top_k_weights.requires_grad
    ):
        raise NotImplementedError("fusedmoe has no backward: run the model under torch.no_grad()")
    if _is_traced(hidden_states):
        return _experts_of_module(hidden_states, top_k_index, top_k_weights, _remember(id(self)))
    return _compute(self, hidden_states, top_k_index, top_k_weights)


def _is_traced(x: torch.Tensor) -> bool:
    """Whether somebody records operators. Otherwise a plain call saves 100 us."""
    plain = type(x) is torch.Tensor and not is_in_torch_dispatch_mode()
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or not plain


@torch.compiler.assume_constant_result
def _remember(address: int) -> int:
    """Finds the module again by its id(): graphs hold tensors and numbers only.

    Not every PyTorch (2.11) calls a function while it compiles that takes the module itself.
    """
    _modules[address] = ctypes.cast(address, ctypes.py_object).value
    return address


@torch.library.custom_op("fusedmoe::experts_of_module", mutates_args=())
def _experts_of_module(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, module: int
) -> torch.Tensor:
    return _compute(_modules[module], hidden_states, top_k_index, top_k_weights)


@_experts_of_module.register_fake
def _fake(hidden_states: torch.Tensor, *args: object) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


def _compute(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    if isinstance(self, FusedExperts):
        layer, num_experts = self.layer, self.num_experts
    else:
        num_experts = int(getattr(self, "num_experts"))
        layer = _layer_of(self, num_experts, top_k_index.shape[-1], hidden_states)
    ids = top_k_index.to(torch.int32)
    if not ids.is_cuda:  # on the CPU the layer refuses ids of no expert
        ids = ids.masked_fill(ids >= num_experts, -1)
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
        # The weak reference keeps a storage's identity, so none that comes later can equal it.
        storage = StorageWeakRef(tensor.untyped_storage())
        # PyTorch does not count changes of tensors that were made in inference mode.
        version = None if tensor.is_inference() else tensor._version
        made_of += (storage, tensor.data_ptr(), version, tensor.dtype, tensor.shape)
    packed = _packed.get(self)
    if packed is not None and packed.made_of == made_of:
        return packed.layer
    del packed
    _packed.pop(self, None)  # its memory goes before the new layer takes its own
    if hidden_states.dtype not in DTYPES:
        raise NotImplementedError(f"fusedmoe: hidden states of {hidden_states.dtype}")
    w13, w2 = tensors.pop("w13"), tensors.pop("w2")
    layer = MoELayer.from_tensors(
        w13,
        w2,
        topk=topk,
        num_experts=num_experts,
        weights=cast(ExpertSettings, {**_settings_of(self), **tensors}),
        apply_router_weight_on_input=isinstance(self, Llama4TextExperts),
        dtype=DTYPES[hidden_states.dtype],
        device=str(hidden_states.device),
    )
    _packed[self] = _Packed(made_of, layer)
    return layer


def _tensors_of(self: torch.nn.Module) -> Dict[str, torch.Tensor]:
    """w13 and w2, and their biases where the module has some."""
    first = "gate_up_proj" if getattr(self, "has_gate", True) else "up_proj"
    names = {"w13": first, "w2": "down_proj"}
    if getattr(self, "has_bias", False):
        names.update(w1_bias=first + "_bias", w2_bias="down_proj_bias")
    tensors = {ours: getattr(self, theirs, None) for ours, theirs in names.items()}
    for ours, theirs in names.items():
        if not isinstance(tensors[ours], torch.Tensor):
            raise NotImplementedError(f"fusedmoe: {type(self).__name__}.{theirs} is no tensor")
    return {ours: tensor for ours, tensor in tensors.items() if tensor is not None}


def _settings_of(self: torch.nn.Module) -> Dict[str, Any]:
    """Layout of the weights, and the activation between the two GEMMs."""
    module = type(self).__name__
    if isinstance(self, Llama4TextExperts):
        return {"transposed": True, "activation": _activation_of(self, gated=True)}
    settings: Dict[str, Any] = {"transposed": bool(getattr(self, "is_transposed"))}
    gated = bool(getattr(self, "has_gate"))
    if gated and not getattr(self, "is_concatenated"):
        settings["gate_up_layout"] = "interleaved"
    if getattr(self, "has_post_expert_norm", False):
        raise NotImplementedError(f"fusedmoe: {module} normalizes the output of each expert")
    if module == "GptOssExperts":
        alpha, limit = float(getattr(self, "alpha")), float(getattr(self, "limit"))
        return {**settings, "activation": "swigluoai", "alpha": alpha, "limit": limit}
    if getattr(type(self), "_apply_gate", None) is not moe._default_apply_gate:
        raise NotImplementedError(f"fusedmoe: {module} has a gate of its own, _apply_gate")
    return {**settings, "activation": _activation_of(self, gated)}


def _activation_of(self: torch.nn.Module, gated: bool) -> str:
    function = getattr(self, "act_fn", None)
    name = _ACTIVATIONS.get(type(function).__name__)
    if name is None or (name == "relu2" and gated):
        raise NotImplementedError(
            f"fusedmoe: {type(self).__name__} has the activation {function}"
        )
    return name if gated else name + "_no_mul"
