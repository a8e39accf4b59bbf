"""Routers: hidden states -> logits -> top-k ids and weights. Host memory."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from . import _core
from ._arrays import array, given, returned_to


def router_logits(hidden_states: Any, weight: Any, bias: Any = None) -> Any:
    """(num_tokens, num_experts) f32 = hidden_states weight^T + bias, accumulated in fp32.

    hidden_states (num_tokens, hidden), weight (num_experts, hidden), bias (num_experts); f32, bf16
    or f16, contiguous. Returns an array of the kind of hidden_states: NumPy's, PyTorch's or a
    Tensor. Raises ValueError.
    """
    logits = _core.router_logits(array(hidden_states), array(weight), array(bias))
    return returned_to(hidden_states, logits)


def route(
    router_logits: Any,
    topk: int,
    *,
    scoring_func: str = "softmax",
    renormalize: bool = False,
    renormalize_epsilon: Optional[float] = None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    e_score_correction_bias: Any = None,
    routed_scaling_factor: Optional[float] = None,
    sparsemixer_jitter: Optional[float] = None,
) -> Tuple[Any, Any]:
    """topk_weights f32 and topk_ids i32, both (num_tokens, topk), by descending selection score;
    arrays of the kind of router_logits: NumPy's, PyTorch's or Tensors.

    router_logits: (num_tokens, num_experts) f32, bf16 or f16.
    scoring_func: "softmax", "sigmoid" or "sqrtsoftplus" of all logits before top-k; "topk_softmax"
        or "topk_sigmoid" of the chosen ones; "logits"; "sparsemixer" (PhiMoE).
    renormalize: divides the weights by their sum plus renormalize_epsilon (default 1e-20).
    num_expert_group, topk_group: grouped top-k (DeepSeek).
    e_score_correction_bias: (num_experts) f32, for the choice only.
    routed_scaling_factor: multiplies the weights.
    sparsemixer_jitter: how near logits must be to count (default 0.01).

    Raises ValueError.
    """
    settings = given(
        {
            "topk": topk,
            "scoring_func": scoring_func,
            "renormalize": renormalize,
            "renormalize_epsilon": renormalize_epsilon,
            "num_expert_group": num_expert_group,
            "topk_group": topk_group,
            "routed_scaling_factor": routed_scaling_factor,
            "sparsemixer_jitter": sparsemixer_jitter,
        }
    )
    weights, ids = _core.route(array(router_logits), array(e_score_correction_bias), settings)
    return returned_to(router_logits, weights), returned_to(router_logits, ids)
