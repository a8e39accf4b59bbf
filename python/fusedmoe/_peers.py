"""What the benchmark compares with: the experts of other packages, on the same weights.

A peer is made at its first call, so whatever it lacks is the error of that call.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Callable, Dict, Tuple

import torch

from ._problem import Problem

# (hidden_states, topk_weights, topk_ids) -> output
Candidate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_MOST_COPIED = 4.0  # GB


def peers(problem: Problem) -> Dict[str, Candidate]:
    """Those that are installed, by name."""
    makers: Dict[str, Callable[[Problem], Candidate]] = {}
    if importlib.util.find_spec("transformers"):
        for name in ("eager", "batched_mm", "grouped_mm"):
            makers[f"hf {name}"] = functools.partial(_of_transformers, name)
    if importlib.util.find_spec("vllm"):
        makers.update(vllm=_of_vllm, triton_kernels=_of_triton_kernels)
    if hasattr(torch.nn.functional, "grouped_mm"):
        makers["torch grouped_mm"] = _grouped_mm
    if hasattr(torch.nn.functional, "scaled_grouped_mm") and problem.scheme == "fp8_channel_token":
        makers["torch scaled_mm"] = _scaled_grouped_mm
    return {name: _at_first_call(make, problem) for name, make in makers.items()}


def _at_first_call(make: Callable[[Problem], Candidate], problem: Problem) -> Candidate:
    made = functools.lru_cache(maxsize=None)(lambda: make(problem))
    return lambda *inputs: made()(*inputs)


def _of_transformers(implementation: str, problem: Problem) -> Candidate:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    with torch.device("meta"):
        module = MixtralExperts(
            MixtralConfig(
                hidden_size=problem.hidden,
                intermediate_size=problem.intermediate,
                num_local_experts=problem.experts,
            )
        )
    module.gate_up_proj = torch.nn.Parameter(problem.w13, requires_grad=False)
    module.down_proj = torch.nn.Parameter(problem.w2, requires_grad=False)
    module.config._experts_implementation = implementation

    nbytes_of_expert = (problem.w13.nbytes + problem.w2.nbytes) / problem.experts

    def call(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        copied = ids.numel() * nbytes_of_expert / 1e9
        if implementation == "batched_mm" and copied > _MOST_COPIED:
            raise MemoryError(f"it copies an expert for each choice of a token: {copied:.0f} GB")
        result: torch.Tensor = module(x, ids.long(), weights.to(x.dtype))
        return result

    return call


GroupedGemm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # rows, where experts end


def _grouped(problem: Problem, gemm1: GroupedGemm, gemm2: GroupedGemm) -> Candidate:
    """The experts by two grouped products of rows that are sorted by expert."""

    def call(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        experts, order = ids.flatten().sort(stable=True)
        counts = torch.bincount(experts, minlength=problem.experts)
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = gemm1(x[order // problem.topk], ends).chunk(2, -1)
        rows = gemm2(torch.nn.functional.silu(gate) * up, ends)
        rows = rows * weights.flatten()[order, None]
        result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return result.index_add_(0, order // problem.topk, rows.float()).to(x.dtype)

    return call


def _grouped_mm(problem: Problem) -> Candidate:
    def gemm(weights: torch.Tensor) -> GroupedGemm:
        columns = weights.transpose(1, 2)
        return lambda rows, ends: torch.nn.functional.grouped_mm(rows, columns, offs=ends)

    return _grouped(problem, gemm(problem.w13), gemm(problem.w2))


def _scaled_grouped_mm(problem: Problem) -> Candidate:
    """E4M3 with a scale for each row of the weights and one for each token."""
    row_wise = torch.nn.functional.ScalingType.RowWise

    def gemm(stored: torch.Tensor, scales: torch.Tensor) -> GroupedGemm:
        columns = stored.view(torch.float8_e4m3fn).transpose(1, 2)
        column_scales = scales.reshape(stored.shape[:2]).float()

        def run(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            row_scales = rows.float().abs().amax(-1).clamp(min=1e-12) / 448
            quantized = (rows / row_scales[:, None]).to(torch.float8_e4m3fn)
            result: torch.Tensor = torch.nn.functional.scaled_grouped_mm(
                quantized, columns, row_scales, row_wise, column_scales, row_wise,
                offs=ends, output_dtype=problem.dtype,
            )  # fmt: skip
            return result

        return run

    (w13, w2), settings = problem.stored, problem.settings
    return _grouped(problem, gemm(w13, settings["w1_scale"]), gemm(w2, settings["w2_scale"]))


def _needs_a_gpu(problem: Problem, name: str) -> None:
    if problem.device.type != "cuda":
        raise NotImplementedError(f"{name} needs a GPU")


def _of_vllm(problem: Problem) -> Candidate:
    _needs_a_gpu(problem, "vLLM's fused_experts")
    from vllm.model_executor.layers.fused_moe import fused_experts

    return lambda x, weights, ids: fused_experts(x, problem.w13, problem.w2, weights, ids)


def _of_triton_kernels(problem: Problem) -> Candidate:
    """As vLLM calls the package, which it brings along."""
    _needs_a_gpu(problem, "triton_kernels")
    from vllm.model_executor.layers.fused_moe import config as vllm
    from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as theirs

    # Its activation is gate * sigmoid(gate) * (up + 1), so a bias of -1 on up makes it SwiGLU.
    bias = torch.zeros(problem.experts, 2 * problem.intermediate, device=problem.device)
    bias[:, 1::2] = -1
    if problem.scheme == "mxfp4_w4a16":
        (w13, scale13), (w2, scale2) = _mxfp4_of_triton_kernels(problem)
        config = vllm.mxfp4_w4a16_moe_quant_config(scale13, scale2, bias, None)
    else:
        w13, w2 = _interleaved(problem.w13).transpose(1, 2), problem.w2.transpose(1, 2)
        config = vllm.biased_moe_quant_config(bias, None)

    def call(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        routing = theirs.make_routing_data(ids, weights, problem.experts)
        result: torch.Tensor = theirs.triton_kernel_fused_experts(
            torch.empty_like(x), x, w13, w2, *routing, problem.topk,
            quant_config=config, swiglu_alpha=1.0, swiglu_limit=1e9,
        )  # fmt: skip
        return result

    return call


def _interleaved(w13: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up in turn."""
    gate, up = w13.chunk(2, 1)
    return torch.stack((gate, up), 2).reshape(w13.shape)


def _mxfp4_of_triton_kernels(problem: Problem) -> Tuple[Tuple[Any, Any], Tuple[Any, Any]]:
    """Weights and what holds their scales, for w13 and w2."""
    import vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe  # noqa: F401
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4

    def convert(values: torch.Tensor, scales: torch.Tensor) -> Tuple[Any, Any]:
        weights, flex, swizzled = _swizzle_mxfp4(values, scales)
        return weights, PrecisionConfig(weight_scale=swizzled, flex_ctx=FlexCtx(rhs_data=flex))

    (w13, w2), settings = problem.stored, problem.settings
    scale13 = _interleaved(settings["w1_scale"])
    return convert(_interleaved(w13), scale13), convert(w2, settings["w2_scale"])
