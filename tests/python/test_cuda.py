"""Everything on a GPU, through PyTorch: where PyTorch sees one that the library can use.

test_cuda_arrays.py needs no PyTorch.
"""

import json

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from conftest import need_cuda  # noqa: E402
from rank_layers import RANKS, run_threads  # noqa: E402

import fusedmoe  # noqa: E402
import fusedmoe.integrations.torch  # noqa: E402, F401

need_cuda()
assert torch.cuda.is_available(), "the library sees a GPU that PyTorch does not"

EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 8, 2, 256, 128


def routed(tokens):
    weights, ids = torch.softmax(torch.randn(tokens, EXPERTS), -1).topk(TOPK)
    x = torch.randn(tokens, HIDDEN).to(torch.bfloat16)
    return [tensor.cuda() for tensor in (x, weights, ids.to(torch.int32))]


@pytest.fixture
def weights():
    torch.manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
    return w13.to(torch.bfloat16).cuda(), w2.to(torch.bfloat16).cuda()


def on_the_cpu(weights, x, topk_weights, topk_ids):
    tensors = [tensor.cpu() for tensor in (x, *weights, topk_weights, topk_ids)]
    return fusedmoe.fused_experts(*tensors)


def assert_near(actual, expected):
    actual, expected = actual.float().cpu(), expected.float().cpu()
    assert (actual - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_tensors_and_streams_of_pytorch(weights):
    x, topk_weights, topk_ids = routed(5)
    expected = on_the_cpu(weights, x, topk_weights, topk_ids)
    output = fusedmoe.fused_experts(x, *weights, topk_weights, topk_ids)
    assert output.is_cuda and output.dtype == torch.bfloat16
    assert_near(output, expected)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # the input is made on it, so the work must be there too
        late = torch.zeros_like(x)
        torch.cuda._sleep(10_000_000)
        late.copy_(x)
        output = fusedmoe.fused_experts(late, *weights, topk_weights, topk_ids)
    stream.synchronize()
    assert_near(output, expected)
    own = fusedmoe.empty([5, HIDDEN], "bf16", "cuda:0")
    fusedmoe.fused_experts(x, *weights, topk_weights, topk_ids, out=own)
    torch.cuda.synchronize()
    assert_near(torch.from_dlpack(own), expected)


@pytest.mark.parametrize("own_scratch", [False, True])
def test_graphs_stay_right_when_scratch_memory_grows(weights, own_scratch):
    layer = fusedmoe.MoELayer.from_tensors(*weights, topk=TOPK, device="cuda:0")
    inputs, output = routed(4), torch.empty(4, HIDDEN, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    # A stream that is given: then the layer has scratch memory of its own.
    given = {"stream": stream.cuda_stream} if own_scratch else {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        layer.forward_routed(*inputs, out=output, **given)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            layer.forward_routed(*inputs, out=output, **given)
        layer.forward_routed(*routed(3000), **given)  # needs more scratch memory
        with pytest.raises(ValueError):  # and a failed call must not free it
            layer.forward_routed(inputs[0], *routed(3)[1:], **given)
    for _ in range(3):
        fresh = routed(4)
        for tensor, value in zip(inputs, fresh):
            tensor.copy_(value)
        torch.full((1 << 24,), float("nan"), device="cuda")  # whatever was freed is overwritten
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert_near(output, on_the_cpu(weights, *fresh))


def test_a_capture_refuses_weights_that_are_not_packed(weights):
    inputs, others = routed(4), [w.clone() for w in weights]
    fusedmoe.fused_experts(inputs[0], *weights, *inputs[1:])
    graph, mark = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="not packed yet"):
            fusedmoe.fused_experts(inputs[0], *others, *inputs[1:])
        output = fusedmoe.fused_experts(inputs[0], *weights, *inputs[1:])
        mark += 1  # the capture is still valid
    graph.replay()
    assert mark.item() == 1
    assert_near(output, on_the_cpu(weights, *inputs))


class Block(torch.nn.Module):
    """Its weights are parameters: torch.compile copies other tensors into memory of each graph."""

    def __init__(self, w13, w2):
        super().__init__()
        self.w13, self.w2 = torch.nn.Parameter(w13), torch.nn.Parameter(w2)

    def forward(self, x, *routing):
        return torch.ops.fusedmoe.fused_experts(x + 1, self.w13, self.w2, *routing) * 2


def test_operators_in_compiled_graphs(weights):
    checks = torch.library.opcheck(
        torch.ops.fusedmoe.fused_experts, (routed(4)[0], *weights, *routed(4)[1:])
    )
    assert set(checks.values()) == {"SUCCESS"}
    block = Block(*weights)
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            inputs = routed(4)
            assert_near(compiled(*inputs), block(*inputs))


def test_wrong_devices_raise(weights):
    x, topk_weights, topk_ids = routed(4)
    for name, wrong in (("hidden_states", x.cpu()), ("topk_ids", topk_ids.cpu())):
        right = dict(hidden_states=x, topk_weights=topk_weights, topk_ids=topk_ids)
        with pytest.raises(ValueError):
            fusedmoe.fused_experts(w13=weights[0], w2=weights[1], **{**right, name: wrong})


def test_lanes_overlap(weights):
    """One thread drives two ranks on the GPU: two micro-batches are in flight on two streams."""
    communicators = fusedmoe.Communicator.threads(
        RANKS, device="cuda:0", peer_memory=True, timeout=60
    )

    def make(rank):
        return fusedmoe.MoELayer.from_tensors(
            *weights, topk=TOPK, device="cuda:0", communicator=communicators[rank],
            max_tokens_per_rank=5, lanes=2,
        )

    layers = run_threads(make)
    inputs = [[routed(5) for _ in layers] for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()

    def run(lanes):
        steps = []
        for lane in lanes:
            with torch.cuda.stream(streams[lane]):
                steps += [
                    layer.begin(*own, lane=lane) for layer, own in zip(layers, inputs[lane])
                ]
        for step in steps:
            step.compute()
        outputs = [step.finish() for step in steps]
        torch.cuda.synchronize()
        return outputs

    expected = run([0]) + run([1])
    for _ in range(10):
        assert all(torch.equal(*pair) for pair in zip(run([0, 1]), expected))
    for output, own in zip(expected, inputs[0] + inputs[1]):
        assert_near(output, on_the_cpu(weights, *own))


def run_torch_process(rank, folder, weights, routed_rows):
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    device = f"cuda:{rank}"
    communicator = fusedmoe.Communicator.from_torch(device=device, timeout=60)
    layer = fusedmoe.MoELayer.from_tensors(
        *(tensor.to(device) for tensor in weights), topk=TOPK, device=device,
        communicator=communicator, max_tokens_per_rank=5,
    )
    output = layer.forward_routed(*(tensor.to(device) for tensor in routed_rows[rank]))
    travel = json.loads(layer.plan_json)["rows_travel"]
    torch.save((travel, output.cpu()), f"{folder}/{rank}")
    communicator.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(
    torch.cuda.device_count() < RANKS or not dist.is_nccl_available(), reason="needs 2 GPUs, NCCL"
)
def test_process_groups_of_pytorch_use_peer_memory(weights, tmp_path):
    """Without a word, where each process has a GPU."""
    routed_rows = [[tensor.cpu() for tensor in routed(5)] for _ in range(RANKS)]
    on_host = [tensor.cpu() for tensor in weights]
    torch.multiprocessing.spawn(run_torch_process, (tmp_path, on_host, routed_rows), nprocs=RANKS)
    for rank, own in enumerate(routed_rows):
        travel, output = torch.load(tmp_path / str(rank))
        assert travel == "peer memory"
        assert_near(output, on_the_cpu(weights, *own))
