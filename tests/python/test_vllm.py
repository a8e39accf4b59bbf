"""The experts in vLLM's modular kernel, on tensors of each device, where vLLM can be imported.

The platform is a stand-in: vLLM's own for CUDA needs its compiled parts.
"""

import pytest
from conftest import devices

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm.platforms  # noqa: E402
from vllm.model_executor.layers.fused_moe import config as moe_config  # noqa: E402
from vllm.model_executor.layers.fused_moe import modular_kernel as mk  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.oracle import mxfp4, unquantized  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.v1.worker import workspace  # noqa: E402

import fusedmoe  # noqa: E402
from fusedmoe.integrations import vllm as plugin  # noqa: E402

EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 8, 2, 64, 96


class Gpu(CpuPlatform):
    def is_cpu(self):
        return False

    def is_cuda(self):
        return True


@pytest.fixture(params=devices())
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def chosen(monkeypatch, device):
    platform = CpuPlatform() if device == "cpu" else Gpu()
    for module in (vllm.platforms, plugin, mk, unquantized, mxfp4):
        monkeypatch.setattr(module, "current_platform", platform, raising=False)
    manager = workspace.WorkspaceManager(torch.device(device), num_ubatches=1)
    monkeypatch.setattr(workspace, "_manager", manager)
    for module, name in (
        (unquantized, "select_unquantized_moe_backend"),
        (mxfp4, "select_mxfp4_moe_backend"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored afterwards
    monkeypatch.setenv("FUSEDMOE_VLLM", "1")
    plugin.register()


def config_of(dtype, device="cpu", **settings):
    return moe_config.FusedMoEConfig(
        **{
            "num_experts": EXPERTS,
            "experts_per_token": TOPK,
            "hidden_dim": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_local_experts": EXPERTS,
            "num_logical_experts": EXPERTS,
            "activation": MoEActivation.SILU,
            "device": device,
            "routing_method": moe_config.RoutingMethodType.Renormalize,
            "moe_parallel_config": moe_config.FusedMoEParallelConfig.make_no_parallel(),
            "in_dtype": dtype,
            **settings,
        }
    )


def run(oracle_kernel, layer, x, weights, ids, activation, on_input=False):
    oracle_kernel.fused_experts.process_weights_after_loading(layer)
    return oracle_kernel.apply(
        x, layer.w13_weight, layer.w2_weight, weights, ids, activation, EXPERTS, None, on_input
    )


def layer_of(w13, w2, **others):
    layer = torch.nn.Module()
    for name, tensor in {"w13_weight": w13, "w2_weight": w2, **others}.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return layer


def assert_same(output, expected):
    """To the last bit: the same kernels ran on the same bytes."""
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


@pytest.fixture
def problem(device):
    torch.manual_seed(0)
    weights, ids = torch.softmax(torch.randn(5, EXPERTS), -1).topk(TOPK)
    tensors = (
        torch.randn(5, HIDDEN),
        torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 8,
        torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / 8,
        weights,
        ids.to(torch.int32),
    )
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unquantized_weights(problem, dtype, on_input, device):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("no kernel of a GPU takes float32")
    x, w13, w2, weights, ids = problem
    x, w13, w2 = (tensor.to(dtype) for tensor in (x, w13, w2))
    if on_input:
        weights, ids = weights[:, :1].contiguous(), ids[:, :1].contiguous()
    config = config_of(x.dtype, device, experts_per_token=ids.shape[1])
    backend, experts = unquantized.select_unquantized_moe_backend(config)
    assert experts is plugin.FusedMoeExperts
    kernel = unquantized.make_unquantized_moe_kernel(
        moe_config.FUSED_MOE_UNQUANTIZED_CONFIG, config, backend, experts
    )
    layer = layer_of(w13, w2)
    output = run(kernel, layer, x, weights, ids, MoEActivation.SILU, on_input)
    expected = fusedmoe.fused_experts(
        x * weights.to(x.dtype) if on_input else x, w13, w2,  # as vLLM rounds
        torch.ones_like(weights) if on_input else weights, ids,
    )
    assert_same(output, expected)
    assert layer.w13_weight.untyped_storage().nbytes() == x.itemsize  # vLLM's copy is freed


def test_mxfp4_weights_of_gpt_oss(problem, device):
    x, w13, w2, weights, ids = problem
    x = x.to(torch.bfloat16)
    config = config_of(torch.bfloat16, device, activation=MoEActivation.SWIGLUOAI, has_bias=True)
    backend, experts = mxfp4.select_mxfp4_moe_backend(config)
    tensors, settings = {}, {"scheme": "mxfp4_w4a16"}
    for ours, theirs, source in (("w1", "w13", w13), ("w2", "w2", w2)):
        matrices = [fusedmoe.quantize_weights(w.cpu(), "mxfp4_w4a16") for w in source]
        values, scales = (
            torch.stack([torch.from_dlpack(m[part].view("u8")) for m in matrices]).to(device)
            for part in (0, 1)
        )
        bias = torch.randn(source.shape[:2]).to(device, torch.bfloat16)
        tensors.update({theirs + "_weight": values, theirs + "_bias": bias})
        tensors[theirs + "_weight_scale"] = scales
        settings.update({ours + "_scale": scales, ours + "_bias": bias})
    layer = layer_of(tensors.pop("w13_weight"), tensors.pop("w2_weight"), **tensors)
    stored = layer.w13_weight.data, layer.w2_weight.data
    quant_config = mxfp4.make_mxfp4_moe_quant_config(
        backend, layer.w13_weight_scale, layer.w2_weight_scale,
        w1_bias=layer.w13_bias, w2_bias=layer.w2_bias,
    )
    kernel = mxfp4.make_mxfp4_moe_kernel(quant_config, config, experts, backend)
    output = run(kernel, layer, x, weights, ids, MoEActivation.SWIGLUOAI)
    expected = fusedmoe.fused_experts(
        x, *stored, weights, ids, activation="swigluoai", gate_up_layout="interleaved", **settings
    )
    assert_same(output, expected)


def test_what_cannot_be_served_says_why():
    with pytest.raises(ValueError, match="fusedmoe cannot serve.*RELU2"):
        unquantized.select_unquantized_moe_backend(
            config_of(torch.float32, activation=MoEActivation.RELU2)
        )
    with pytest.raises(ValueError, match="LoRA"):
        mxfp4.select_mxfp4_moe_backend(config_of(torch.bfloat16, is_lora_enabled=True))
