"""Each argument that is an array: what is none is refused by the argument's name."""

import inspect

import numpy as np
import pytest
from test_package import public_callables

import fusedmoe


def entries(p):
    """Every function that takes arrays: how to call it, and arrays that it takes."""
    w = {"w13": p.w13, "w2": p.w2}
    x = {"hidden_states": p.x}
    routed = {**x, "topk_weights": p.weights, "topk_ids": p.ids}
    logits = p.x[:, :8].copy()
    made_with = {"router_weight": p.gate, "dtype": "f32", "topk": 2}
    layer = fusedmoe.MoELayer.from_tensors(**w, **made_with)

    def made(**arrays):
        return fusedmoe.MoELayer.from_tensors(**{**w, **made_with, **arrays})

    def repacked(**arrays):
        return layer.repack(0, **arrays)

    one = {"w13": p.w13[:1], "w2": p.w2[:1]}
    window = fusedmoe.LoadWindow(1, 8, 1)
    ranks = {"num_ranks": 2, "tokens_per_rank": 1}
    selection = fusedmoe.explain(num_experts=4, topk=2, hidden=128, intermediate=128)
    return {
        "as_tensor": (fusedmoe.as_tensor, {"x": p.x}),
        "fused_experts": (fusedmoe.fused_experts, {**routed, **w}),
        "route": (lambda **a: fusedmoe.route(**a, topk=2), {"router_logits": logits}),
        "router_logits": (fusedmoe.router_logits, {**x, "weight": p.gate}),
        "quantize_weights": (
            lambda **a: fusedmoe.quantize_weights(**a, scheme="mxfp4"), {"values": p.gate}),
        "quantize_activations": (
            lambda **a: fusedmoe.quantize_activations(**a, scheme="mxfp4"), {"x": p.x}),
        "MoELayer.from_tensors": (made, {}),
        "MoELayer.__call__": (layer, x),
        "MoELayer.forward_routed": (layer.forward_routed, routed),
        "MoELayer.begin": (layer.begin, routed),
        "MoELayer.repack": (repacked, one),
        "LoadWindow.add": (lambda **a: window.add(0, **a), {"expert_load": np.zeros(8, np.int32)}),
        "Selection.simulate": (
            lambda **a: selection.simulate(**a, **ranks), {"topk_ids": np.zeros((1, 2), np.int32)}),
    }  # fmt: skip


def array_arguments(function):
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.annotation in ("Array", "Optional[Array]")]


TAKING = {name: names for name, f in public_callables() if not inspect.isclass(f)
          and "nb_method" not in type(f).__name__ and (names := array_arguments(f))}  # fmt: skip


def test_every_function_that_takes_arrays_is_here(problem):
    assert set(TAKING) == set(entries(problem))


@pytest.mark.parametrize("entry", TAKING)
def test_what_is_no_array_is_refused_by_name(entry, problem):
    function, arrays = entries(problem)[entry]
    function(**arrays)
    for name in TAKING[entry]:
        with pytest.raises(ValueError) as caught:
            function(**{**arrays, name: [1, 2]})
        assert (caught.value.argument, str(caught.value)[: len(name)]) == (name, name)


def test_what_is_no_array_among_settings_is_refused_by_name(problem):
    def named(**settings):
        with pytest.raises(ValueError) as caught:
            fusedmoe.MoELayer.from_tensors(problem.w13, problem.w2, topk=2, dtype="f32", **settings)
        return caught.value.argument

    shared = {"w13": problem.w13[:1], "w2": problem.w2[:1]}
    for name in ("w13", "w2", "gate", "w1_bias"):
        assert named(shared={**shared, name: [1, 2]}) == f"shared: {name}"
    for name in ("w1_scale", "w2_zp", "a1_scale", "w1_bias"):
        assert named(weights={name: [1, 2]}) == name


def test_what_is_no_list_of_numbers_is_refused_by_name():
    calls = {
        "loads": (lambda loads: fusedmoe.balance(loads, 2), [7, None, [["a"]], "loads"]),
        "matrix": (lambda m: fusedmoe.dequantize_weights(m, "mxfp4", 64), [7, [1, 2]]),
    }
    for name, (function, wrongs) in calls.items():
        for wrong in wrongs:
            with pytest.raises(ValueError, match=f"^{name}: was") as caught:
                function(wrong)
            assert caught.value.argument == name
