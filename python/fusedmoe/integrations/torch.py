"""PyTorch operators: torch.ops.fusedmoe.fused_experts and fused_experts_out.

Importing this module registers them. They have fake implementations, so torch.compile and
torch.export keep them in the graph. On CUDA they run on the current stream; a CUDA graph can record
them after one call with the same weights and at least as many tokens, which packs and makes scratch
memory. There is no backward. Arguments: see fusedmoe.fused_experts().
"""

from typing import Optional

import torch

from .. import experts


@torch.library.custom_op("fusedmoe::fused_experts_out", mutates_args=("out",))
def fused_experts_out(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
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
    gate_up_layout: str = "gate_up",
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


# The same schema without `out`, with a result instead.
_SCHEMA = str(torch.ops.fusedmoe.fused_experts_out.default._schema)
_SCHEMA = _SCHEMA[_SCHEMA.index("(") :].rsplit(" -> ", 1)[0].replace("Tensor(a0!) out, ", "")


def _fused_experts(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    fused_experts_out(out, hidden_states, *args, **kwargs)
    return out


fused_experts = torch.library.custom_op(
    "fusedmoe::fused_experts", _fused_experts, mutates_args=(), schema=_SCHEMA + " -> Tensor"
)


@fused_experts_out.register_fake
def _fake_out(*args: object, **kwargs: object) -> None:
    return None


@fused_experts.register_fake
def _fake(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
