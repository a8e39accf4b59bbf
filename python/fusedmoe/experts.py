"""The experts alone, on an engine's own tensors and routing."""

from __future__ import annotations

import inspect
from typing import Optional

from . import _core
from ._arrays import Array, array, invalid, output_like, scratch_of, stream_of
from ._core import PackCache

_default_cache = PackCache()
setattr(PackCache, "__signature__", inspect.Signature())  # nanobind gives its classes none


def clear_cache() -> None:
    """Forgets what fused_experts() has packed: after weights have changed in place."""
    _default_cache.clear()


def fused_experts(
    hidden_states: Array,
    w13: Array,
    w2: Array,
    topk_weights: Array,
    topk_ids: Array,
    *,
    inplace: bool = False,
    out: Optional[Array] = None,
    activation: Optional[str] = None,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Optional[Array] = None,
    scheme: Optional[str] = None,
    w1_scale: Optional[Array] = None,
    w2_scale: Optional[Array] = None,
    w1_zp: Optional[Array] = None,
    w2_zp: Optional[Array] = None,
    w1_global_scale: Optional[Array] = None,
    w2_global_scale: Optional[Array] = None,
    a1_scale: Optional[Array] = None,
    a2_scale: Optional[Array] = None,
    w1_bias: Optional[Array] = None,
    w2_bias: Optional[Array] = None,
    alpha: Optional[float] = None,
    beta: Optional[float] = None,
    limit: Optional[float] = None,
    situ_beta: Optional[float] = None,
    situ_linear_beta: Optional[float] = None,
    gate_up_layout: Optional[str] = None,
    transposed: bool = False,
    scale_layout: Optional[str] = None,
    require: Optional[str] = None,
    stream: Optional[int] = None,
    cache: Optional[PackCache] = None,
) -> Array:
    """The experts' weighted sum over the routed tokens; names and meanings are vLLM's.

    The first call with some weights packs them, which takes long. Later calls with the same
    memory, shapes and settings reuse that. The cache keeps the packed weights and the arrays they
    came from: a program that wants one copy makes a MoELayer instead.

    Args:
        hidden_states: (num_tokens, hidden) f32, bf16 or f16; rows may have a stride.
        w13: (E, 2 * intermediate, hidden), gate rows before up rows; (E, intermediate, hidden)
            where the activation has no gate. Packed FP4: uint8, two values per byte of the last
            dimension.
        w2: (E, hidden, intermediate).
        topk_weights: (num_tokens, topk) float32.
        topk_ids: (num_tokens, topk) int32; global ids, -1 selects nothing.
        inplace: write to hidden_states.
        out: write to this array, which may be float32.
        activation: "silu" (default), "gelu", "swigluoai", ...
        apply_router_weight_on_input: scale the rows before the experts instead of their outputs.
        global_num_experts: -1: those of w13.
        expert_map: (global_num_experts) int32, global -> local expert or -1.
        scheme: of quantized weights, a name of schemes(): "mxfp4_w4a16", "fp8_block", ...
        w1_scale: of w13, with its leading dimensions; e4m3 and e8m0 also as uint8.
        w2_scale: of w2, likewise.
        w1_zp: zero points of w13.
        w2_zp: zero points of w2.
        w1_global_scale: of w13, one for each expert.
        w2_global_scale: of w2, one for each expert.
        a1_scale: static scale of the activations that w13 multiplies.
        a2_scale: static scale of those that w2 multiplies.
        w1_bias: of w13, with its leading dimensions.
        w2_bias: of w2, with its leading dimensions.
        alpha: of the activation.
        beta: of the activation.
        limit: of the activation.
        situ_beta: of the activation "situ".
        situ_linear_beta: of the activation "situ".
        gate_up_layout: "gate_up" (default), "up_gate" or "interleaved" rows of w13.
        transposed: w13 is (E, hidden, 2 * intermediate), w2 (E, intermediate, hidden).
        scale_layout: "flat" (default) or "tiled_128x4".
        require: an implementation by name, or an error; default: the best.
        stream: handle of a CUDA stream; default: PyTorch's current one for its tensors, else the
            default stream.
        cache: of the caller's; default: one for the process.

    Returns:
        (num_tokens, hidden), of the kind of hidden_states.

    Raises:
        ValueError: for arguments that do not fit each other.
        NotImplementedError: with the reasons where no implementation fits.
    """
    if inplace and out is not None and out is not hidden_states:
        raise invalid("inplace", "inplace cannot be used with out: both say where the output goes")
    if out is None:
        out = hidden_states if inplace else output_like(hidden_states)
    optional = {
        "activation": activation,
        "expert_map": expert_map,
        "scheme": scheme,
        "w1_scale": w1_scale,
        "w2_scale": w2_scale,
        "w1_zp": w1_zp,
        "w2_zp": w2_zp,
        "w1_global_scale": w1_global_scale,
        "w2_global_scale": w2_global_scale,
        "a1_scale": a1_scale,
        "a2_scale": a2_scale,
        "w1_bias": w1_bias,
        "w2_bias": w2_bias,
        "alpha": alpha,
        "beta": beta,
        "limit": limit,
        "situ_beta": situ_beta,
        "situ_linear_beta": situ_linear_beta,
        "gate_up_layout": gate_up_layout,
        "scale_layout": scale_layout,
        "require": require,
    }
    settings = {name: array(x) for name, x in optional.items() if x is not None}
    if apply_router_weight_on_input:
        settings["apply_router_weight_on_input"] = True
    if transposed:
        settings["transposed"] = True
    if global_num_experts != -1:
        settings["global_num_experts"] = global_num_experts
    _core.fused_experts(
        _default_cache if cache is None else cache,
        array(hidden_states),
        array(w13),
        array(w2),
        array(topk_weights),
        array(topk_ids),
        array(out),
        settings,
        stream_of(hidden_states, stream),
        scratch_of(hidden_states, stream),
    )
    return out
