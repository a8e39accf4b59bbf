"""Compares fusedmoe with the gguf package of llama.cpp (part of make interop).

Writes a small layer of each architecture and each type of blocks with gguf's writer, computes it in
numpy from the values that gguf's own dequantization gives, and runs it with `fusedmoe run`. The
blocks of types which gguf only decodes are random codes with scales of usual size. With --vectors DIR writes the files of tests/unit/gguf_test.cpp.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants
from safetensors.numpy import load_file, save_file

LIMIT = 2e-6


# Where the f16 factors of the blocks lie that gguf only decodes, and their largest values: weights
# of about one half.
FACTORS = {
    Type.Q2_K: {80: 0.01, 82: 0.03}, Type.Q3_K: {108: 0.004}, Type.Q4_K: {0: 0.002, 2: 0.016},
    Type.Q5_K: {0: 0.001, 2: 0.016}, Type.Q6_K: {208: 0.0002}, Type.IQ4_NL: {0: 0.005},
    Type.IQ4_XS: {0: 0.0002},
}
QUANTIZED = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4)


def random_blocks(rng, shape, kind):
    """Eleven random rows again and again, so that files can be compressed."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (11, shape[-1] // size, nbytes), dtype=np.uint8)
    for at, largest in FACTORS[kind].items():
        factors = rng.uniform(largest / 2, largest, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at:at + 2] = factors[..., None].view(np.uint8)
    rows = blocks.reshape(11, -1)[np.arange(np.prod(shape[:-1])) % 11]
    return rows.reshape(*shape[:-1], -1)


def stored(rng, shape, kind):
    """What lies in the file, and the values that it stands for."""
    if kind in FACTORS:
        data = random_blocks(rng, shape, kind)
    else:
        data = quants.quantize((rng.integers(-8, 9, shape) / 16).astype(np.float32), kind)
    return data, quants.dequantize(data, kind).astype(np.float64)


class Layer:
    """One file: tensors of block 0, and the metadata that says how they are used."""

    def __init__(self, arch, hidden, inner, experts, topk, seed=1, **keys):
        self.arch, self.rng = arch, np.random.default_rng(seed)
        self.hidden, self.inner, self.experts, self.topk = hidden, inner, experts, topk
        self.keys = dict(block_count=1, embedding_length=hidden, expert_count=experts,
                         expert_used_count=topk, expert_feed_forward_length=inner) | keys
        self.tensors, self.values = {}, {}
        self.others = []  # tensors of other layers

    def add(self, name, shape, kind=Type.F32):
        data, values = stored(self.rng, shape, kind)
        self.tensors[name] = (data, kind)
        self.values[name] = values
        return self

    def write(self, path, extra=()):
        writer = gguf.GGUFWriter(path, self.arch)
        for key, value in self.keys.items():
            name = f"{self.arch}.{key}"
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            else:
                writer.add_uint32(name, value)
        writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
        for name, (data, kind) in self.tensors.items():
            plain = data if kind != Type.BF16 else data.view(np.uint8)
            writer.add_tensor("blk.0." + name, plain, raw_dtype=kind)
        for name, data in [*self.others, *extra]:
            writer.add_tensor(name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu_oai(gate, up):
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def route(layer, logits):
    """llama.cpp's rules: the scores, the bias of the choice, the weights."""
    sigmoid = layer.keys.get("expert_gating_func") == 2
    scores = 1 / (1 + np.exp(-logits)) if sigmoid else softmax(logits)
    if layer.arch == "gpt-oss":
        scores = logits
    chosen = scores + layer.values.get("exp_probs_b.bias", 0)
    ids = np.argsort(-chosen, axis=-1, kind="stable")[:, : layer.topk]
    weights = np.take_along_axis(scores, ids, -1)
    if layer.arch == "gpt-oss":
        weights = softmax(weights)
    norm = {"olmoe": False, "qwen2moe": False}.get(layer.arch, True)
    if layer.keys.get("expert_weights_norm", norm):
        weights = weights / weights.sum(-1, keepdims=True)
    return ids, weights * layer.keys.get("expert_weights_scale", 1.0)


def expected(layer, x):
    v = layer.values
    x = x.astype(np.float64)
    logits = x @ v["ffn_gate_inp.weight"].T + v.get("ffn_gate_inp.bias", 0)
    ids, weights = route(layer, logits)
    if "ffn_latent_down.weight" in v:
        return expected_latent(v, x, ids, weights)
    act = swiglu_oai if layer.arch == "gpt-oss" else lambda g, u: silu(g) * u

    def bias(name, e):
        return v[name][e] if name in v else 0

    result = np.zeros_like(x)
    for t in range(len(x)):
        for e, weight in zip(ids[t], weights[t]):
            gate = v["ffn_gate_exps.weight"][e] @ x[t] + bias("ffn_gate_exps.bias", e)
            up = v["ffn_up_exps.weight"][e] @ x[t] + bias("ffn_up_exps.bias", e)
            down = v["ffn_down_exps.weight"][e] @ act(gate, up) + bias("ffn_down_exps.bias", e)
            result[t] += weight * down
    if "ffn_up_shexp.weight" in v:
        shared = (silu(x @ v["ffn_gate_shexp.weight"].T) * (x @ v["ffn_up_shexp.weight"].T))
        shared = shared @ v["ffn_down_shexp.weight"].T
        if "ffn_gate_inp_shexp.weight" in v:
            shared *= 1 / (1 + np.exp(-(x @ v["ffn_gate_inp_shexp.weight"])))[:, None]
        result += shared
    return result


def expected_latent(v, x, ids, weights):
    """Nemotron-H: experts without a gate between projections, the shared one on the full width."""
    def mlp(up, down, rows):
        return np.maximum(rows @ up.T, 0) ** 2 @ down.T

    rows = x @ v["ffn_latent_down.weight"].T
    total = np.zeros_like(rows)
    for t in range(len(x)):
        for e, weight in zip(ids[t], weights[t]):
            total[t] += weight * mlp(v["ffn_up_exps.weight"][e], v["ffn_down_exps.weight"][e], rows[t])
    shared = mlp(v["ffn_up_shexp.weight"], v["ffn_down_shexp.weight"], x)
    return total @ v["ffn_latent_up.weight"].T + shared


def make(arch, kind, down=None, hidden=32, inner=32, **keys):
    layer = Layer(arch, hidden, inner, 4, 2, **keys)
    layer.add("ffn_gate_inp.weight", (4, hidden))
    layer.add("ffn_gate_exps.weight", (4, inner, hidden), kind)
    layer.add("ffn_up_exps.weight", (4, inner, hidden), kind)
    layer.add("ffn_down_exps.weight", (4, hidden, inner), kind if down is None else down)
    return layer


def add_shared(layer, width, kind, down=None):
    layer.add("ffn_gate_shexp.weight", (width, layer.hidden), kind)
    layer.add("ffn_up_shexp.weight", (width, layer.hidden), kind)
    layer.add("ffn_down_shexp.weight", (layer.hidden, width), kind if down is None else down)
    return layer


# Gate and up, and down, as llama.cpp mixes them; the second of each line where rows are no whole
# blocks of 256.
MIXTURES = (
    (Type.Q4_K, Type.Q6_K), (Type.Q4_K, Type.Q5_0),
    (Type.Q5_K, Type.Q6_K), (Type.Q5_K, Type.Q5_1),
    (Type.Q3_K, Type.Q5_K), (Type.Q3_K, Type.Q4_K),
    (Type.Q2_K, Type.Q3_K), (Type.Q2_K, Type.IQ4_NL),
    (Type.IQ4_XS, Type.Q5_K), (Type.IQ4_XS, Type.IQ4_NL),
    (Type.Q5_0, Type.Q8_0), (Type.Q4_1, Type.F16), (Type.IQ4_NL, Type.MXFP4),
)


def large(kind):
    """Whether its blocks have 256 elements."""
    return gguf.GGML_QUANT_SIZES[kind][0] == 256


def merge_gate_up(layer):
    """Gate and up in one tensor, gate rows first; their biases, too."""
    for part in ("weight", "bias"):
        if f"ffn_gate_exps.{part}" in layer.tensors:
            gate, kind = layer.tensors.pop(f"ffn_gate_exps.{part}")
            up, _ = layer.tensors.pop(f"ffn_up_exps.{part}")
            layer.tensors[f"ffn_gate_up_exps.{part}"] = np.concatenate([gate, up], axis=1), kind
    return layer


def split_experts(layer):
    """One tensor for each expert, as llama.cpp wrote Mixtral before April 2024."""
    for matrix in ("gate", "up", "down"):
        data, kind = layer.tensors.pop(f"ffn_{matrix}_exps.weight")
        for e in range(layer.experts):
            layer.tensors[f"ffn_{matrix}.{e}.weight"] = data[e], kind
    return layer


def layers():
    big = dict(hidden=512, inner=256)
    result = {f"qwen3moe-{kind.name}": make("qwen3moe", kind)
              for kind in (Type.F32, Type.F16, Type.BF16, *QUANTIZED)}
    for kind in FACTORS:
        result[f"qwen3moe-{kind.name}"] = make("qwen3moe", kind, **(big if large(kind) else {}))
    for kind, down in MIXTURES:
        some = big if large(kind) or large(down) else {}
        result[f"qwen3moe-{kind.name}-{down.name}"] = make("qwen3moe", kind, down, **some)
    result["olmoe-Q8_0-Q4_0"] = make("olmoe", Type.Q8_0, Type.Q4_0)
    shared = make("qwen2moe", Type.Q4_0, expert_shared_feed_forward_length=64)
    add_shared(shared, 64, Type.Q8_0, Type.F16).add("ffn_gate_inp_shexp.weight", (32,))
    result["qwen2moe-Q4_0"] = shared
    deepseek = make("deepseek2", Type.Q8_0, expert_gating_func=2, expert_weights_norm=True,
                    expert_weights_scale=2.5, expert_shared_count=2, leading_dense_block_count=0)
    add_shared(deepseek, 64, Type.Q8_0).add("exp_probs_b.bias", (4,))
    result["deepseek2-Q8_0"] = deepseek
    lite = make("deepseek2", Type.Q4_0, expert_shared_count=1, expert_weights_scale=1.0)
    lite.keys["expert_weights_norm"] = False
    result["deepseek2-lite-Q4_0"] = add_shared(lite, 32, Type.F32)
    nemotron = Layer("nemotron_h_moe", 32, 32, 4, 2, moe_latent_size=64, expert_gating_func=2,
                     expert_weights_norm=True, expert_weights_scale=2.5, expert_shared_count=1,
                     expert_shared_feed_forward_length=32)
    nemotron.add("ffn_gate_inp.weight", (4, 32)).add("exp_probs_b.bias", (4,))
    nemotron.add("ffn_latent_down.weight", (64, 32), Type.Q8_0)
    nemotron.add("ffn_latent_up.weight", (32, 64), Type.F16)
    nemotron.add("ffn_up_exps.weight", (4, 32, 64), Type.Q4_0)
    nemotron.add("ffn_down_exps.weight", (4, 64, 32), Type.Q8_0)
    nemotron.add("ffn_up_shexp.weight", (32, 32), Type.Q8_0)
    nemotron.add("ffn_down_shexp.weight", (32, 32), Type.Q8_0)
    result["nemotron_h_moe-Q4_0"] = nemotron
    result["gpt-oss-MXFP4"] = gpt_oss(Type.MXFP4)
    result["gpt-oss-merged-Q8_0"] = merge_gate_up(gpt_oss(Type.Q8_0))
    result["qwen3moe-merged-Q4_0-F16"] = merge_gate_up(make("qwen3moe", Type.Q4_0, Type.F16))
    experts = split_experts(make("llama", Type.Q8_0, block_count=2))
    experts.others = [(f"blk.1.ffn_{matrix}.weight", np.ones((32, 32), np.float32))
                      for matrix in ("gate", "up", "down")]  # a dense layer
    result["llama-experts-Q8_0"] = experts
    result["llama-experts-Q4_0-F32"] = split_experts(make("llama", Type.Q4_0, Type.F32))
    return result


def gpt_oss(kind):
    layer = make("gpt-oss", kind).add("ffn_gate_inp.bias", (4,))
    for name in ("gate", "up", "down"):
        layer.add(f"ffn_{name}_exps.bias", (4, 32))
    return layer


def hidden_states(layer):
    rng = np.random.default_rng(2)
    return rng.standard_normal((5, layer.hidden)).astype(np.float32)


def compare(program, layer, directory):
    x = hidden_states(layer)
    wanted = expected(layer, x)
    layer.write(directory / "model.gguf")
    save_file({"hidden_states": x}, directory / "x.safetensors")
    worst = 0.0
    for experts in ("reference", "cpu"):
        command = [program, "run", "--checkpoint", directory / "model.gguf", "--input",
                   directory / "x.safetensors", "--output", directory / "y.safetensors", "--dtype",
                   "f32", "--experts", experts]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        actual = load_file(directory / "y.safetensors")["output"]
        worst = max(worst, float(np.abs(actual - wanted).max() / np.abs(wanted).max()))
    return worst


def write_blocks(path):
    """Four rows of every type, and the values that gguf gives them."""
    writer = gguf.GGUFWriter(path, "blocks")
    rng = np.random.default_rng(3)
    for kind in (*QUANTIZED, *FACTORS):
        data, values = stored(rng, (4, 256), kind)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        writer.add_tensor(f"{kind.name}.values", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="the fusedmoe program")
    parser.add_argument("--vectors", type=pathlib.Path, help="directory to write vectors to")
    options = parser.parse_args()
    if options.vectors:
        write_blocks(options.vectors / "blocks.gguf")
        for name, layer in layers().items():
            if layer.hidden > 32 and name.count("-") > 1:  # of large blocks only one type each
                continue
            x = hidden_states(layer)
            layer.write(options.vectors / f"{name}.gguf",
                        [("check.input", x), ("check.output", expected(layer, x).astype(np.float32))])
        return
    print("| GGUF layer | largest difference |\n| --- | --- |")
    bad = 0
    for name, layer in layers().items():
        with tempfile.TemporaryDirectory() as directory:
            worst = compare(options.program, layer, pathlib.Path(directory))
        right = worst <= LIMIT
        bad += not right
        print(f"| {name} | {worst:.1e}{'' if right else ' **wrong**'} |", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
