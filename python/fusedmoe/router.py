"""Routers: hidden states -> logits -> top-k ids and weights. Host memory."""

from __future__ import annotations

from typing import Optional, Tuple

from . import _core
from ._arrays import Array, array, given, returned_to


def router_logits(hidden_states: Array, weight: Array, bias: Optional[Array] = None) -> Array:
    """(num_tokens, num_experts) f32 = hidden_states weight^T + bias, accumulated in fp32.

    All are f32, bf16 or f16, and contiguous.

    Args:
        hidden_states: (num_tokens, hidden).
        weight: (num_experts, hidden).
        bias: (num_experts).

    Returns:
        An array of the kind of hidden_states: NumPy's, PyTorch's or a Tensor.

    Raises:
        ValueError: for arrays that do not fit each other.
    """
    logits = _core.router_logits(array(hidden_states), array(weight), array(bias))
    return returned_to(hidden_states, logits)


def route(
    router_logits: Array,
    topk: int,
    *,
    scoring_func: str = "softmax",
    renormalize: bool = False,
    renormalize_epsilon: Optional[float] = None,
    num_expert_group: int = 0,
    topk_group: int = 0,
    e_score_correction_bias: Optional[Array] = None,
    routed_scaling_factor: Optional[float] = None,
    sparsemixer_jitter: Optional[float] = None,
) -> Tuple[Array, Array]:
    """The experts of each token and their weights, by descending selection score.

    Args:
        router_logits: (num_tokens, num_experts) f32, bf16 or f16.
        topk: experts of a token.
        scoring_func: "softmax", "sigmoid" or "sqrtsoftplus" of all logits before top-k;
            "topk_softmax" or "topk_sigmoid" of the chosen ones; "logits"; "sparsemixer" (PhiMoE).
        renormalize: divide the weights by their sum plus renormalize_epsilon.
        renormalize_epsilon: default: 1e-20.
        num_expert_group: of grouped top-k (DeepSeek): how many groups there are.
        topk_group: of grouped top-k: how many groups a token chooses from.
        e_score_correction_bias: (num_experts) f32, for the choice only.
        routed_scaling_factor: multiplies the weights.
        sparsemixer_jitter: how near logits must be to count (default 0.01).

    Returns:
        topk_weights f32 and topk_ids i32, both (num_tokens, topk), of the kind of router_logits:
            NumPy's, PyTorch's or Tensors.

    Raises:
        ValueError: for arrays and settings that do not fit each other.
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
