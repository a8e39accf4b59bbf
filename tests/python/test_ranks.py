"""Layers on ranks: threads, processes over TCP, and torch's process groups where torch is."""

import multiprocessing
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
from conftest import golden_dir
from rank_layers import EXPERTS, RANKS, TOKENS, forward, layer, part_of, run_threads, tensors

import fusedmoe

TOKEN = "the-secret-of-a-test"


def test_threads_give_the_bits_of_one_rank():
    expected = layer()(tensors()[3])
    communicators = fusedmoe.Communicator.threads(RANKS, timeout=60)
    assert [c.rank for c in communicators] == [0, 1]
    assert communicators[0].backend == "threads"
    for placement in (
        fusedmoe.linear_placement(EXPERTS, RANKS, redundant=2),
        fusedmoe.round_robin_placement(EXPERTS, RANKS),
    ):
        parts = run_threads(lambda r: forward(communicators[r], placement=placement))
        assert np.array_equal(np.concatenate(parts), expected)


def test_balanced_ranks_give_the_bits_of_one():
    _, _, gate, x = tensors()
    ids = np.argsort(-(x @ gate.T), axis=1)[:, :2]
    loads = np.bincount(ids.ravel(), minlength=EXPERTS) * [9, 5, 1, 1]
    one, two = fusedmoe.balance(np.stack([loads, loads[::-1]]), RANKS, redundant=2)
    assert 1 <= one.after <= one.before
    assert one == fusedmoe.balance(loads.tolist(), RANKS, redundant=2)[0]
    (again,) = fusedmoe.balance(loads, RANKS, redundant=2, placements=[one.placement])
    assert again.placement == one.placement and again.before == one.after
    assert two.placement != one.placement
    communicators = fusedmoe.Communicator.threads(RANKS, timeout=60)
    parts = run_threads(lambda r: forward(communicators[r], placement=one.placement))
    assert np.array_equal(np.concatenate(parts), layer()(x))
    for match, call in {
        "redundant: was 1; must be": lambda: fusedmoe.balance(loads, RANKS, redundant=1),
        "loads.*different numbers": lambda: fusedmoe.balance([[1, 2], [3]], RANKS),
        r"loads\[1\]: was -1": lambda: fusedmoe.balance([1, -1], RANKS),
        "num_experts: was 0": lambda: fusedmoe.balance([], RANKS),
        "placement: was no JSON": lambda: fusedmoe.balance(loads, RANKS, placements=["x"]),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_costs_are_those_of_the_file_of_the_variable(tmp_path):
    costs = re.sub('"source": "[^"]*"', '"source": "this test"', fusedmoe.rank_costs())
    path = tmp_path / "costs.json"

    def told():
        variables = {**os.environ, "FUSEDMOE_RANK_COSTS": str(path)}
        command = [sys.executable, "-c", "import fusedmoe; print(fusedmoe.rank_costs())"]
        return subprocess.run(command, env=variables, capture_output=True, text=True)

    assert "OSError" in told().stderr and str(path) in told().stderr
    path.write_text("{}")
    assert "ValueError" in told().stderr
    path.write_text(costs)
    assert told().stdout.strip() == costs.strip()


def test_ranks_that_are_not_here_are_simulated():
    selection = fusedmoe.explain(num_experts=4, topk=2, hidden=128, intermediate=128)
    ids = np.array([[0, 2], [3, 2]], np.int32)
    step = selection.simulate(ids, num_ranks=2, tokens_per_rank=1)
    assert step.inside_bytes == 256 and step.between_bytes == 0 and step.balance == 1.5
    assert step.step_us == step.dispatch_us + step.experts_us + step.combine_us
    placement = fusedmoe.linear_placement(4, 2)
    known = {"placement": placement, "costs": fusedmoe.rank_costs(), "tokens_per_rank": 1}
    assert selection.simulate(ids, **known) == step
    assert step.quantize_us == 0
    coded = fusedmoe.explain(
        num_experts=4, topk=2, hidden=7168, intermediate=128, scheme="fp8_block", device="cuda:0",
        compute_capability=90,
    )  # fmt: skip
    assert coded.simulate(ids, **known).quantize_us == 0
    assert coded.simulate(ids, **{**known, "tokens_per_rank": 1000}).quantize_us > 3
    assert selection.simulate(**known).balance == 1  # ids at random
    apart = selection.simulate(ids, num_hosts=2, **known)
    assert apart.between_bytes == 256 and apart.dispatch_us > step.dispatch_us
    for match, wrong in {
        "either num_ranks or placement": {"num_ranks": 2},
        "num_hosts: was 3": {"num_hosts": 3},
        "placement: was of 2 experts": {"placement": fusedmoe.linear_placement(2, 2)},
        "costs: was another text": {"costs": ""},
        "tokens_per_rank: was 0": {"tokens_per_rank": 0},
    }.items():
        with pytest.raises(ValueError, match=match):
            selection.simulate(ids, **{**known, **wrong})


def test_ranks_connect_and_map_each_other_when_asked():
    communicators = fusedmoe.Communicator.threads(RANKS, timeout=60)
    assert run_threads(lambda r: communicators[r].connect()) == [None, None]
    lanes = run_threads(lambda r: communicators[r].lane(1))
    assert [lane.rank for lane in lanes] == [0, 1] and lanes[0].size == RANKS
    assert run_threads(lambda r: lanes[r].barrier()) == [None, None]
    with pytest.raises(ValueError, match="lane"):
        communicators[0].lane(0)
    why = run_threads(lambda r: communicators[r].map_peers(1 << 20))
    assert why == ["the ranks are on CPUs"] * 2
    shape = dict(num_experts=8, topk=4, hidden=512, intermediate=512)
    assert fusedmoe.explain(**shape).peer_bytes(4, 1000) == 0
    there = fusedmoe.explain(**shape, device="cuda", compute_capability=90)
    more = there.peer_bytes(4, 1000, combine="per_slot") - there.peer_bytes(4, 1000)
    assert more == 1000 * 512 * (4 * 4 - 4 * 2)  # four slots in f32, not a row of each rank
    assert there.peer_bytes(4, 1000, combine_dtype="f32") > there.peer_bytes(4, 1000)
    with pytest.raises(ValueError, match="num_ranks: was 0"):
        there.peer_bytes(0, 1000)
    with pytest.raises(ValueError, match="combine"):
        there.peer_bytes(2, 1000, combine="per_row")


def test_rows_that_do_not_fit_are_counted():
    communicators = fusedmoe.Communicator.threads(RANKS, timeout=60)

    def run(rank):
        made = layer(
            communicator=communicators[rank],
            require="cpu+all2all",
            max_tokens_per_rank=TOKENS,
            receive_capacity=3,
            drop_rows=True,
        )
        # All tokens go to rank 0, which takes the first three of its own.
        x = tensors()[3][part_of(rank)]
        weights, ids = np.ones((len(x), 2), np.float32), np.zeros((len(x), 2), np.int32)
        dropped = np.full(1, 77, np.int32)
        out = made.forward_routed(x, weights, ids, dropped_rows=dropped)
        whole = np.full(1, 77, np.int32)
        made(x, dropped_rows=whole)
        return int(dropped[0]), out.any(axis=1).tolist(), int(whole[0])

    first, second = run_threads(run)
    assert first[:2] == (1, [True, True, True, False])
    assert second[:2] == (2, [False, False])
    # Of rank 0 at most four rows go to each rank, which both take three of it.
    assert first[2] <= 2 and second[2] <= 4


def test_a_call_in_three_parts_with_exact_and_fixed_sizes():
    communicators = fusedmoe.Communicator.threads(RANKS, timeout=60)

    def run(rank):
        made = layer(communicator=communicators[rank], max_tokens_per_rank=TOKENS)
        x = tensors()[3][part_of(rank)]
        weights, ids = np.ones((len(x), 2), np.float32), np.zeros((len(x), 2), np.int32)
        same = []
        for fixed_sizes in (False, True):
            step = made.begin(x, fixed_sizes=fixed_sizes)
            step.compute()
            same.append(np.array_equal(step.finish(), made(x, fixed_sizes=fixed_sizes)))
            step = made.begin(x, weights, ids, fixed_sizes=fixed_sizes)
            step.compute()
            routed = step.finish()
            whole = made.forward_routed(x, weights, ids, fixed_sizes=fixed_sizes)
            same.append(np.array_equal(routed, whole))
        assert made.workspace_bytes(TOKENS, fixed_sizes=True) > 0
        return same

    assert run_threads(run) == [[True] * 4] * RANKS


def test_ranks_that_differ_all_raise():
    communicators = fusedmoe.Communicator.threads(RANKS, timeout=60)
    errors = run_threads(
        lambda r: forward(communicators[r], **({"batch_invariant": True} if r else {}))
    )
    assert all(isinstance(error, Exception) for error in errors)
    assert str(errors[0]) == str(errors[1])
    communicators[0].abort("enough")
    assert communicators[1].status == "rank 0: enough"
    with pytest.raises(RuntimeError, match="enough"):
        communicators[1].barrier()


def test_what_fails_on_one_rank_is_told_to_all_at_once(tmp_path):
    """A file that rank 1 does not have, an option that it gives wrongly, a step of the caller's."""
    communicators = fusedmoe.Communicator.threads(RANKS, timeout=60)
    path = [golden_dir() / "mixtral.safetensors", tmp_path / "missing"]

    def load(rank):
        return fusedmoe.MoELayer.from_checkpoint(path[rank], communicator=communicators[rank])

    def combine(rank):
        return forward(communicators[rank], **({"output_dtype": "int3"} if rank else {}))

    def step(rank):
        return communicators[rank].together(lambda: 1 // (1 - rank))

    for function, text in ((load, "missing"), (combine, "int3"), (step, "zero")):
        errors = run_threads(function)
        assert all(isinstance(error, RuntimeError) for error in errors), errors
        assert re.search("rank 1: .*" + text, str(errors[0]))
        assert str(errors[0]) == str(errors[1])
    assert run_threads(lambda r: communicators[r].together(lambda: r)) == [0, 1]


def test_dispatch_dtype():
    communicators = fusedmoe.Communicator.threads(RANKS)
    outputs = run_threads(lambda r: forward(communicators[r], dispatch_dtype="f32"))
    expected = run_threads(lambda r: forward(communicators[r]))
    assert all(np.array_equal(a, b) for a, b in zip(outputs, expected))
    errors = run_threads(lambda r: forward(communicators[r], dispatch_dtype="e4m3"))
    assert all("dispatch_dtype e4m3: experts of f32 read rows of f32" in str(e) for e in errors)


def test_wrong_options():
    with pytest.raises(ValueError, match="combine"):
        layer(combine="never")
    with pytest.raises(ValueError, match="or give rank, size, address and port"):
        fusedmoe.Communicator.join()
    with pytest.raises(ValueError, match="token is given without an address"):
        fusedmoe.Communicator.join(token=TOKEN)
    with pytest.raises(ValueError, match="token: was 5 characters"):
        fusedmoe.Communicator.join(0, 2, "127.0.0.1", 1, token="short")
    with pytest.raises(ValueError, match="dispatch_dtype"):
        layer(dispatch_dtype="fp9")
    with pytest.raises(TypeError, match="communicator: was a str; must be a fusedmoe.Communicator"):
        layer(communicator="cpu")
    with pytest.raises(ValueError, match="gather: was a function that returned 'none'"):
        fusedmoe.Communicator.from_gather(0, 2, lambda text: "none")


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), -1, 0, 1e300])
def test_a_timeout_is_a_time(timeout):
    with pytest.raises(ValueError, match="timeout: was .*; must be a positive number of seconds"):
        fusedmoe.Communicator.threads(RANKS, timeout=timeout)


def threads_gather(engine, texts, rank):
    """What an engine has: here threads that write into a list and wait for each other."""
    calls = iter(texts)

    def gather(text):
        shared = next(calls)
        shared[rank] = text
        engine[rank].barrier()
        return list(shared)

    return gather


def test_threads_of_one_interpreter_meet_and_part_over_tcp():
    """Rank 0's communicator waits for the others' when it ends, which must not need its thread."""
    engine = fusedmoe.Communicator.threads(RANKS, timeout=60)
    texts = [[""] * RANKS for _ in range(2)]

    def run(rank):
        gather = threads_gather(engine, texts, rank)
        communicator = fusedmoe.Communicator.from_gather(rank, RANKS, gather, timeout=60)
        return np.asarray(forward(communicator))

    assert np.array_equal(np.concatenate(run_threads(run)), layer()(tensors()[3]))


class FakeMpi:
    """What from_mpi() asks of a communicator of mpi4py."""

    def __init__(self, engine, texts, rank):
        self.rank, self.size = rank, len(engine)
        self.allgather = threads_gather(engine, texts, rank)

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size


def test_ranks_meet_by_an_allgather_of_mpi():
    engine = fusedmoe.Communicator.threads(RANKS, timeout=60)
    texts = [[""] * RANKS for _ in range(2)]

    def run(rank):
        communicator = fusedmoe.Communicator.from_mpi(FakeMpi(engine, texts, rank), timeout=60)
        return np.asarray(forward(communicator))

    assert np.array_equal(np.concatenate(run_threads(run)), layer()(tensors()[3]))


def without_nccl():
    """Why NCCL cannot be used; skips the test where it can."""
    try:
        fusedmoe.Communicator.make_nccl_id()
    except NotImplementedError as error:
        return str(error)
    pytest.skip("NCCL can be used here")


@pytest.mark.parametrize("way", ["comm", "id"])
def test_a_rank_without_nccl_tells_the_others(way):
    problem = without_nccl()
    engine = fusedmoe.Communicator.threads(RANKS, timeout=60)
    texts = [[""] * RANKS for _ in range(2)]

    def run(rank):
        gather = threads_gather(engine, texts, rank)
        if rank == 0:
            return fusedmoe.Communicator.from_gather(rank, RANKS, gather, timeout=60)
        if way == "comm":
            return fusedmoe.Communicator.from_nccl(4096, rank, RANKS, gather)
        return fusedmoe.Communicator.from_nccl_id(bytes(128), rank, RANKS, gather)

    first, second = run_threads(run)
    assert isinstance(second, NotImplementedError) and str(second) == problem
    assert isinstance(first, RuntimeError) and str(first) == f"rank 1: {problem}"


def test_wrong_calls_of_nccl():
    with pytest.raises(ValueError, match="comm: was 0; must be the address"):
        fusedmoe.Communicator.from_nccl(0, 0, 1, lambda text: [text])
    with pytest.raises(ValueError, match="unique_id: was 3 bytes; must be 128, an ncclUniqueId"):
        fusedmoe.Communicator.from_nccl_id(b"abc", 0, 1, lambda text: [text])
    with pytest.raises(ValueError, match="device: was cpu; must be a CUDA device"):
        fusedmoe.Communicator.from_nccl(4096, 0, 1, lambda text: [text], device="cpu")


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def joined(rank, port, **options):
    return fusedmoe.Communicator.join(
        rank, RANKS, "127.0.0.1", port, token=TOKEN, timeout=60, **options
    )


def run_process(rank, port, queue):
    communicator = joined(rank, port)
    queue.put((rank, communicator.backend, np.asarray(forward(communicator))))


def run_process_in_folder(rank, port, queue, folder):
    communicator = fusedmoe.Communicator.from_folder(rank, RANKS, folder, timeout=60)
    queue.put((rank, communicator.backend, np.asarray(forward(communicator))))


def run_process_that_may_share(rank, port, queue, sharing):
    communicator = joined(rank, port, shared_memory=sharing[rank])
    layer(communicator=communicator, max_tokens_per_rank=TOKENS)
    with open("/proc/self/maps") as maps:
        queue.put((rank, sum("memfd:fusedmoe" in line for line in maps)))
    communicator.barrier()


def run_torch_process(rank, port, queue):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    communicator = fusedmoe.Communicator.from_torch(timeout=60)
    queue.put((rank, communicator.backend, np.asarray(forward(communicator))))
    communicator.barrier()


def results_of_processes(target, *args):
    """What each rank's process has put into the queue, in the order of the ranks."""
    spawn = multiprocessing.get_context("spawn")
    queue, port = spawn.Queue(), free_port()
    processes = [spawn.Process(target=target, args=(r, port, queue, *args)) for r in range(RANKS)]
    for process in processes:
        process.start()
    results = sorted((queue.get(timeout=60) for _ in processes), key=lambda result: result[0])
    for process in processes:
        process.join()
    return results


@pytest.mark.parametrize("target", [run_process, run_torch_process])
def test_processes_give_the_bits_of_one_rank(target):
    if target is run_torch_process:
        pytest.importorskip("torch.distributed")
    expected = layer()(tensors()[3])
    parts = results_of_processes(target)
    assert [part[1] for part in parts] == ["tcp"] * RANKS
    assert np.array_equal(np.concatenate([part[2] for part in parts]), expected)


def test_processes_meet_in_a_folder(tmp_path):
    parts = results_of_processes(run_process_in_folder, tmp_path / "meeting")
    assert [part[1] for part in parts] == ["tcp"] * RANKS
    assert np.array_equal(np.concatenate([part[2] for part in parts]), layer()(tensors()[3]))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot create .*/file"):
        fusedmoe.Communicator.from_folder(0, 1, tmp_path / "file" / "folder")


@pytest.mark.parametrize("sharing", [(True, True), (True, False)])
def test_processes_share_memory_unless_one_does_not(sharing):
    files = [files for _, files in results_of_processes(run_process_that_may_share, sharing)]
    assert files == [RANKS if all(sharing) else 0] * RANKS
