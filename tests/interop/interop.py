"""Compares fusedmoe with transformers on tiny models of every MoE type (make interop).

Each model is saved by transformers in f32 and in bf16, in one file and in shards, and its first MoE
layer runs through `fusedmoe run` with the implementations reference and cpu. Writes a table in
Markdown to stdout. With --vectors DIR writes instead one layer of each type, with transformers'
output, as a file for tests/unit/families_test.cpp.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import models
from program import difference, run_layer, short

LIMIT = 2e-6
COUNTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_topk",
          "num_experts_per_tok", "moe_k", "top_k_experts", "num_experts_per_token", "moe_top_k"}

# Types that are refused for another reason than that their family is. The config of this one
# alone, as transformers writes it, lacks the width of the shared expert.
EXPECTED_REFUSALS = {"qwen3_omni_moe_talker_text"}


def moe_types():
    """Types whose config has a number of experts, or a sub-config with one."""
    def fields(cls):
        names = set(getattr(cls, "__dataclass_fields__", {}))
        names |= set(getattr(cls, "attribute_map", None) or {})
        for sub in getattr(cls, "sub_configs", {}).values():
            if isinstance(sub, type):
                names |= fields(sub)
        return names

    types = []
    for name in CONFIG_MAPPING_NAMES:
        try:
            cls = CONFIG_MAPPING[name]
        except Exception:
            continue
        if fields(cls) & COUNTS:
            types.append(name)
    return types


def check_model(program, model, block, shared):
    """The largest difference of all ways to save and to run."""
    x = torch.randn(33, models.Sizes().hidden, generator=torch.Generator().manual_seed(2))
    wanted = models.expected(block, shared, x)
    worst = 0.0
    with tempfile.TemporaryDirectory() as root:
        root = pathlib.Path(root)
        for dtype in (torch.float32, torch.bfloat16):
            model.to(dtype)
            for shards in (False, True):
                path = root / f"{dtype}-{shards}"
                model.save_pretrained(path, max_shard_size="20KB" if shards else "5GB")
                for experts in ("reference", "cpu"):
                    actual = run_layer(program, path, x, experts, root)
                    worst = max(worst, difference(actual, wanted))
    return worst


def refusal(program, model_type):
    """What the program says of a config alone; None if it accepts it."""
    with tempfile.TemporaryDirectory() as root:
        try:
            models.config_of(model_type).save_pretrained(root)
        except Exception:
            CONFIG_MAPPING[model_type]().save_pretrained(root)
        save_file({"model.layers.0.x.weight": torch.zeros(1)}, pathlib.Path(root) / "x.safetensors")
        done = subprocess.run([program, "inspect", root], capture_output=True, text=True)
    text = done.stderr.strip()
    if done.returncode == 0 or "MoE layers" in text:
        return None
    if not text.startswith("error: "):
        raise RuntimeError(f"inspect crashed with exit status {done.returncode}: {text}")
    return re.sub(r"^/tmp\S*: ", "", text.removeprefix("error: "))


def row_of(program, model_type):
    """The cell of the table, and whether it is as it should be."""
    try:
        text = refusal(program, model_type)
        if text is not None:
            expected = "are not served: " in text or model_type in EXPECTED_REFUSALS
            return text + ("" if expected else " **refused**"), expected
        try:
            tiny = models.build(model_type)
        except Exception as error:
            return f"no tiny model: {type(error).__name__}: {short(error)}", True
        worst = check_model(program, *tiny)
    except Exception as error:
        return f"**failed**: {type(error).__name__}: {short(error)}", False
    right = worst <= LIMIT
    return f"{worst:.1e}" + ("" if right else " **wrong**"), right


def write_vector(model_type, directory):
    """The first MoE layer as transformers saves it, in bf16."""
    model, block, shared = models.build(model_type)
    x = torch.randn(5, models.Sizes().hidden, generator=torch.Generator().manual_seed(2))
    wanted = models.expected(block, shared, x)
    with tempfile.TemporaryDirectory() as root:
        model.to(torch.bfloat16).save_pretrained(root)
        config = json.loads((pathlib.Path(root) / "config.json").read_text())
        tensors = {}
        for file in pathlib.Path(root).glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():
                    tensors[name] = opened.get_tensor(name)
    layers = {}
    for name in tensors:
        found = re.match(r"(.*?\b(?:layers|blocks)\.\d+\.)", name)
        if found and not re.search("visual|vision|audio|sam_model|encoder|mtp", name):
            layers.setdefault(found[1], []).append(name)
    holds = [p for p, names in layers.items()
             if any(re.search(r"experts\.|moe\.|_linear", n[len(p):]) and "attn" not in n for n in names)]
    part = {n: tensors[n].clone() for n in layers[holds[0]]
            if not re.search("attn|attention|conv|norm|mamba|hc_", n)}
    part["check.input"], part["check.output"] = x, wanted.float()
    for key in ("vision_config", "audio_config", "code2wav_config"):
        config.pop(key, None)
    save_file(part, directory / f"{model_type}.safetensors", {"config": json.dumps(config)})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="the fusedmoe program")
    parser.add_argument("types", nargs="*", help="default: every type")
    parser.add_argument("--vectors", type=pathlib.Path, help="directory to write vectors to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    if not options.vectors:
        print("| type | largest difference, or why not |\n| --- | --- |")
    for model_type in options.types or sorted(moe_types() + list(models.VARIANTS)):
        if options.vectors:
            write_vector(model_type, options.vectors)
            continue
        text, right = row_of(options.program, model_type)
        bad += not right
        print(f"| {model_type} | {text} |", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
