"""fused_experts(), tensors and quantizers."""

import ctypes
import os
import random
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import f32, plain_experts, relative_error

import fusedmoe


@pytest.fixture(autouse=True)
def fresh_cache():
    fusedmoe.clear_cache()


def run(problem, **settings):
    arguments = {
        "hidden_states": problem.x,
        "w13": problem.w13,
        "w2": problem.w2,
        "topk_weights": problem.weights,
        "topk_ids": problem.ids,
    }
    return fusedmoe.fused_experts(**{**arguments, **settings})


def test_the_sum_of_the_chosen_experts(problem):
    problem.ids[0] = -1
    expected = plain_experts(problem)
    output = run(problem)
    assert output.dtype == np.float32 and relative_error(output, expected) < 1e-5
    assert not output[0].any()
    out = np.empty_like(output)
    assert run(problem, out=out) is out and np.array_equal(out, output)
    assert run(problem, inplace=True) is problem.x and np.array_equal(problem.x, output)


def test_layouts_of_w13(problem):
    expected = run(problem)
    gate, up = np.split(problem.w13, 2, axis=1)
    swapped = np.concatenate([up, gate], axis=1)
    assert np.array_equal(run(problem, w13=swapped, gate_up_layout="up_gate"), expected)
    mixed = np.stack([gate, up], axis=2).reshape(problem.w13.shape)
    assert np.array_equal(run(problem, w13=mixed, gate_up_layout="interleaved"), expected)
    w13, w2 = (np.ascontiguousarray(w.transpose(0, 2, 1)) for w in (problem.w13, problem.w2))
    assert np.array_equal(run(problem, w13=w13, w2=w2, transposed=True), expected)
    assert np.array_equal(run(problem, w13=w13.transpose(0, 2, 1)), expected)  # a strided view


def test_experts_of_one_rank(problem):
    owner = np.array([0, 1, 2, 3, -1, -1, -1, -1], np.int32)
    here = dict(global_num_experts=8, expert_map=owner)
    first = run(problem, w13=problem.w13[:4], w2=problem.w2[:4], **here)
    here["expert_map"] = np.roll(owner, 4)
    second = run(problem, w13=problem.w13[4:], w2=problem.w2[4:], **here)
    assert relative_error(first + second, run(problem)) < 1e-6


def test_quantized_weights(problem):
    def stacked(weights):
        parts = [fusedmoe.quantize_weights(matrix, "mxfp4_w4a16") for matrix in weights]
        values = np.stack([np.from_dlpack(part.values) for part in parts])
        scales = np.stack([np.from_dlpack(part.scales.view("u8")) for part in parts])
        decoded = [fusedmoe.dequantize_weights(part, "mxfp4_w4a16", weights.shape[2]) for part in parts]
        return values, scales, np.stack([np.from_dlpack(matrix) for matrix in decoded])

    w13, w1_scale, problem.w13 = stacked(problem.w13)
    w2, w2_scale, problem.w2 = stacked(problem.w2)
    assert w13.dtype == np.uint8 and w13.shape == (8, 64, 32)
    output = run(
        problem, w13=w13, w2=w2, scheme="mxfp4_w4a16", w1_scale=w1_scale, w2_scale=w2_scale
    )
    assert relative_error(output, plain_experts(problem)) < 1e-5
    # Static scales stay with the caller, so a cache of its own forgets them with it.
    cache = fusedmoe.PackCache()
    run(problem, cache=cache)
    run(problem, cache=cache)
    assert len(cache) == 1
    cache.clear()
    assert len(cache) == 0


def test_a_failed_call_keeps_what_it_packed_from(problem):
    """The cache knows weights by address, so nothing else may come to lie there."""
    cache = fusedmoe.PackCache()
    w13 = problem.w13.copy()
    memory = weakref.ref(w13)
    with pytest.raises(ValueError, match="topk_weights"):  # seen before
        run(problem, w13=w13, topk_weights=problem.weights[:4], cache=cache)
    assert len(cache) == 0
    with pytest.raises(ValueError, match="topk_ids"):
        run(problem, w13=w13, topk_ids=problem.ids + 99, cache=cache)
    assert len(cache) == 1
    del w13
    assert memory() is not None
    cache.clear()
    assert len(cache) == 0 and memory() is None


def test_nothing_is_copied(problem):
    tensor = fusedmoe.as_tensor(problem.x)
    assert tensor.data_ptr == problem.x.ctypes.data
    assert np.from_dlpack(tensor).ctypes.data == problem.x.ctypes.data
    assert tensor.view("i32").data_ptr == tensor.data_ptr
    # Nothing is copied: the call reads and writes the caller's arrays, even a view of a view.
    wide = np.zeros((5, 128), np.float32)
    wide[:, :64] = problem.x
    out = np.full((5, 128), 7, np.float32)
    run(problem, hidden_states=wide[:, :64], out=out[:, 64:])
    assert np.array_equal(out[:, 64:], run(problem)) and (out[:, :64] == 7).all()


def test_a_tensor_outlives_what_it_views():
    array = np.arange(1000, dtype=np.float32)
    tensor = fusedmoe.as_tensor(array[10:][::2])
    del array
    assert np.from_dlpack(tensor)[3] == 16
    back = np.from_dlpack(tensor)
    del tensor
    assert back[3] == 16


def test_read_only_memory(problem):
    problem.w13.flags.writeable = False
    problem.x.flags.writeable = False
    out = np.empty_like(problem.x)
    run(problem, out=out)
    out.flags.writeable = False
    with pytest.raises(ValueError) as caught:
        run(problem, out=out)
    assert caught.value.argument == "out"


def test_a_tensor_of_read_only_memory_stays_read_only(problem):
    memory = np.zeros_like(problem.x)
    memory.flags.writeable = False
    tensor = fusedmoe.as_tensor(memory)
    for out in (tensor, fusedmoe.as_tensor(tensor), tensor.view("i32").view("f32")):
        with pytest.raises(ValueError) as caught:
            run(problem, out=out)
        assert caught.value.argument == "out" and "read-only" in str(caught.value)
        assert not np.from_dlpack(out).flags.writeable
    assert not memory.any()
    with pytest.raises(BufferError, match="max_version"):
        tensor.__dlpack__()
    run(problem, out=tensor.astype("f32"))  # a copy
    assert isinstance(tensor, fusedmoe.Tensor)
    assert np.from_dlpack(fusedmoe.as_tensor(problem.x)).flags.writeable


class DLPackAlone:
    """An array without a buffer: others get it by __dlpack__, or by what a subclass offers to C."""

    def __init__(self, memory):
        self.memory = memory

    def __dlpack__(self, **settings):
        return self.memory.__dlpack__(**settings)

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32)]
    _fields_ += [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]
    _fields_ += [("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p)]
    _fields_ += [("byte_offset", ctypes.c_uint64)]


ViewOf = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))


class Exchange(ctypes.Structure):
    """DLPack's interface for C; its function view_of borrows an array."""

    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]
    _fields_ += [(f"other{i}", ctypes.c_void_p) for i in range(4)] + [("view_of", ViewOf)]

    def capsule(self):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self), b"dlpack_exchange_api", None)


def test_a_c_exchange_interface_without_views(problem):
    """DLPack lets the function that borrows be null: then __dlpack__ serves."""
    exchange = Exchange(1, 3)
    offering = type("Offering", (DLPackAlone,), {"__dlpack_c_exchange_api__": exchange.capsule()})
    assert fusedmoe.as_tensor(offering(problem.x)).data_ptr == problem.x.ctypes.data


def test_weights_that_cannot_be_kept_are_not_packed(problem):
    @ViewOf
    def view_of(array, out):
        memory = array.memory
        shape = memory.ctypes.shape_as(ctypes.c_int64)
        array.shape = shape  # lives as long as the array
        data, at = memory.ctypes.data, ctypes.addressof(shape)
        out[0] = DLTensor(data, (1, 0), memory.ndim, 2, 32, 1, at, None, 0)
        return 0

    class Borrowed(DLPackAlone):
        pass

    exchange = Exchange(1, 3, view_of=view_of)  # the function that gives ownership is missing
    Borrowed.__dlpack_c_exchange_api__ = exchange.capsule()
    cache = fusedmoe.PackCache()
    x, expected = Borrowed(problem.x), run(problem)
    assert np.array_equal(run(problem, hidden_states=x, out=np.empty_like(expected)), expected)
    for ids in (problem.ids, problem.ids + 99):  # the second would fail anyway
        with pytest.raises(ValueError, match="Borrowed.*memory can be kept"):
            run(problem, w13=Borrowed(problem.w13), topk_ids=ids, cache=cache)
        assert len(cache) == 0


def test_8_bit_types_of_pytorch_stay(monkeypatch):
    """With a stand-in, because PyTorch is not always there."""

    class Stand(DLPackAlone):
        requires_grad = False
        dtype = "torch.float8_e5m2"

        def view(self, dtype):
            assert dtype == "uint8"
            return DLPackAlone(self.memory)

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Stand, uint8="uint8"))
    array = Stand(np.zeros(4, np.uint8))
    for name, ours in (("e4m3fn", "e4m3"), ("e5m2", "e5m2"), ("e8m0fnu", "e8m0")):
        array.dtype = f"torch.float8_{name}"
        assert fusedmoe.as_tensor(array).dtype == ours
    array.dtype = "torch.float4_e2m1fn_x2"
    assert fusedmoe.as_tensor(array).dtype == "u8"


def test_bfloat16_without_a_type_of_numpy(problem):
    expected = run(problem)
    as_bf16 = {
        name: fusedmoe.as_tensor(value).astype("bf16")
        for name, value in (("hidden_states", problem.x), ("w13", problem.w13), ("w2", problem.w2))
    }
    output = run(problem, **as_bf16)
    assert output.dtype == "bf16" and relative_error(f32(output), expected) < 2e-2


def test_types_of_ml_dtypes(problem):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = problem.x.astype(ml_dtypes.bfloat16)
    assert fusedmoe.as_tensor(x).data_ptr == x.ctypes.data
    w13, w2 = problem.w13.astype(ml_dtypes.bfloat16), problem.w2.astype(ml_dtypes.bfloat16)
    output = run(problem, hidden_states=x, w13=w13, w2=w2)
    assert output.dtype == x.dtype
    assert relative_error(output.astype(np.float32), run(problem)) < 2e-2


def test_activations(problem):
    values, scales = fusedmoe.quantize_activations(problem.x, "fp8_channel_token")
    assert (values.dtype, values.shape, scales.shape) == ("e4m3", (5, 64), (5, 1))
    with pytest.raises(ValueError, match="quantizes activations"):
        fusedmoe.quantize_activations(problem.x, "bf16")
    assert "nvfp4" in fusedmoe.schemes()


def test_errors_name_the_argument(problem):
    wrong = [
        ("topk_ids", problem.ids.astype(np.int64)),
        ("topk_weights", problem.weights[:4]),
        ("w2", problem.w2[:4]),
        ("w2", None),
        ("w13", [[1, 2]]),
        ("w13", problem.w13.astype(np.uint16)),
        ("activation", "nonsense"),
        ("activation", 3),
        ("scheme", "nonsense"),
        ("expert_map", np.zeros(3, np.int32)),
    ]
    for name, value in wrong:
        with pytest.raises(ValueError) as caught:
            run(problem, **{name: value})
        assert caught.value.argument.startswith(name) and name in str(caught.value)


@pytest.mark.parametrize("call", ["fused_experts", "forward", "forward_routed", "route"])
def test_random_wrong_calls_raise(problem, call):
    """Each call has one argument of another shape, type, stride or owner: it raises or it works.

    FUSEDMOE_WRONG_CALLS: how many, for each function."""
    generator = random.Random(1)
    layer = fusedmoe.MoELayer.from_tensors(
        problem.w13, problem.w2, topk=2, router_weight=problem.gate, dtype="f32"
    )
    cache, out = fusedmoe.PackCache(), np.empty_like(problem.x)
    x = dict(hidden_states=problem.x, out=out)
    routed = dict(**x, topk_weights=problem.weights, topk_ids=problem.ids)
    function, right = {
        "fused_experts": (
            lambda **given: fusedmoe.fused_experts(cache=cache, **given),
            dict(
                **routed, w13=problem.w13, w2=problem.w2, w1_bias=np.zeros((8, 64), np.float32),
                expert_map=np.arange(8, dtype=np.int32),
            ),
        ),
        "forward": (
            layer,
            dict(
                **routed, router_logits=np.empty((5, 8), np.float32),
                expert_load=np.empty(8, np.int32),
                workspace=fusedmoe.empty([layer.workspace_bytes(5)], "u8"),
            ),
        ),
        "forward_routed": (layer.forward_routed, routed),
        "route": (
            lambda **given: fusedmoe.route(**given, topk=2),
            dict(
                router_logits=problem.x[:, :8].copy(),
                e_score_correction_bias=np.zeros(8, np.float32),
            ),
        ),
    }[call]
    changes = [
        lambda a: a[1:],
        lambda a: a[::-1],
        lambda a: a[..., ::2],
        lambda a: a[None],
        lambda a: a[0],
        lambda a: a[:0],
        lambda a: a.T,
        lambda a: np.broadcast_to(a[:1], a.shape),
        lambda a: a.astype(generator.choice(["f8", "f2", "i8", "u1", "i1", "c8", "?", "O", "U4"])),
        lambda a: a.reshape(-1),
        lambda a: a.copy().view(np.recarray),
        lambda a: memoryview(a),
        lambda a: fusedmoe.as_tensor(np.from_dlpack(fusedmoe.as_tensor(a.copy()))[1:]),
        lambda a: fusedmoe.empty([1 << 40], "u8"),
        lambda a: fusedmoe.empty(list(a.shape), "f32", "cuda:0"),
        lambda a: None,
        lambda a: 1.5,
    ]
    calls = int(os.environ.get("FUSEDMOE_WRONG_CALLS", "1000"))
    raised = 0
    for _ in range(calls):
        name = generator.choice(list(right))
        array = np.from_dlpack(right[name]) if name == "workspace" else right[name]
        try:
            function(**{**right, name: generator.choice(changes)(array)})
        except (ValueError, NotImplementedError, MemoryError, RuntimeError, TypeError):
            raised += 1
    assert raised > calls / 4
