"""Compares fusedmoe with NumPy on layers in the forms that models are published in and that no tool
writes on a CPU (part of make interop).

A file holds random codes in the published names and types; the layer is computed from what these
stand for by their definition (published_formats.py). With --vectors DIR writes the files of
tests/unit/tool_files_test.cpp.
"""

import argparse
import json
import pathlib
import struct
import sys
import tempfile

import numpy as np

import published_formats as formats

WEIGHTS_ONLY, WITH_ACTIVATIONS = 2e-6, 1e-5  # as in tools.py: largest, median difference of a row
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def save(path, tensors, metadata):
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, array) in tensors.items():
        begin = len(data)
        data += np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": np.shape(array), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def output_of(path):
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    found = json.loads(raw[8:8 + size])["output"]
    begin, end = found["data_offsets"]
    return np.frombuffer(raw[8 + size + begin:8 + size + end], np.float32).reshape(found["shape"])


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(gate, up, limit):
    return silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)


def swiglu_step(gate, up, limit):
    """The limit is that of silu's result, not of its argument."""
    return np.minimum(silu(gate), limit) * np.clip(up, -limit, limit)


def swiglu_oai(gate, up, limit):
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


class Layer:
    """Router, experts and shared expert: weights, and what is done to rows before each matrix."""

    def __init__(self, limit=None, shared_limit=None):  # None and 0: no limit
        self.experts, self.shared, self.shared_gate, self.bias = [], None, None, 0
        self.limit, self.shared_limit = limit or np.inf, shared_limit or np.inf

    def mlp(self, expert, rows, limit):
        (gate, up, down), activations, biases = expert
        rows = activations(rows.astype(np.float32))
        inner = self.activation(rows @ gate.T + biases[0], rows @ up.T + biases[1], limit)
        return activations(inner.astype(np.float32)) @ down.T + biases[2]

    activation = staticmethod(swiglu)

    def choose(self, logits, topk):
        """Softmax, the weights of the chosen ones in sum 1."""
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        ids = np.argsort(-scores, -1, kind="stable")[:, :topk]
        weights = np.take_along_axis(scores, ids, -1)
        return ids, weights / weights.sum(-1, keepdims=True)

    def output(self, x, topk):
        ids, weights = self.choose(x.astype(np.float64) @ self.router.T + self.bias, topk)
        result = np.zeros(x.shape)
        for t, row in enumerate(x):
            for e, weight in zip(ids[t], weights[t]):
                result[t] += weight * self.mlp(self.experts[e], row[None], self.limit)[0]
        if self.shared is None:
            return result
        shared = self.mlp(self.shared, x, self.shared_limit)
        if self.shared_gate is not None:
            shared /= 1 + np.exp(-(x.astype(np.float64) @ self.shared_gate.T))
        return result + shared


class Sigmoid(Layer):
    """Scores of the logits by themselves; a bias in the choice alone; a factor."""

    factor, score = 2.5, staticmethod(lambda logits: 1 / (1 + np.exp(-logits)))

    def choose(self, logits, topk):
        scores = self.score(logits)
        ids = np.argsort(-(scores + self.correction), -1, kind="stable")[:, :topk]
        weights = np.take_along_axis(scores, ids, -1)
        return ids, self.factor * weights / weights.sum(-1, keepdims=True)


class Ling(Sigmoid):
    activation = staticmethod(swiglu_step)


class DeepSeekV4(Sigmoid):
    factor, score = 1.5, staticmethod(lambda logits: np.sqrt(np.log1p(np.exp(logits))))


class GptOss(Layer):
    activation = staticmethod(swiglu_oai)


class Model:
    """One file: config, tensors, and the layers that they stand for."""

    def __init__(self, model_type, hidden, inner, experts=4, layers=1, **config):
        self.rng = np.random.default_rng(1)
        self.hidden, self.inner, self.experts, self.topk = hidden, inner, experts, 2
        self.config = dict(model_type=model_type, hidden_size=hidden, moe_intermediate_size=inner,
                           num_experts=experts, num_experts_per_tok=2, num_hidden_layers=layers,
                           torch_dtype="bfloat16") | config
        self.tensors, self.layers, self.exact = {}, {}, True

    def linear(self, kind, name, n, k):
        parts, weights = kind(self.rng, n, k)
        self.tensors |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
        return weights

    def mlp(self, kind, name_of, inner, matrices=GATE_UP_DOWN):
        sizes = [(inner, self.hidden), (inner, self.hidden), (self.hidden, inner)]
        weights = [self.linear(kind, name_of(matrix), *size) for matrix, size in zip(matrices, sizes)]
        self.exact &= kind not in formats.ACTIVATIONS
        return weights, formats.ACTIVATIONS.get(kind, lambda rows: rows), (0, 0, 0)

    def add(self, number, kind, layer=None, block="model.layers.{}.mlp", matrices=GATE_UP_DOWN,
            name="{block}.experts.{e}.{matrix}", router="gate"):
        block = block.format(number)
        layer = self.layers[number] = layer or Layer()
        layer.router = self.linear(formats.plain, f"{block}.{router}", self.experts, self.hidden)
        for e in range(self.experts):
            layer.experts.append(self.mlp(
                kind, lambda matrix: name.format(block=block, e=e, matrix=matrix), self.inner,
                matrices))
        return self

    def add_shared(self, number, kind, name, inner, matrices=GATE_UP_DOWN):
        self.layers[number].shared = self.mlp(kind, lambda matrix: name + matrix, inner, matrices)
        return self

    def stack(self, block, names, parts, transposed=False):
        """The experts' parts become stacks, gate and up in one: `names` of both, `parts`: what is
        behind the name for each part."""
        made = {}
        for part, suffix in parts.items():
            every = [[self.tensors.pop(f"{block}.experts.{e}.{matrix}.{part}") for matrix in GATE_UP_DOWN]
                     for e in range(self.experts)]
            for name, chosen in zip(names, (slice(0, 2), slice(2, 3))):
                arrays = [[array for _, array in expert[chosen]] for expert in every]
                stack = np.stack([a[0] if np.ndim(a[0]) == 0 else np.concatenate(a) for a in arrays])
                made[f"{block}.{name}{suffix}"] = (every[0][0][0],
                                                   stack.swapaxes(1, 2) if transposed else stack)
        self.tensors |= made
        return self

    def hidden_states(self):
        return np.random.default_rng(2).standard_normal((8, self.hidden)).astype(np.float32)

    def write(self, path, with_outputs=False):
        x = self.hidden_states()
        tensors = self.tensors | {"check.input": ("F32", x)} if with_outputs else self.tensors
        if with_outputs:
            for i, (number, layer) in enumerate(sorted(self.layers.items())):
                name = "check.output" if i == 0 else f"check.output.{number}"
                tensors[name] = "F32", layer.output(x, self.topk).astype(np.float32)
        save(path, tensors, {"config": json.dumps(self.config)})


# --------------------------------------------------------------------------------------------------

FP8 = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[128, 128])


def deepseek_v4(expert_dtype, kind):
    config = dict(n_routed_experts=4, n_shared_experts=1, num_hash_layers=0, norm_topk_prob=True,
                  routed_scaling_factor=1.5, scoring_func="sqrtsoftplus", topk_method="noaux_tc",
                  swiglu_limit=2.0, expert_dtype=expert_dtype,
                  quantization_config=FP8 | {"scale_fmt": "ue8m0"})
    model = Model("deepseek_v4", 128, 128, **config)
    del model.config["num_experts"]
    layer = DeepSeekV4(limit=2.0, shared_limit=2.0)
    model.add(0, kind, layer, "layers.{}.ffn", ("w1", "w3", "w2"))
    model.add_shared(0, formats.fp8_blocks_e8m0, "layers.0.ffn.shared_experts.", 128,
                     ("w1", "w3", "w2"))
    layer.correction = np.array([0.5, 0, -0.25, 0.25])
    model.tensors["layers.0.ffn.gate.bias"] = "F32", layer.correction.astype(np.float32)
    return model


def ling(limits, shared_limits):
    model = Model("bailing_hybrid", 64, 32, layers=2, moe_shared_expert_intermediate_size=32,
                  num_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=0,
                  norm_topk_prob=True, routed_scaling_factor=2.5, score_function="sigmoid",
                  router_dtype="fp32", moe_router_enable_expert_bias=True, layer_group_size=6,
                  linear_silu=True, expert_swiglu_limit_list=limits,
                  share_expert_swiglu_limit_list=shared_limits)
    for number in range(2):
        layer = Ling(limits[number], shared_limits[number])
        model.add(number, formats.plain, layer)
        model.add_shared(number, formats.plain, f"model.layers.{number}.mlp.shared_experts.", 32)
        layer.correction = np.array([0.5, 0, -0.25, 0.25])
        model.tensors[f"model.layers.{number}.mlp.gate.expert_bias"] = (
            "F32", layer.correction.astype(np.float32))
    return model


def qwen3(kinds, hidden, inner, quantization, name="{block}.experts.{e}.{matrix}"):
    """A layer of each kind."""
    model = Model("qwen3_moe", hidden, inner, layers=len(kinds), norm_topk_prob=True,
                  quantization_config=quantization)
    for number, kind in enumerate(kinds):
        model.add(number, kind, name=name)
    return model


def modelopt(**keys):
    return dict(quant_method="modelopt", producer={"name": "modelopt", "version": "0.44.0"},
                ignore=["lm_head"]) | keys


def modelopt_mixed():
    """NVFP4 with its inputs in layer 0, weights alone in layer 1."""
    experts = "model.layers.{}.mlp.experts"
    table = {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}
    for e in range(4):
        for matrix in GATE_UP_DOWN:
            table[f"{experts.format(0)}.{e}.{matrix}"] = {"quant_algo": "NVFP4", "group_size": 16}
    table[experts.format(1)] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    return qwen3([formats.nvfp4_with_inputs, formats.nvfp4], 64, 32,
                 modelopt(quant_algo="MIXED_PRECISION", quantized_layers=table))


def vision(model_type, kind, hidden, inner, experts, quantization, **more):
    """What stands in text_config, under names with language_model."""
    model = Model(model_type, hidden, inner, experts)
    model.config = dict(model_type=model_type, quantization_config=quantization, text_config=dict(
        model_type=f"{model_type}_text", hidden_size=hidden, moe_intermediate_size=inner,
        num_experts=experts, num_experts_per_tok=2, num_hidden_layers=1, norm_topk_prob=True) | more)
    return model.add(0, kind, block="model.language_model.layers.{}.mlp")


def qwen3_vl_fp8():
    model = vision("qwen3_vl_moe", formats.fp8_blocks, 128, 128, 3, FP8 | {
        "modules_to_not_convert": ["model.visual", "mlp.gate"]})
    return model.stack("model.language_model.layers.0.mlp",
                       ("experts.gate_up_proj", "experts.down_proj"),
                       {"weight": "", "weight_scale_inv": "_scale_inv"}, transposed=True)


def qwen3_5_nvfp4():
    """Gate and up share what is one number."""
    model = vision("qwen3_5_moe", formats.nvfp4_with_inputs, 64, 32, 4,
                   modelopt(quant_algo="NVFP4"), shared_expert_intermediate_size=32)
    block = "model.language_model.layers.0.mlp"
    for e, (weights, _, _) in enumerate(model.layers[0].experts):
        gate, up = (f"{block}.experts.{e}.{matrix}.weight_scale_2" for matrix in GATE_UP_DOWN[:2])
        weights[1] = weights[1] / np.float64(model.tensors[up][1]) * np.float64(model.tensors[gate][1])
    model.add_shared(0, formats.plain, f"{block}.shared_expert.", 32)
    model.layers[0].shared_gate = model.linear(formats.plain, f"{block}.shared_expert_gate", 1, 64)
    parts = ("weight_scale", "weight_scale_2", "input_scale")
    return model.stack(block, ("experts.gate_up_proj", "experts.down_proj"),
                       {"weight": ""} | {part: "_" + part for part in parts})


def gpt_oss(finish):
    """gate and up rows of their own, and biases; `finish` stores them."""
    model = Model("gpt_oss", 64, 32, intermediate_size=32, num_local_experts=4, swiglu_limit=7.0)
    model.add(0, formats.plain, GptOss(limit=7.0), router="router")
    layer, block = model.layers[0], "model.layers.0.mlp."
    layer.bias = formats.sixteenths(model.rng, 4)
    model.tensors[block + "router.bias"] = formats.bf16(layer.bias)
    layer.experts = [(weights, same, [formats.sixteenths(model.rng, len(w)) for w in weights])
                     for weights, same, _ in layer.experts]
    model.tensors = {name: part for name, part in model.tensors.items() if ".experts." not in name}
    finish(model, block, layer.experts)
    return model


def mlx(model, block, experts):
    for i, matrix in enumerate(GATE_UP_DOWN):
        for suffix, part in (("weight", 0), ("bias", 2)):
            model.tensors[f"{block}experts.{matrix}.{suffix}"] = formats.bf16(
                np.stack([expert[part][i] for expert in experts]))


def unsloth(model, block, experts):
    """A layer for each expert, in which gate and up rows take turns."""
    def add(name, weights, bias):
        model.tensors[f"{block}experts.{name}.weight"] = formats.bf16(weights)
        model.tensors[f"{block}experts.{name}.bias"] = formats.bf16(bias)

    for part in ("weight", "bias"):
        model.tensors[f"{block}router.linear.{part}"] = model.tensors.pop(f"{block}router.{part}")
    for e, ((gate, up, down), _, (gate_bias, up_bias, down_bias)) in enumerate(experts):
        add(f"gate_up_projs.{e}", np.stack([gate, up], 1).reshape(-1, gate.shape[1]),
            np.stack([gate_bias, up_bias], 1).reshape(-1))
        add(f"down_projs.{e}", down, down_bias)


def granite_fp8():
    group = dict(targets=["Linear"],
                 weights=dict(num_bits=8, type="float", symmetric=True, strategy="channel",
                              dynamic=False),
                 input_activations=dict(num_bits=8, type="float", symmetric=True, strategy="token",
                                        dynamic=True))
    model = Model("granitemoe", 64, 32, intermediate_size=32, num_local_experts=4,
                  quantization_config=dict(quant_method="compressed-tensors",
                                           format="float-quantized", config_groups={"group_0": group},
                                           ignore=["lm_head", "re:.*router.*"]))
    model.add(0, formats.fp8_channels, block="model.layers.{}.block_sparse_moe",
              router="router.layer")
    return model.stack("model.layers.0.block_sparse_moe", ("input_linear.", "output_linear."),
                       {"weight": "weight", "weight_scale": "weight_scale"})


def models():
    weights_only = dict(targets=["Linear"], input_activations=None,
                        weights=dict(num_bits=4, type="float", group_size=16, dynamic=False))
    gptq = dict(quant_method="gptq", bits=4, group_size=-1, sym=True, desc_act=True)
    awq = dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm",
               modules_to_not_convert=["model.layers.0.", "self_attn", "gate"])
    return {
        "deepseek_v4-fp4": deepseek_v4("fp4", formats.mxfp4_i8),
        "deepseek_v4-fp8": deepseek_v4("fp8", formats.fp8_blocks_e8m0),
        "bailing_hybrid-limits": ling([0, 1.5], [1.25, None]),
        "modelopt-W4A16_NVFP4": qwen3([formats.nvfp4], 64, 32,
                                      modelopt(quant_algo="W4A16_NVFP4", group_size=16)),
        "modelopt-NVFP4-input_activations-null": qwen3([formats.nvfp4], 64, 32, modelopt(
            quant_algo="NVFP4", config_groups={"group_0": weights_only})),
        "modelopt-MIXED_PRECISION": modelopt_mixed(),
        "modelopt-NVFP4-swapped-names": qwen3(
            [formats.nvfp4_with_inputs], 64, 32, modelopt(quant_algo="NVFP4"),
            "{block}.experts.{matrix}.{e}"),
        "fp8-plain-layer": qwen3(
            [formats.plain, formats.fp8_blocks], 128, 128,
            FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp"]}),
        "awq-plain-layer": qwen3([formats.plain, formats.awq], 64, 32, awq),
        "gptq-one-group-zero-bias": qwen3([formats.gptq_one_group], 64, 32, gptq),
        "qwen3_vl_moe-stacked-fp8": qwen3_vl_fp8(),
        "qwen3_5_moe-stacked-nvfp4": qwen3_5_nvfp4(),
        "granitemoe-stacked-fp8": granite_fp8(),
        "gpt_oss-mlx": gpt_oss(mlx),
        "gpt_oss-unsloth": gpt_oss(unsloth),
    }


def compare(program, model, directory):
    """Largest and median difference of a row, relative to the largest output."""
    from program import call

    x = model.hidden_states()
    save(directory / "x.safetensors", {"hidden_states": ("F32", x)}, {})
    model.write(directory / "model.safetensors")
    rows = []
    for number, layer in model.layers.items():
        wanted = layer.output(x, model.topk)
        for experts in ("reference", "cpu"):
            call(program, "run", "--checkpoint", directory / "model.safetensors", "--input",
                 directory / "x.safetensors", "--output", directory / "y.safetensors", "--dtype",
                 "f32", "--experts", experts, "--layer", number)
            actual = output_of(directory / "y.safetensors")
            rows.append(np.abs(actual - wanted).max(-1) / np.abs(wanted).max())
    return np.max(rows), np.median(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="the fusedmoe program")
    parser.add_argument("names", nargs="*", help="default: every form")
    parser.add_argument("--vectors", type=pathlib.Path, help="directory to write vectors to")
    options = parser.parse_args()
    chosen = {name: model for name, model in models().items() if name in (options.names or [name])}
    if options.vectors:
        for name, model in chosen.items():
            model.write(options.vectors / f"{name}.safetensors", with_outputs=True)
        return
    print("| form | largest difference of a row | median |\n| --- | --- | --- |")
    bad = 0
    for name, model in chosen.items():
        try:
            with tempfile.TemporaryDirectory() as directory:
                largest, median = compare(options.program, model, pathlib.Path(directory))
            right = largest <= WEIGHTS_ONLY if model.exact else median <= WITH_ACTIVATIONS
            text = f"{largest:.1e} | {median:.1e}{'' if right else ' **wrong**'}"
        except Exception as error:
            text, right = f"**failed**: {' '.join(str(error).split())[:160]} |", False
        bad += not right
        print(f"| {name} | {text} |", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
