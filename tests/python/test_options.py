"""Every option and argument is obeyed or refused: a case for each, and none may be missing."""

import copy
import inspect
import os
import tempfile

import numpy as np
import pytest
from conftest import f32, golden_dir, relative_error

import fusedmoe
from fusedmoe.options import names

MakeLayer = fusedmoe.MoELayer.from_tensors


class Case:
    """A layer, its experts and an input: each method takes an option in addition."""

    def __init__(self, problem):
        self.p = problem
        self.plain = self.layer()

    def layer(self, **options):
        given = {"topk": 2, "router_weight": self.p.gate, "dtype": "f32", **options}
        return MakeLayer(self.p.w13, self.p.w2, **given)

    def experts(self, **arguments):
        p = self.p
        given = {"x": p.x, "w13": p.w13, "w2": p.w2, **arguments}
        first = [given.pop(name) for name in ("x", "w13", "w2")]
        return fusedmoe.fused_experts(*first, p.weights, p.ids, **given)

    def call(self, **arguments):
        return self.plain(self.p.x, **arguments)


def refused(match, function, *arguments, **options):
    with pytest.raises((ValueError, NotImplementedError, TypeError, OSError), match=match):
        function(*arguments, **options)
    return True


def other(c, **options):
    """The option changes the output."""
    return not np.array_equal(c.layer(**options)(c.p.x), c.plain(c.p.x))


def of_ranks(name, value):
    return lambda c: refused(f"{name} cannot be used without a communicator", c.layer, **{name: value})


def fp8(c):
    """Makes the weights such, and returns what belongs to them."""
    for name in ("w13", "w2"):
        zeros = np.zeros(getattr(c.p, name).shape, np.uint8)
        setattr(c.p, name, fusedmoe.as_tensor(zeros).view("e4m3"))
    scales = np.ones(8, np.float32)
    return {"scheme": "fp8_tensor", "w1_scale": scales, "w2_scale": scales}


def same_from_file(c):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "packed.safetensors")
        layer = c.layer()
        layer.save_packed(path)
        again = c.layer(packed_weights=path, packed_read=True, packed_verify=False)
        return np.array_equal(again(c.p.x), layer(c.p.x))


HALVES = '{"num_experts": 8, "num_ranks": 2, "physical_to_logical": [0, 1, 2, 3, 4, 5, 6, 7], "rank_of": [0, 1, 1, 1, 1, 1, 1, 1]}'  # fmt: skip

OPTIONS = {
    "device": lambda c: refused("cuda:99", c.layer, device="cuda:99"),
    "dtype": lambda c: c.layer(dtype="bf16").info["dtype"] == "bf16",
    "output_dtype": lambda c: c.layer(dtype="bf16", output_dtype="f32").info["output_dtype"] == "f32",
    "require": lambda c: c.layer(require="reference").plan_line.startswith("reference+no_ep"),
    "plan": lambda c: c.layer(plan=c.layer(require="reference").plan_json).plan_line.startswith("ref"),
    # One scale for a whole batch, for one, cannot be independent of it.
    "batch_invariant": lambda c: c.layer(weights=fp8(c))
    and refused("one activation scale", c.layer, batch_invariant=True, weights=fp8(c)),
    "inplace": lambda c: refused("output", lambda: c.call(out=c.p.x))
    and c.layer(inplace=True)(c.p.x, out=c.p.x) is c.p.x,
    "monolithic": lambda c: refused("monolithic", c.layer, monolithic=True, router_weight=None),
    "num_threads": lambda c: "threads=1" in c.layer(num_threads=1).plan_line
    and refused("num_threads", c.layer, num_threads=-1),
    "max_workspace_bytes": lambda c: refused("max_workspace_bytes", c.layer, max_workspace_bytes=1),
    "tp_size": lambda c: refused("intermediate", c.layer, tp_size=2)
    and c.layer(tp_size=2, intermediate=32).info["intermediate"] == 16
    and refused("size", c.layer, tp_size=2**30, intermediate=32),
    "tp_rank": lambda c: refused("tp_rank", c.layer, tp_rank=1),
    "ep_size": lambda c: refused("expert map", c.layer, ep_size=2),
    "ep_rank": lambda c: refused("ep_rank", c.layer, ep_rank=1),
    "dp_size": lambda c: refused("dp_size", c.layer, dp_size=2),
    "sequence_parallel": lambda c: refused("sequence_parallel", c.layer, sequence_parallel=True),
    "communicator": lambda c: refused("Communicator", c.layer, communicator=7)
    and refused("communicator", c.layer, communicator=fusedmoe.Communicator.threads(1)[0],
                tp_size=2, intermediate=32),
    "placement": lambda c: refused("placement", c.layer, placement=HALVES)
    and c.layer(placement=HALVES, ep_size=2, ep_rank=1).info["num_local_experts"] == 7,
    "max_tokens_per_rank": of_ranks("max_tokens_per_rank", 8),
    "receive_capacity": of_ranks("receive_capacity", 8),
    "nearest_replica": lambda c: refused("replica_choice cannot", c.layer, nearest_replica=True),
    "combine": of_ranks("combine", "per_rank"),
    "combine_dtype": of_ranks("combine_dtype", "f32"),
    "dispatch_dtype": of_ranks("dispatch_dtype", "f32"),
    "drop_rows": of_ranks("drop_rows", True),
    "lanes": of_ranks("lanes", 2),
    "packed_weights": lambda c: same_from_file(c) and refused("none.bin", c.layer, packed_weights="none.bin"),
    "packed_read": lambda c: refused("packed_weights", c.layer, packed_read=True),
    "packed_verify": lambda c: refused("packed_weights", c.layer, packed_verify=False),
}  # fmt: skip


TENSORS = {
    "w13": lambda c: refused("w13", MakeLayer, None, c.p.w2, topk=2),
    "w2": lambda c: refused("w2", MakeLayer, c.p.w13, None, topk=2),
    "topk": lambda c: other(c, topk=1),
    "num_experts": lambda c: refused("num_experts", c.layer, num_experts=9),
    "router_weight": lambda c: other(c, router_weight=-c.p.gate),
    "router_bias": lambda c: other(c, router_bias=np.arange(8, dtype=np.float32)),
    "e_score_correction_bias": lambda c: other(
        c, e_score_correction_bias=np.arange(8, dtype=np.float32)
    ),
    "scoring_func": lambda c: other(c, scoring_func="sigmoid"),
    "renormalize": lambda c: other(c, renormalize=True),
    "renormalize_epsilon": lambda c: refused("epsilon", c.layer, renormalize_epsilon=-1.0),
    "num_expert_group": lambda c: refused("num_expert_group", c.layer, num_expert_group=3),
    "topk_group": lambda c: refused("topk_group", c.layer, topk_group=1),
    "routed_scaling_factor": lambda c: other(c, routed_scaling_factor=2.0),
    "apply_router_weight_on_input": lambda c: refused(
        "apply_router_weight_on_input", c.layer, apply_router_weight_on_input=True
    ),
    "num_zero_experts": lambda c: refused("router_weight", c.layer, num_zero_experts=1),
    "sparsemixer_jitter": lambda c: refused("jitter", c.layer, sparsemixer_jitter=-1.0),
    "latent_down": lambda c: refused("latent", c.layer, latent_down=c.p.gate),
    "latent_up": lambda c: refused("latent", c.layer, latent_up=c.p.gate),
    "expert_map": lambda c: refused("expert_map", c.layer, expert_map=np.zeros(8, np.int32)),
    "intermediate": lambda c: refused("intermediate", c.layer, intermediate=33),
    "shared": lambda c: other(c, shared={"w13": c.p.w13[:1], "w2": c.p.w2[:1]}),
    "weights": lambda c: other(c, weights={"activation": "gelu"}),
}

CALL = {
    "hidden_states": lambda c: refused("hidden_states", c.plain, None, out=c.p.x),
    "out": lambda c: refused("out", c.call, out=np.zeros((1, 64), np.float32)),
    "topk_weights": lambda c: filled(c, "topk_weights", (5, 2), np.float32),
    "topk_ids": lambda c: filled(c, "topk_ids", (5, 2), np.int32),
    "router_logits": lambda c: filled(c, "router_logits", (5, 8), np.float32),
    "expert_load": lambda c: filled(c, "expert_load", (8,), np.int32),
    "accumulate": lambda c: relative_error(
        c.call(out=c.call(), accumulate=True), 2 * c.call()) < 1e-6,
    "stream": lambda c: refused("stream", c.call, stream=1),
    "workspace": lambda c: refused("workspace", c.call, workspace=np.zeros(1, np.uint8)),
    "max_tokens": lambda c: refused("at most 4", c.call, max_tokens=4)
    and refused("max_tokens", c.call, max_tokens=-1),
    "dropped_rows": lambda c: filled(c, "dropped_rows", (1,), np.int32),
    "fixed_sizes": lambda c: np.array_equal(c.call(fixed_sizes=True), c.call()),
    "expert_map": lambda c: refused(
        "made without LayerWeights::expert_map", c.call, expert_map=np.zeros(8, np.int32)),
    "lane": lambda c: refused("options.lane", c.call, lane=1),
}  # fmt: skip


def filled(c, name, shape, dtype):
    result = np.full(shape, 77, dtype)
    c.call(**{name: result})
    return not (result == 77).any()


def changes(c, **arguments):
    return not np.array_equal(c.experts(**arguments), c.experts())


EXPERTS = {
    "hidden_states": lambda c: refused("hidden_states", c.experts, x=None, out=c.p.x),
    "w13": lambda c: refused("w13", c.experts, w13=None),
    "w2": lambda c: refused("w2", c.experts, w2=None),
    "topk_weights": lambda c: refused("topk_weights", fusedmoe.fused_experts, c.p.x, c.p.w13, c.p.w2,
                                      c.p.weights[:1], c.p.ids),
    "topk_ids": lambda c: refused("topk_ids", fusedmoe.fused_experts, c.p.x, c.p.w13, c.p.w2,
                                  c.p.weights, c.p.ids[:1]),
    "inplace": lambda c: c.experts(x=(x := c.p.x.copy()), inplace=True) is x
    and refused("inplace", c.experts, inplace=True, out=np.zeros_like(c.p.x)),
    "out": lambda c: refused("out", c.experts, out=np.zeros((1, 64), np.float32)),
    "activation": lambda c: changes(c, activation="gelu"),
    "apply_router_weight_on_input": lambda c: refused(
        "apply_router_weight_on_input|topk", c.experts, apply_router_weight_on_input=True),
    "global_num_experts": lambda c: all(
        refused("global_num_experts|expert map", c.experts, global_num_experts=n)
        for n in (-2, 9, 2**40, 2**62)),
    "expert_map": lambda c: refused("expert_map", c.experts, expert_map=np.zeros(3, np.int32)),
    "scheme": lambda c: refused("fp9", c.experts, scheme="fp9"),
    "alpha": lambda c: refused("alpha", c.experts, alpha=2.0),
    "beta": lambda c: refused("beta", c.experts, beta=2.0),
    "limit": lambda c: changes(c, limit=0.01),
    "situ_beta": lambda c: changes(c, activation="situ", situ_beta=1.5)
    and refused("situ_beta", c.experts, activation="situ"),
    "situ_linear_beta": lambda c: refused("situ_linear_beta", c.experts, situ_linear_beta=1.0),
    "gate_up_layout": lambda c: changes(c, gate_up_layout="up_gate")
    and refused("sideways", c.experts, gate_up_layout="sideways"),
    "transposed": lambda c: refused("w2", c.experts, transposed=True),
    "scale_layout": lambda c: refused("sideways", c.experts, scale_layout="sideways")
    and refused("scale_layout", c.experts, scale_layout="tiled_128x4"),
    "require": lambda c: refused("sm90|nobody", c.experts, require="nobody"),
    "stream": lambda c: refused("stream", c.experts, stream=1),
    "cache": lambda c: [c.experts(cache=(cache := fusedmoe.PackCache())), len(cache)][1] == 1,
    # Tensors that unquantized weights do not have.
    **{name: (lambda c, name=name: refused("scale|zero|zp", c.experts, **{name: np.ones(3, np.float32)}))
       for name in ("w1_scale", "w2_scale", "w1_zp", "w2_zp", "w1_global_scale", "w2_global_scale",
                    "a1_scale", "a2_scale")},
    "w1_bias": lambda c: changes(c, w1_bias=np.ones((8, 64), np.float32),
                                 w2_bias=np.zeros((8, 64), np.float32)),
    "w2_bias": lambda c: refused("bias", c.experts, w2_bias=np.ones((8, 3), np.float32)),
}  # fmt: skip

# As fused_experts() has them, but by `weights`.
WEIGHTS = {name: EXPERTS[name] for name in names(fusedmoe.ExpertSettings)}

ROUTE = {
    "router_logits": lambda c: refused("router_logits", fusedmoe.route, None, 2),
    "topk": lambda c: refused("topk", fusedmoe.route, c.p.x, 65),
    "scoring_func": lambda c: refused("nobody", fusedmoe.route, c.p.x, 2, scoring_func="nobody"),
    "renormalize": lambda c: abs(f32(fusedmoe.route(c.p.x, 2, renormalize=True)[0])[0].sum() - 1) < 1e-6,
    "renormalize_epsilon": lambda c: refused(
        "epsilon", fusedmoe.route, c.p.x, 2, renormalize_epsilon=-1.0),
    "num_expert_group": lambda c: refused("group", fusedmoe.route, c.p.x, 2, num_expert_group=3),
    "topk_group": lambda c: refused("topk_group", fusedmoe.route, c.p.x, 2, topk_group=1),
    "e_score_correction_bias": lambda c: refused(
        "bias", fusedmoe.route, c.p.x, 2, e_score_correction_bias=np.zeros(3, np.float32)),
    "routed_scaling_factor": lambda c: not f32(
        fusedmoe.route(c.p.x, 2, routed_scaling_factor=0.0)[0]).any(),
    "sparsemixer_jitter": lambda c: refused(
        "jitter", fusedmoe.route, c.p.x, 2, sparsemixer_jitter=-1.0),
}  # fmt: skip

QUANTIZE = {
    "values": lambda c: refused("values", fusedmoe.quantize_weights, None, "nvfp4"),
    "scheme": lambda c: refused("fp9", fusedmoe.quantize_weights, c.p.gate, "fp9"),
    "scale_rule": lambda c: refused("scale_rule", fusedmoe.quantize_weights, c.p.gate, "nvfp4",
                                    scale_rule="even"),
    "scale_dtype": lambda c: refused("scale_dtype", fusedmoe.quantize_weights, c.p.gate, "nvfp4",
                                     scale_dtype="bf16")
    and fusedmoe.quantize_weights(c.p.gate, "int4_g32", scale_dtype="bf16").scales.dtype == "bf16",
    "global_amax": lambda c: refused("global_amax", fusedmoe.quantize_weights, c.p.gate, "mxfp4",
                                     global_amax=1.0),
}  # fmt: skip



def gpu(compute_capability):
    return fusedmoe.explain(
        num_experts=8, topk=2, hidden=64, intermediate=32, device="cuda",
        compute_capability=compute_capability,
    )  # fmt: skip


def explained(match=None, **options):
    config = {"num_experts": 8, "topk": 2, "hidden": 64, "intermediate": 32, **options}
    text = str(fusedmoe.explain(**config))
    return match is None or match in text


EXPLAIN = {
    **{name: (lambda c, name=name: fusedmoe.explain(
        **{"num_experts": 8, "topk": 2, "hidden": 64, "intermediate": 32, name: -1}).chosen is None)
       for name in ("num_experts", "num_local_experts", "topk", "hidden", "intermediate")},
    "dtype": lambda c: refused("f99", explained, dtype="f99"),
    "device": lambda c: refused("device", explained, device="tpu"),
    "compute_capability": lambda c: str(gpu(80)) != str(gpu(90)),
    "require": lambda c: refused("nobody", explained, require="nobody"),
    "scheme": lambda c: refused("fp9", explained, scheme="fp9"),
    "activation": lambda c: refused("nobody", explained, activation="nobody"),
    **{name: (lambda c, name=name: explained(name, **{name: 2.0}))
       for name in ("alpha", "beta", "situ_beta", "situ_linear_beta")},
    "limit": lambda c: explained("limit", limit=float("nan")),
    "has_bias": lambda c: explained("*  cpu", has_bias=True),
    "has_expert_map": lambda c: fusedmoe.explain(
        num_experts=8, num_local_experts=4, topk=2, hidden=64, intermediate=32,
        has_expert_map=True).chosen is not None,
    "apply_router_weight_on_input": lambda c: explained(
        "router weight on input", apply_router_weight_on_input=True),
    "batch_invariant": lambda c: explained(
        "one activation scale", batch_invariant=True, scheme="fp8_tensor"),
    "monolithic": lambda c: explained("monolithic", monolithic=True),
}  # fmt: skip

TABLES = {
    "from_tensors": ({**TENSORS, **OPTIONS}, inspect.signature(MakeLayer).parameters),
    "names in weights": (WEIGHTS, names(fusedmoe.ExpertSettings)),
    "call of a layer": (CALL, list(inspect.signature(fusedmoe.MoELayer.__call__).parameters)[1:]),
    "fused_experts": (EXPERTS, inspect.signature(fusedmoe.fused_experts).parameters),
    "route": (ROUTE, inspect.signature(fusedmoe.route).parameters),
    "quantize_weights": (QUANTIZE, inspect.signature(fusedmoe.quantize_weights).parameters),
    "explain": (EXPLAIN, names(fusedmoe.ExplainConfig)),
}


@pytest.mark.parametrize("table", TABLES)
def test_every_option_is_obeyed_or_refused(table, problem):
    cases, known = TABLES[table]
    assert set(cases) == set(known)
    for name, case in cases.items():
        assert case(Case(copy.deepcopy(problem))), name


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss_mxfp4", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_parts_of_ranks_add_up_to_the_layer(name, kind):
    path = golden_dir() / f"{name}.safetensors"
    x = fusedmoe.load_file(path)["io.T7.hidden_states"].astype("f32")

    def output(**options):
        return f32(fusedmoe.MoELayer.from_checkpoint(path, dtype="f32", **options)(x))

    parts = [output(**{f"{kind}_size": 2, f"{kind}_rank": rank}) for rank in (0, 1)]
    assert relative_error(parts[0] + parts[1], output()) < 1e-5
