"""PyTorch: tensors in and out, and the operators, where torch is."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import fusedmoe  # noqa: E402
import fusedmoe.integrations.torch  # noqa: E402, F401


@pytest.fixture
def tensors():
    """hidden_states, w13, w2, topk_weights, topk_ids of 8 experts, top-2, 5 tokens."""
    torch.manual_seed(0)
    w13, w2 = torch.randn(8, 64, 64) / 8, torch.randn(8, 64, 32) / 6
    weights, ids = torch.softmax(torch.randn(5, 8), -1).topk(2)
    return torch.randn(5, 64), w13, w2, weights, ids.to(torch.int32)


def plain_experts(x, w13, w2, weights, ids):
    gate, up = torch.einsum("tkih,th->tki", w13[ids.long()], x).chunk(2, -1)
    act = torch.nn.functional.silu(gate) * up
    return torch.einsum("tkhi,tki,tk->th", w2[ids.long()], act, weights)


class OfAUser(torch.Tensor):
    pass


def test_tensors_of_pytorch(tensors):
    expected = plain_experts(*tensors)
    output = fusedmoe.fused_experts(*tensors)
    assert isinstance(output, torch.Tensor)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    x, w13, w2, *routing = tensors
    parameters = torch.nn.Parameter(w13), w2.clone().as_subclass(OfAUser).requires_grad_()
    assert torch.equal(fusedmoe.fused_experts(x, *parameters, *routing), output)
    narrow = [tensor.to(torch.bfloat16) for tensor in (x, w13, w2)]
    output = fusedmoe.fused_experts(*narrow, *routing)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)


def test_routers_return_tensors_of_pytorch(tensors):
    x = tensors[0]
    logits = fusedmoe.router_logits(x, torch.eye(64)[:8])
    weights, ids = fusedmoe.route(logits, 2)
    assert torch.equal(logits, x[:, :8]) and logits.dtype == torch.float32
    assert torch.equal(ids.long(), x[:, :8].topk(2).indices) and weights.shape == (5, 2)


def test_memory_is_shared_and_kept_alive(tensors):
    x = tensors[0]
    tensor = fusedmoe.as_tensor(x)
    assert tensor.data_ptr == x.data_ptr()
    assert torch.from_dlpack(tensor).data_ptr() == x.data_ptr()
    view = fusedmoe.as_tensor(torch.arange(100.0)[10:])
    assert torch.from_dlpack(view)[0] == 10
    bytes_ = torch.zeros(4, 4, dtype=torch.uint8)
    types = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float8_e8m0fnu": "e8m0"}
    for name, ours in types.items():
        tensor = fusedmoe.as_tensor(bytes_.view(getattr(torch, name)))
        assert (tensor.data_ptr, tensor.dtype) == (bytes_.data_ptr(), ours)


def test_tensors_without_memory_are_refused_by_name(tensors):
    x, w13, w2, *routing = tensors
    for wrong in (w2.to("meta"), w2.to("meta", torch.float8_e4m3fn)):
        with pytest.raises(ValueError) as caught:
            fusedmoe.fused_experts(x, w13, wrong, *routing)
        assert caught.value.argument.startswith("w2") and "\n" not in str(caught.value)


def test_weights_that_get_other_memory_are_packed_again(tensors):
    x, w13, w2, *routing = tensors
    cache = fusedmoe.PackCache()
    parameter = torch.nn.Parameter(w13.clone())
    first = fusedmoe.fused_experts(x, parameter, w2, *routing, cache=cache)
    parameter.data = 2 * w13  # the old memory stays with the cache, so nothing else gets it
    second = fusedmoe.fused_experts(x, parameter, w2, *routing, cache=cache)
    assert len(cache) == 2 and not torch.equal(first, second)


def test_operators_pass_opcheck(tensors):
    x, w13, w2, weights, ids = tensors
    checks = torch.library.opcheck(torch.ops.fusedmoe.fused_experts, tensors)
    checks |= torch.library.opcheck(
        torch.ops.fusedmoe.fused_experts_out, (torch.empty_like(x), *tensors)
    )
    assert set(checks.values()) == {"SUCCESS"}
    out = torch.empty_like(x)
    torch.ops.fusedmoe.fused_experts_out(out, *tensors)
    assert torch.equal(out, torch.ops.fusedmoe.fused_experts(*tensors))
    with pytest.raises(ValueError, match="topk_ids"):
        torch.ops.fusedmoe.fused_experts(x, w13, w2, weights, ids.long())


def test_operators_have_no_backward(tensors):
    x, *others = tensors
    weights = map(torch.nn.Parameter, others[:2])
    for parameters in ((x.clone().requires_grad_(), *others), (x, *weights, *others[2:])):
        output = torch.ops.fusedmoe.fused_experts(*parameters)
        assert torch.equal(output, fusedmoe.fused_experts(*tensors))
        with pytest.raises(NotImplementedError, match="no backward"):
            torch.ops.fusedmoe.fused_experts_out(torch.empty_like(x), *parameters)
        with pytest.raises(NotImplementedError, match="no backward"):
            output.sum().backward()
    out = torch.empty_like(x)
    version = out._version
    torch.ops.fusedmoe.fused_experts_out(out, *tensors)
    assert out._version == version + 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_a_graph_break(tensors, backend):
    def block(x, *others):
        return torch.ops.fusedmoe.fused_experts(x + 1, *others) * 2

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    assert torch.equal(compiled(*tensors), block(*tensors))


def test_a_forked_process_computes_too():
    code = """
import os, torch, fusedmoe
w13, w2 = torch.randn(8, 512, 256), torch.randn(8, 256, 256)
layer = fusedmoe.MoELayer.from_tensors(w13, w2, topk=2, dtype="f32")
routed = torch.randn(64, 256), torch.rand(64, 2), torch.randint(0, 8, (64, 2)).int()
expected = layer.forward_routed(*routed)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(layer.forward_routed(*routed), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
