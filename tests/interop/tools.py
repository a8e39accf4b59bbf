"""Compares fusedmoe with llm-compressor on checkpoints that it writes (part of make interop).

Quantizes tiny models with llmcompressor on the CPU, computes their first MoE layer in f32 with the
tool's own arithmetic (compressed-tensors quantizes and decodes weights and activations at each
call), saves them compressed, and runs the layer with `fusedmoe run`. Needs llmcompressor and,
for configurations whose names end in _CFG, nvidia-modelopt.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import torch
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import models

# Groups of 128 need rows of 128.
WIDTH = 128
for key, value in models.FIELDS.items():
    if value in (models.HIDDEN, models.WIDTH, 24) and "rank" not in key and "embeddings" not in key:
        models.FIELDS[key] = WIDTH
models.FIELDS["head_dim"] = 32
models.FIELDS["num_position_embeddings"] = 16

# Weights alone: a sum in another order. With quantized activations a value beside a tie may take
# the other code, so single rows may differ more; the limit is for the typical (median) difference.
WEIGHTS_ONLY, WITH_ACTIVATIONS = 2e-6, 1e-5
# Weights of W4A8 are rounded to E4M3, as FP8 tensor cores see them (docs/number-formats.md).
STATED = {"W4AFP8": 0.1}
SCHEMES = ["W4A16", "W8A16", "NVFP4A16", "MXFP4A16", "FP8_DYNAMIC", "FP8", "FP8_BLOCK", "W8A8",
           "W4AFP8", "NVFP4", "MXFP4"]
TYPES = ["qwen3_moe", "mixtral", "deepseek_v3"]


def tokenizer():
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(tokenizer_models.WordLevel({"a": 0, "b": 1}, unk_token="b")))


def quantized(model_type, scheme, directory):
    model, _, _ = models.build(model_type)
    model.to(torch.bfloat16).save_pretrained(directory / "plain")
    model = AutoModelForCausalLM.from_pretrained(directory / "plain", dtype=torch.bfloat16)
    recipe = QuantizationModifier(
        targets="Linear", scheme=scheme,
        ignore=["lm_head", "re:.*gate$", "re:.*router.*", "re:.*self_attn.*", "re:.*shared_exp.*"])
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(3)).tolist()
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 16] * 8})
    oneshot(model=model, processor=tokenizer(), recipe=recipe, dataset=data,
            num_calibration_samples=8, max_seq_length=16)
    return model


def run(program, checkpoint, x, experts, directory):
    save_file({"hidden_states": x}, directory / "x.safetensors")
    command = [program, "run", "--checkpoint", checkpoint, "--input", directory / "x.safetensors",
               "--output", directory / "y.safetensors", "--dtype", "f32", "--experts", experts]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return load_file(directory / "y.safetensors")["output"]


def decoded(module):
    """The weights that will be stored, in f32: codes as the tool chooses them in bf16."""
    args = module.quantization_scheme.weights
    more = dict(zero_point=getattr(module, "weight_zero_point", None),
                global_scale=getattr(module, "weight_global_scale", None))
    codes = quantize(module.weight, module.weight_scale, args=args, **more)
    return dequantize(codes.float(), module.weight_scale.float(), args=args,
                      dtype=torch.float32, **more)


def one_input_scale(model):
    """Engines quantize hidden states once: static scales are the largest of all experts."""
    groups = {}
    for name, module in model.named_modules():
        if getattr(module, "input_scale", None) is not None:
            layer, _, rest = name.partition(".experts.")
            down = rest.endswith(("down_proj", "w2"))
            groups.setdefault((layer, down), []).append(module.input_scale)
    for scales in groups.values():
        largest = max(float(scale.max()) for scale in scales)
        for scale in scales:
            scale.data.fill_(largest)


def expected(model, x):
    """The first MoE layer in f32, with stored weights and the tool's activations."""
    modules = [m for m in model.modules() if getattr(m, "quantization_scheme", None)]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        weights = [decoded(m) for m in modules]
    model.float()
    schemes = [m.quantization_scheme for m in modules]
    for module, weight, scheme in zip(modules, weights, schemes):
        module.weight.data = weight
        module.quantization_scheme = scheme.model_copy(update={"weights": None})
    _, block = models.find_block(model)
    one_input_scale(model)
    # One token at a time: of rows of several tokens in two dimensions, as experts get them,
    # compressed-tensors 0.20 makes one scale where it says one a token.
    result = torch.cat([models.expected(block, None, row[None]) for row in x])
    for module, scheme in zip(modules, schemes):
        module.quantization_scheme = scheme
    for name, value in list(model.named_parameters()) + list(model.named_buffers()):
        if name in state:
            value.data = state[name]
    return result


def compare(program, model_type, scheme):
    """Largest and median difference of a row, relative to the largest output."""
    with tempfile.TemporaryDirectory() as root:
        root = pathlib.Path(root)
        model = quantized(model_type, scheme, root)
        x = torch.randn(33, WIDTH, generator=torch.Generator().manual_seed(2))
        wanted = expected(model, x)
        model.save_pretrained(root / "saved", save_compressed=True)
        rows = []
        for experts in ("reference", "cpu"):
            actual = run(program, root / "saved", x, experts, root)
            rows.append((actual - wanted).abs().amax(-1) / wanted.abs().max())
        rows = torch.stack(rows)
        return float(rows.max()), float(rows.median())


def modelopt(program, model_type, name):
    """The same with NVIDIA ModelOpt, whose quantizers compute in the dtype of their input."""
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    with tempfile.TemporaryDirectory() as root:
        root = pathlib.Path(root)
        model, _, _ = models.build(model_type)
        model.to(torch.bfloat16).save_pretrained(root / "plain")
        model = AutoModelForCausalLM.from_pretrained(root / "plain", dtype=torch.bfloat16)
        ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            mtq.quantize(model, getattr(mtq, name), lambda calibrated: calibrated(ids))
        groups = {}
        for module_name, quantizer in model.named_modules():
            if module_name.endswith("input_quantizer") and hasattr(quantizer, "_amax"):
                layer, _, rest = module_name.partition(".experts.")
                groups.setdefault((layer, "down_proj" in rest), []).append(quantizer)
        for quantizers in groups.values():
            largest = max(float(quantizer._amax.max()) for quantizer in quantizers)
            for quantizer in quantizers:
                quantizer._amax.fill_(largest)
        x = torch.randn(33, WIDTH, generator=torch.Generator().manual_seed(2))
        _, block = models.find_block(copy.deepcopy(model).float())
        wanted = torch.cat([models.expected(block, None, row[None]) for row in x])
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=root / "saved")
        rows = torch.stack([(run(program, root / "saved", x, experts, root) - wanted).abs().amax(-1)
                            for experts in ("reference", "cpu")]) / wanted.abs().max()
        return float(rows.max()), float(rows.median())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="the fusedmoe program")
    parser.add_argument("--types", nargs="*", default=TYPES)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES,
                        help="of llmcompressor; FP8_DEFAULT_CFG and the like are ModelOpt's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| type | scheme | largest difference of a row | median |\n| --- | --- | --- | --- |")
    bad = 0
    for model_type in options.types:
        for scheme in options.schemes:
            try:
                tool = modelopt if scheme.endswith("_CFG") else compare
                largest, median = tool(options.program, model_type, scheme)
            except Exception as error:
                text = " ".join(str(error).split())[:160]
                print(f"| {model_type} | {scheme} | **failed**: {type(error).__name__}: {text} | |",
                      flush=True)
                bad += 1
                continue
            weights_only = scheme.endswith("A16")
            limit = STATED.get(scheme, WITH_ACTIVATIONS)
            right = largest <= WEIGHTS_ONLY if weights_only else median <= limit
            bad += not right
            mark = "" if right else " **wrong**"
            print(f"| {model_type} | {scheme} | {largest:.1e} | {median:.1e}{mark} |", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
