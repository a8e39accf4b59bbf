"""Compares fusedmoe with quantization tools on checkpoints that they write (part of make interop).

Each tool quantizes tiny models on the CPU, computes their MoE layers with its own arithmetic
(by_<tool>.py), and saves them; the layers then run with `fusedmoe run`. With --vectors DIR writes
instead small layers with the tool's output, for tests/unit/tool_files_test.cpp.
"""

import argparse
import importlib
import json
import os
import pathlib
import re
import sys
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import models
from program import run_layer, short

# Weights alone: a sum in another order. With quantized activations a value beside a tie may take
# the other code, so single rows may differ more; the limit is for the typical (median) difference.
WEIGHTS_ONLY, WITH_ACTIVATIONS = 2e-6, 1e-5
TYPES = {"llmcompressor": ["qwen3_moe", "mixtral", "deepseek_v3"],
         "modelopt": ["qwen3_moe", "mixtral"],
         "gptqmodel": ["qwen3_moe", "mixtral", "olmoe"],
         "autoround": ["qwen3_moe", "olmoe"],
         "transformers": ["qwen3_vl_moe"]}

# Of schemes that also take what is beside the experts.
TYPES_OF = {"W4A16_EVERYTHING": ["qwen2_moe", "nemotron_h_latent"]}

# Groups of 128 need rows of 128; with the others files are smaller.
LARGE = models.Sizes(128, 128, 128, 8, 2)
VECTOR_LARGE, VECTOR = models.Sizes(128, 128, 128, 3, 1), models.Sizes(64, 32, 32, 4, 1)
TWO_LAYERS = models.Sizes(64, 32, 32, 4, 2)
VECTORS = [
    ("llmcompressor", "W4A16", "qwen3_moe", VECTOR_LARGE),
    ("llmcompressor", "W4A16_ASYM", "qwen3_moe", VECTOR_LARGE),
    ("llmcompressor", "W4A16_EVERYTHING", "qwen2_moe", VECTOR_LARGE),
    ("llmcompressor", "W8A16", "mixtral", VECTOR_LARGE),
    ("llmcompressor", "NVFP4A16", "mixtral", VECTOR),
    ("llmcompressor", "MXFP4A16", "qwen3_moe", VECTOR),
    ("llmcompressor", "MXFP8A16", "qwen3_moe", VECTOR),
    ("llmcompressor", "FP8_DYNAMIC", "deepseek_v3", VECTOR),
    ("llmcompressor", "FP8_DYNAMIC", "deepseek_v2", VECTOR),
    ("llmcompressor", "FP8_DYNAMIC", "granitemoe", VECTOR),
    ("llmcompressor", "FP8", "mixtral", VECTOR),
    ("llmcompressor", "FP8_BLOCK", "qwen3_moe", VECTOR_LARGE),
    ("llmcompressor", "W8A8", "mixtral", VECTOR),
    ("llmcompressor", "W4AFP8", "qwen3_moe", VECTOR_LARGE),
    ("llmcompressor", "NVFP4", "qwen3_moe", VECTOR),
    ("llmcompressor", "MXFP4", "mixtral", VECTOR),
    ("llmcompressor", "MXFP8", "qwen3_moe", VECTOR),
    ("llmcompressor", "TWO_GROUPS", "qwen3_moe", VECTOR_LARGE),
    ("llmcompressor", "DOWN_IN_W8A16", "qwen3_moe", VECTOR_LARGE._replace(layers=2)),
    ("llmcompressor", "ACTORDER_WEIGHT", "mixtral", VECTOR_LARGE),
    ("llmcompressor", "LAYERS_DIFFER", "qwen3_moe", TWO_LAYERS),
    ("modelopt", "W4A16_NVFP4_CFG", "mixtral", VECTOR),
    ("modelopt", "MIXED_PRECISION", "qwen3_moe", TWO_LAYERS),
    ("modelopt", "FP8_DEFAULT_CFG", "qwen3_moe", VECTOR),
    ("modelopt", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "mixtral", VECTOR),
    ("modelopt", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "qwen3_moe", VECTOR_LARGE),
    ("gptqmodel", "GPTQ_4", "qwen3_moe", VECTOR),
    ("gptqmodel", "GPTQ_4_ASYM", "mixtral", VECTOR),
    ("gptqmodel", "GPTQ_8", "mixtral", VECTOR),
    ("gptqmodel", "GPTQ_V2_4_ASYM", "qwen3_moe", VECTOR),
    ("gptqmodel", "AWQ_4", "qwen3_moe", VECTOR_LARGE),
    ("gptqmodel", "GPTQ_DYNAMIC", "qwen3_moe", TWO_LAYERS),
    ("autoround", "AUTO_GPTQ_MIXED", "qwen3_moe", TWO_LAYERS),
    ("transformers", "FP8_BLOCKS", "qwen3_vl_moe", VECTOR_LARGE),
]


def by(tool):
    """A tool is imported where it is used: each takes seconds, and sets things up for itself."""
    return importlib.import_module(f"by_{tool}")


def hidden_states(rows, sizes):
    return torch.randn(rows, sizes.hidden, generator=torch.Generator().manual_seed(2))


def compare(program, tool, model_type, scheme):
    """Largest and median difference of a row, relative to the largest output."""
    with tempfile.TemporaryDirectory() as root:
        root = pathlib.Path(root)
        x = hidden_states(33, LARGE)
        wanted = by(tool).write(model_type, LARGE, scheme, root, x)
        rows = []
        for number, output in wanted.items():
            for experts in ("reference", "cpu"):
                actual = run_layer(program, root / "saved", x, experts, root, number)
                rows.append((actual - output).abs().amax(-1) / output.abs().max())
        rows = torch.stack(rows)
        return float(rows.max()), float(rows.median())


def write_vector(tool, scheme, model_type, sizes, directory):
    """The MoE layers as the tool saves them, with its config, x and the tool's output."""
    with tempfile.TemporaryDirectory() as root:
        root = pathlib.Path(root)
        x = hidden_states(8, sizes)
        wanted = by(tool).write(model_type, sizes, scheme, root, x)
        config = (root / "saved" / "config.json").read_text()
        part = {}
        for file in (root / "saved").glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():
                    if re.search(r"layers\.\d+\.(?!self_attn|\w*norm)", name) and "visual" not in name:
                        part[name] = opened.get_tensor(name)
    part["check.input"] = x
    for i, (number, output) in enumerate(sorted(wanted.items())):
        part[f"check.output.{number}" if i else "check.output"] = output.float()
    save_file(part, directory / f"{tool}-{scheme}-{model_type}.safetensors",
              {"config": json.dumps(json.loads(config))})


def row_of(program, tool, model_type, scheme):
    """The row of the table, and whether it is as it should be."""
    try:
        largest, median = compare(program, tool, model_type, scheme)
    except Exception as error:
        return f"**failed**: {type(error).__name__}: {short(error)} | |", False
    weights_only = scheme in by(tool).WEIGHTS_ONLY
    right = largest <= WEIGHTS_ONLY if weights_only else median <= WITH_ACTIVATIONS
    return f"{largest:.1e} | {median:.1e}{'' if right else ' **wrong**'} |", right


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="the fusedmoe program")
    parser.add_argument("--tools", nargs="*", default=list(TYPES))
    parser.add_argument("--types", nargs="*", help="default: two or three for each tool")
    parser.add_argument("--schemes", nargs="*", help="default: all of a tool")
    parser.add_argument("--vectors", type=pathlib.Path, help="directory to write vectors to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.vectors:
        for vector in VECTORS:
            if vector[0] in options.tools and vector[1] in (options.schemes or [vector[1]]):
                write_vector(*vector, options.vectors)
        return
    # The tools report their progress on stdout: from here on it goes to stderr.
    table = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("| tool | scheme | type | largest difference of a row | median |\n"
          "| --- | --- | --- | --- | --- |", file=table, flush=True)
    bad = 0
    for tool in options.tools:
        for scheme in options.schemes or by(tool).SCHEMES:
            for model_type in options.types or TYPES_OF.get(scheme, TYPES[tool]):
                text, right = row_of(options.program, tool, model_type, scheme)
                bad += not right
                print(f"| {tool} | {scheme} | {model_type} | {text}", file=table, flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
