"""On a GPU, without PyTorch: tensors of the library, CuPy's and JAX's."""

import os

import numpy as np
import pytest
from conftest import f32, golden_dir, need_cuda, plain_experts, relative_error

import fusedmoe

need_cuda()
# Both 8-bit and 16-bit weights, with and without shared experts.
GOLDEN = ("gpt_oss", "gpt_oss_mxfp4", "mixtral", "qwen3_moe_norm", "deepseek_v3", "llama4")


def on_gpu(array, dtype=None):
    tensor = fusedmoe.as_tensor(array)
    return (tensor if dtype is None else tensor.astype(dtype)).to("cuda:0")


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(name):
    path = golden_dir() / f"{name}.safetensors"
    layer = fusedmoe.MoELayer.from_checkpoint(path, device="cuda:0")
    tensors = fusedmoe.load_file(path)
    for tokens in (1, 7, 64):
        output = layer(on_gpu(tensors[f"io.T{tokens}.hidden_states"], "bf16"))
        assert output.device == "cuda:0"
        error = relative_error(f32(output.to("cpu")), f32(tensors[f"io.T{tokens}.output"]))
        assert error <= 1e-2, tokens


def test_tensors_of_the_library(problem):
    x = on_gpu(problem.x, "bf16")
    assert x.to("cuda:0") is x and x.device == "cuda:0"
    assert relative_error(f32(x.to("cpu")), problem.x) < 1e-2
    weights = on_gpu(problem.w13, "bf16"), on_gpu(problem.w2, "bf16")
    output = fusedmoe.fused_experts(x, *weights, on_gpu(problem.weights), on_gpu(problem.ids))
    assert relative_error(f32(output.to("cpu")), plain_experts(problem)) < 2e-2
    for wrong in (x.to("cpu"), on_gpu(problem.x[:4], "bf16")):
        with pytest.raises(ValueError):
            fusedmoe.fused_experts(wrong, *weights, on_gpu(problem.weights), on_gpu(problem.ids))


@pytest.mark.parametrize("package", ["cupy", "jax"])
def test_arrays_of_other_packages(problem, package):
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    module = pytest.importorskip(package)
    array = module.numpy.asarray if package == "jax" else module.asarray
    x, w13, w2 = (array(a.astype(np.float16)) for a in (problem.x, problem.w13, problem.w2))
    inputs = x, w13, w2, array(problem.weights), array(problem.ids)
    if package == "jax":
        module.block_until_ready(inputs)  # its streams do not wait for the default one
    output = fusedmoe.fused_experts(*inputs)
    assert output.device == "cuda:0" and output.dtype == "f16"
    back = (module.dlpack if package == "jax" else module).from_dlpack(output)
    back = np.asarray(back if package == "jax" else back.get()).astype(np.float32)
    assert relative_error(back, plain_experts(problem)) < 1e-2


def test_a_workspace_of_the_callers(problem):
    weights = on_gpu(problem.w13, "bf16"), on_gpu(problem.w2, "bf16")
    layer = fusedmoe.MoELayer.from_tensors(*weights, topk=2, num_experts=8, device="cuda:0")
    inputs = on_gpu(problem.x, "bf16"), on_gpu(problem.weights), on_gpu(problem.ids)
    scratch = fusedmoe.empty([layer.workspace_bytes(5)], "u8", "cuda:0")
    output = layer.forward_routed(*inputs, workspace=scratch)
    assert relative_error(f32(output.to("cpu")), plain_experts(problem)) < 2e-2
    with pytest.raises(ValueError, match="workspace"):
        layer.forward_routed(*inputs, workspace=fusedmoe.empty([64], "u8", "cuda:0"))
