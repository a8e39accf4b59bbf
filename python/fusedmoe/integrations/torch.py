"""PyTorch operators: torch.ops.fusedmoe.fused_experts and fused_experts_out.

Importing this module registers them. They have fake implementations, so torch.compile and
torch.export keep them in the graph. On CUDA they run on the current stream; a CUDA graph can record
them after one call with the same weights and at least as many tokens, which packs and makes scratch
memory. There is no backward. Arguments: see fusedmoe.fused_experts().
"""

from typing import Any, Callable, Optional

import torch

from .. import experts

_library = torch.library.Library("fusedmoe", "FRAGMENT")
_NO_BACKWARD = "fusedmoe has no backward: run the model under torch.no_grad()"


class _NoBackward(torch.autograd.Function):
    """An operator's forward, for inputs that require a gradient."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(_NO_BACKWARD)


def _define(
    name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Registers torch.ops.fusedmoe.<name>. Not by torch.library.custom_op, which takes some 10 us more
    for a call."""
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(torch.ops.fusedmoe, name).default

    def autograd(*args: Any) -> Any:
        tensors = (x for x in args if isinstance(x, torch.Tensor))
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            if not operator._schema.returns:  # nothing would refuse later
                raise NotImplementedError(_NO_BACKWARD)
            return _NoBackward.apply(operator, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    _library.impl(name, autograd, "Autograd")
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake("fusedmoe::" + name, fake, lib=_library)


def _fused_experts_out(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Optional[str] = None,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Optional[torch.Tensor] = None,
    scheme: Optional[str] = None,
    w1_scale: Optional[torch.Tensor] = None,
    w2_scale: Optional[torch.Tensor] = None,
    w1_zp: Optional[torch.Tensor] = None,
    w2_zp: Optional[torch.Tensor] = None,
    w1_global_scale: Optional[torch.Tensor] = None,
    w2_global_scale: Optional[torch.Tensor] = None,
    a1_scale: Optional[torch.Tensor] = None,
    a2_scale: Optional[torch.Tensor] = None,
    w1_bias: Optional[torch.Tensor] = None,
    w2_bias: Optional[torch.Tensor] = None,
    alpha: Optional[float] = None,
    beta: Optional[float] = None,
    limit: Optional[float] = None,
    gate_up_layout: Optional[str] = None,
    transposed: bool = False,
) -> None:
    """Writes the experts' weighted sum to out (num_tokens, hidden)."""
    experts.fused_experts(
        hidden_states,
        w13,
        w2,
        topk_weights,
        topk_ids,
        out=out,
        activation=activation,
        apply_router_weight_on_input=apply_router_weight_on_input,
        global_num_experts=global_num_experts,
        expert_map=expert_map,
        scheme=scheme,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_zp=w1_zp,
        w2_zp=w2_zp,
        w1_global_scale=w1_global_scale,
        w2_global_scale=w2_global_scale,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        alpha=alpha,
        beta=beta,
        limit=limit,
        gate_up_layout=gate_up_layout,
        transposed=transposed,
    )


def _fused_experts(hidden_states: torch.Tensor, *args: Any) -> torch.Tensor:
    out = _fake(hidden_states)
    _fused_experts_out(out, hidden_states, *args)
    return out


def _fake(hidden_states: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


def _mutate(out: torch.Tensor, *args: Any) -> None:
    torch.autograd.graph.increment_version(out)
    _fused_experts_out(out, *args)


def _fake_out(*args: Any) -> None:
    return None


_schema = torch.library.infer_schema(_fused_experts_out, mutates_args=("out",))
_define("fused_experts_out", _schema, _mutate, _fake_out)
_schema = _schema.replace("Tensor(a0!) out, ", "").replace("-> ()", "-> Tensor")
assert "a0!" not in _schema and _schema.endswith("-> Tensor"), _schema
_define("fused_experts", _schema, _fused_experts, _fake)
