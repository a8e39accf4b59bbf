"""fusedmoe's experts in vLLM's modular kernel.

A plugin of vLLM (entry point vllm.general_plugins). It does nothing unless it is chosen:

    FUSEDMOE_VLLM=1 vllm serve openai/gpt-oss-20b

Then every MoE layer with unquantized or MXFP4 weights runs on FusedMoeExperts; one that it cannot
serve is an error that says why. The experts are packed after loading, and vLLM's own copy is freed,
so weights cannot be updated in place. Made for the interface of vLLM 0.33.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Callable, Dict, Optional, Tuple, cast

import torch
import vllm.envs as envs
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.oracle import mxfp4, unquantized
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from .. import device_problem, explain
from ..layer import MoELayer
from ..options import ExpertSettings

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def register() -> None:
    """What vLLM calls in each of its processes."""
    if os.environ.get("FUSEDMOE_VLLM") == "1":
        _replace(unquantized.select_unquantized_moe_backend, _select_unquantized)
        _replace(mxfp4.select_mxfp4_moe_backend, _select_mxfp4)


def _replace(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Wherever vLLM has imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and getattr(module, function.__name__, None) is function:
            setattr(module, function.__name__, other)


def _select_unquantized(moe_config: Any) -> Tuple[Any, Any]:
    _check(moe_config, None)
    backend = unquantized.UnquantizedMoeBackend  # both leave the weights as they were loaded
    return backend.CPU if current_platform.is_cpu() else backend.TRITON, FusedMoeExperts


def _select_mxfp4(config: Any, activation_key: Any = None) -> Tuple[Any, Any]:
    if activation_key is not None:
        raise ValueError(f"fusedmoe: MXFP4 weights with activations of {activation_key}")
    _check(config, kMxfp4Static)
    # Of this one weights stay as published; only vLLM's own class for it would emulate.
    return mxfp4.Mxfp4MoeBackend.EMULATION, FusedMoeExperts


def _check(moe_config: Any, weight_key: Any) -> None:
    batched = moe_config.moe_parallel_config.use_batched_activation_format
    formats = mk.FusedMoEActivationFormat
    supported, reason = FusedMoeExperts.is_supported_config(
        FusedMoeExperts,
        moe_config,
        weight_key,
        None,
        formats.BatchedExperts if batched else formats.Standard,
    )
    if not supported:
        raise ValueError(f"fusedmoe cannot serve this MoE layer: {reason}")


class FusedMoeExperts(mk.FusedMoEExpertsModular):
    """Experts of one layer: unquantized or MXFP4 weights, activations in 16 or 32 bits."""

    _layer: Optional[MoELayer] = None

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu() or (
            current_platform.is_cuda() and not device_problem("cuda:0")
        )

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return activation_key is None and weight_key in (None, kMxfp4Static)

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        try:
            explain(num_experts=1, topk=1, hidden=64, intermediate=64, activation=activation.value)
        except ValueError:
            return activation.value == "situ"  # known, but not without its parameters
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.enable_eplb  # which moves experts between forwards

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()  # apply() has done it

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        w13, w2 = layer.w13_weight, layer.w2_weight
        config, params = self.moe_config, self.activation_config
        weights: Dict[str, Any] = {"activation": config.activation.value}
        if config.activation.value == "swigluoai":
            weights["gate_up_layout"] = "interleaved"
            given = self.quant_config.gemm1_alpha or config.swiglu_alpha
            weights.update(alpha=given, limit=params.clamp_limit)
        elif config.activation.value == "swigluoai_uninterleave":
            weights.update(alpha=params.alpha, beta=params.beta, limit=params.clamp_limit)
        elif config.activation.value == "situ":
            weights["situ_beta"] = params.activation_situ_beta
            weights["situ_linear_beta"] = params.activation_situ_linear_beta
        else:
            weights["limit"] = params.clamp_limit
        weights.update(w1_bias=self.w1_bias, w2_bias=self.w2_bias)
        if w13.dtype == torch.uint8:
            weights.update(scheme="mxfp4_w4a16", w1_scale=self.w1_scale, w2_scale=self.w2_scale)
        local = config.num_local_experts == config.num_experts
        self._layer = MoELayer.from_tensors(
            w13,
            w2,
            topk=config.experts_per_token,
            num_experts=config.num_experts,
            expert_map=None if local else layer.expert_map,
            weights=cast(ExpertSettings, weights),
            dtype=_DTYPES[config.in_dtype],
            device=str(w13.device),
            ep_size=config.moe_parallel_config.ep_size,
            ep_rank=config.moe_parallel_config.ep_rank,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )
        for name in ("w13_weight", "w2_weight"):  # vLLM still asks for their shapes
            shape, one = getattr(layer, name).shape, torch.zeros(1, dtype=w13.dtype)
            replace_parameter(layer, name, one.to(w13.device).expand(shape))

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> Tuple[Tuple[int, ...], Tuple[int, ...], Tuple[int, ...]]:
        """All scratch memory is workspace2, in rows of one token as vLLM asks."""
        assert self._layer is not None, "weights were not loaded"
        hidden = int(self._layer.info["hidden"])
        elements = -(-self._layer.workspace_bytes(M) // self.moe_config.in_dtype.itemsize)
        return (0,), (M, -(-elements // M)), (M, hidden)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Optional[torch.Tensor],
        a1q_scale: Optional[torch.Tensor],
        a2_scale: Optional[torch.Tensor],
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes the weighted sum to output."""
        assert self._layer is not None, "weights were not loaded"
        if activation != self.moe_config.activation:
            raise ValueError(f"fusedmoe: packed for {self.moe_config.activation}, not {activation}")
        if apply_router_weight_on_input:  # vLLM has done it
            topk_weights = torch.ones_like(topk_weights)
        self._layer.forward_routed(
            hidden_states,
            topk_weights.to(torch.float32),
            topk_ids.to(torch.int32),
            out=output,
            workspace=workspace2.view(torch.uint8).flatten(),
        )
