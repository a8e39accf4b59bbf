"""Layers: from checkpoints and from tensors."""

import json
import pathlib
import sys
import threading

import numpy as np
import pytest
from conftest import f32, golden_dir, plain_experts, relative_error

import fusedmoe

GOLDEN = (
    "gpt_oss gpt_oss_odd gpt_oss_mxfp4 gpt_oss_mxfp4_odd mixtral qwen3_moe_norm qwen3_moe_nonorm "
    "deepseek_v3 llama4 olmoe granitemoe glm4_moe"
).split()


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("dtype, tolerance", [("f32", 2e-5), ("bf16", 1e-2)])
def test_golden_vectors(name, dtype, tolerance):
    path = golden_dir() / f"{name}.safetensors"
    layer = fusedmoe.MoELayer.from_checkpoint(path, dtype=dtype)
    tensors = fusedmoe.load_file(path)
    for tokens in (1, 7, 64):
        x = tensors[f"io.T{tokens}.hidden_states"].astype(dtype)
        output = layer(x)
        assert isinstance(output, fusedmoe.Tensor) and output.dtype == dtype
        assert relative_error(f32(output), f32(tensors[f"io.T{tokens}.output"])) <= tolerance


def test_routing_of_the_layer_and_of_the_caller(problem):
    layer = fusedmoe.MoELayer.from_tensors(
        problem.w13, problem.w2, topk=2, router_weight=problem.gate, renormalize=True, dtype="f32"
    )
    weights, ids = np.empty((5, 2), np.float32), np.empty((5, 2), np.int32)
    logits, load = np.empty((5, 8), np.float32), np.empty(8, np.int32)
    output = layer(
        problem.x, topk_weights=weights, topk_ids=ids, router_logits=logits, expert_load=load
    )
    assert relative_error(logits, problem.x @ problem.gate.T) < 1e-5
    assert load.sum() == 10
    problem.ids, problem.weights = ids, weights
    assert relative_error(output, plain_experts(problem)) < 1e-5
    assert np.array_equal(layer.forward_routed(problem.x, weights, ids), output)
    again = output.copy()
    layer(problem.x, out=again, accumulate=True)
    assert relative_error(again, 2 * output) < 1e-6
    alone = fusedmoe.router_logits(problem.x, problem.gate)
    for result, expected in zip(fusedmoe.route(alone, 2, renormalize=True), (weights, ids)):
        assert isinstance(result, np.ndarray) and result.flags.writeable
        assert np.array_equal(result, expected)
    of_tensor = fusedmoe.route(fusedmoe.as_tensor(alone), 2)
    assert all(isinstance(result, fusedmoe.Tensor) for result in of_tensor)


def test_a_layer_is_a_cache_of_experts(problem, tmp_path):
    def make(count, expert_map, **options):
        return fusedmoe.MoELayer.from_tensors(
            problem.w13[:count], problem.w2[:count], topk=2, num_experts=8, expert_map=expert_map,
            dtype="f32", **options,
        )  # fmt: skip

    whole, cache = make(8, None), make(4, np.array([0, 1, 2, 3, -1, -1, -1, -1], np.int32))
    cache.repack(2, problem.w13[6:7], problem.w2[6:7])
    lies_at = np.array([0, 1, -1, 3, -1, -1, 2, -1], np.int32)
    there = np.where(lies_at[problem.ids] >= 0, problem.ids, -1).astype(np.int32)
    loads = np.empty(8, np.int32), np.empty(8, np.int32)
    expected = whole.forward_routed(problem.x, problem.weights, there, expert_load=loads[0])
    step = cache.begin(
        problem.x, problem.weights, problem.ids, expert_load=loads[1], expert_map=lies_at
    )
    step.compute()
    assert np.array_equal(step.finish(), expected)
    for load, ids in zip(loads, (there, problem.ids)):
        assert np.array_equal(load, np.bincount(ids[ids >= 0], minlength=8))
    with pytest.raises(ValueError, match="expert"):
        cache.repack(4, problem.w13[6:7], problem.w2[6:7])
    with pytest.raises(TypeError, match="no name in weights 'w1_scales'"):
        cache.repack(0, problem.w13[6:7], problem.w2[6:7], {"w1_scales": problem.gate})
    whole.save_packed(tmp_path / "packed")
    mapped = make(8, None, packed_weights=tmp_path / "packed")
    with pytest.raises(ValueError, match="mapped.*packed_read"):
        mapped.repack(0, problem.w13[6:7], problem.w2[6:7])


def test_dtypes_of_ml_dtypes_are_taken(problem):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        layer = fusedmoe.MoELayer.from_tensors(problem.w13, problem.w2, topk=2, dtype=dtype)
        assert layer.info["dtype"] == "bf16"


def test_options_and_errors_speak_python(problem):
    def make(**options):
        return fusedmoe.MoELayer.from_tensors(problem.w13, problem.w2, topk=2, **options)

    for dtype in ("f32", "float32", np.float32, np.dtype("float32")):
        assert make(dtype=dtype).info["dtype"] == "f32"
    for options, text in (
        ({"dtype": 3}, "dtype: was of type int; must be a text"),
        ({"num_threads": "2"}, "num_threads: was of type str; must be a whole number"),
        ({"max_workspace_bytes": -1}, "max_workspace_bytes: was -1; must be a whole number from 0"),
        ({"weights": {"scheme": "fp8_block"}}, "w1_scale: was undefined; must be given for fp8_block"),
    ):
        with pytest.raises(ValueError) as caught:
            make(**options)
        assert str(caught.value) == text and caught.value.argument == text.split(":")[0]
    layer = make(dtype="f32")
    with pytest.raises(ValueError, match=r"hidden_states: was f32 \[5, 32\]; must be f32 \[any, 64\]$"):
        layer.forward_routed(problem.x[:, :32].copy(), problem.weights, problem.ids)


def test_shared_experts_are_added(problem):
    def make(shared):
        return fusedmoe.MoELayer.from_tensors(
            problem.w13, problem.w2, topk=2, router_weight=problem.gate, dtype="f32", shared=shared
        )

    shared = {"w13": problem.w13[:1], "w2": problem.w2[:1]}
    difference = make(shared)(problem.x) - make(None)(problem.x)
    problem.ids, problem.weights = np.zeros((5, 1), np.int32), np.ones((5, 1), np.float32)
    assert relative_error(difference, plain_experts(problem)) < 1e-5


def test_zero_experts_and_projections(problem):
    weights = np.full((5, 2), 0.25, np.float32)
    zero = fusedmoe.MoELayer.from_tensors(
        problem.w13, problem.w2, topk=2, num_zero_experts=3, dtype="f32"
    )
    output = zero.forward_routed(problem.x, weights, np.full((5, 2), 10, np.int32))
    assert np.array_equal(output, problem.x / 2)

    rng = np.random.default_rng(3)
    down = rng.standard_normal((64, 96), np.float32) / 10
    up = rng.standard_normal((96, 64), np.float32) / 10
    x = rng.standard_normal((5, 96), np.float32)
    layer = fusedmoe.MoELayer.from_tensors(
        problem.w13, problem.w2, topk=2, latent_down=down, latent_up=up, dtype="f32"
    )
    assert layer.info["hidden"] == 96
    problem.x, ids = x @ down.T, problem.ids
    expected = plain_experts(problem) @ up.T
    assert relative_error(layer.forward_routed(x, problem.weights, ids), expected) < 1e-5


def test_what_a_layer_says_of_itself(problem):
    layer = fusedmoe.MoELayer.from_tensors(problem.w13, problem.w2, topk=2, dtype="f32")
    assert layer.info["hidden"] == 64 and layer.info["num_experts"] == 8
    assert layer.plan_line.startswith("cpu+no_ep f32 f32")
    assert layer.workspace_bytes(64) > layer.workspace_bytes(1) > 0
    assert layer.shared_bytes(64) == 0
    pinned = fusedmoe.MoELayer.from_tensors(
        problem.w13, problem.w2, topk=2, dtype="f32", plan=layer.plan_json
    )
    assert json.loads(pinned.plan_json) == json.loads(layer.plan_json)
    wide = fusedmoe.MoELayer.from_tensors(
        problem.w13, problem.w2, topk=2, output_dtype="f32", num_threads=1
    )
    x = fusedmoe.as_tensor(problem.x).astype("bf16")
    assert wide.forward_routed(x, problem.weights, problem.ids).dtype == "f32"


def test_errors_are_of_their_kind(problem):
    make = fusedmoe.MoELayer.from_tensors
    with pytest.raises(OSError, match="nowhere"):
        fusedmoe.MoELayer.from_checkpoint(pathlib.Path("/nowhere"))
    with pytest.raises(ValueError) as caught:
        make(problem.w13, problem.w2[:, :, :-1], topk=2, dtype="f32")
    assert caught.value.fault == "shape"
    with pytest.raises(NotImplementedError) as caught:
        make(problem.w13, problem.w2, topk=2, dtype="f32", require="sm90")
    assert caught.value.reason == "device"
    with pytest.raises(TypeError, match="no option 'dtyp'; there are: .*dtype"):
        make(problem.w13, problem.w2, topk=2, dtyp="f32")
    with pytest.raises(TypeError, match="no name in weights 'w1_scales'; there are: .*w1_scale,"):
        make(problem.w13, problem.w2, topk=2, weights={"w1_scales": problem.gate})
    with pytest.raises(TypeError, match="no name in shared 'gates'; there are: .*gate,"):
        make(problem.w13, problem.w2, topk=2, shared={"gates": problem.gate})
    layer = make(problem.w13, problem.w2, topk=2, dtype="f32")
    with pytest.raises(ValueError, match="stream"):
        layer.forward_routed(problem.x, problem.weights, problem.ids, stream=7)
    with pytest.raises(ValueError) as caught:
        layer.forward_routed(problem.x, problem.weights, problem.ids + 8)
    assert caught.value.argument == "topk_ids"


def test_calls_of_several_threads_agree(problem):
    layer = fusedmoe.MoELayer.from_tensors(problem.w13, problem.w2, topk=2, dtype="f32")
    expected = layer.forward_routed(problem.x, problem.weights, problem.ids)
    wrong = []

    def work():
        for _ in range(50):
            output = layer.forward_routed(problem.x, problem.weights, problem.ids)
            if not np.array_equal(output, expected):
                wrong.append(output)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", ["forward_routed", "astype", "load_file"])
def test_the_interpreter_is_free_while_a_call_computes_or_reads(problem, name):
    """Another thread runs during the calls, which it could not if they held the GIL."""
    layer = fusedmoe.MoELayer.from_tensors(
        problem.w13, problem.w2, topk=2, dtype="f32", num_threads=1
    )
    tensor, out = fusedmoe.as_tensor(problem.w13), np.empty_like(problem.x)
    call = {
        "forward_routed": lambda: layer.forward_routed(
            problem.x, problem.weights, problem.ids, out=out
        ),
        "astype": lambda: tensor.astype("bf16"),
        "load_file": lambda: fusedmoe.load_file(golden_dir() / "mixtral.safetensors"),
    }[name]
    begin, ran = threading.Event(), threading.Event()

    def work():
        begin.wait()
        ran.set()

    thread = threading.Thread(target=work)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # from here nobody gets the GIL that another does not release
    try:
        begin.set()
        calls = 0
        while not ran.is_set() and calls < 2000:
            call()
            calls += 1
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_experts_alone_of_a_checkpoint():
    checkpoint = fusedmoe.Checkpoint(golden_dir() / "deepseek_v3.safetensors")
    whole = fusedmoe.MoELayer.from_checkpoint(checkpoint, dtype="f32")
    experts = fusedmoe.MoELayer.from_checkpoint(checkpoint, dtype="f32", experts_only=True)
    x = np.ones((2, whole.info["hidden"]), np.float32)
    weights = np.zeros((2, whole.info["topk"]), np.float32)
    ids = np.tile(np.arange(whole.info["topk"], dtype=np.int32), (2, 1))
    assert whole.forward_routed(x, weights, ids).any()  # the shared experts
    assert not experts.forward_routed(x, weights, ids).any()
    with pytest.raises(ValueError):
        experts(x)


def test_scratch_memory_of_the_caller(problem):
    layer = fusedmoe.MoELayer.from_tensors(problem.w13, problem.w2, topk=2, dtype="f32")
    expected = layer.forward_routed(problem.x, problem.weights, problem.ids)
    memory = np.empty(layer.workspace_bytes(5) + 64, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :]
    routed = (problem.x, problem.weights, problem.ids)
    assert np.array_equal(layer.forward_routed(*routed, workspace=aligned), expected)
    for wrong in (aligned[:8], aligned[1:], aligned[::2], "text"):
        with pytest.raises(ValueError, match="workspace"):
            layer.forward_routed(*routed, workspace=wrong)


def test_family_and_epsilon_of_the_caller():
    path = golden_dir() / "mixtral.safetensors"
    assert fusedmoe.Checkpoint(path, family="mixtral").info["family"] == "mixtral"
    with pytest.raises(ValueError, match="nothing"):
        fusedmoe.Checkpoint(path, family="nothing")
    logits = np.zeros((1, 4), np.float32)
    weights, _ = fusedmoe.route(logits, 2, renormalize=True, renormalize_epsilon=0.5)
    assert np.from_dlpack(weights).tolist() == [[0.25, 0.25]]


def test_weights_of_the_librarys_own_tensors(problem):
    w13, w2 = fusedmoe.as_tensor(problem.w13), fusedmoe.as_tensor(problem.w2)
    assert w13.to("cpu") is w13
    layer = fusedmoe.MoELayer.from_tensors(w13, w2, topk=2, dtype="f32")
    output = layer.forward_routed(problem.x, problem.weights, problem.ids)
    assert relative_error(output, plain_experts(problem)) < 1e-5
