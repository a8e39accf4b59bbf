"""Opens what `fusedmoe quantize` writes with the programs that others use (part of make interop).

compressed-tensors, transformers and GPTQModel decode the weights on the CPU; the first MoE layer
with these weights, in f32, is compared with `fusedmoe run` on the same file. They do not quantize
activations on the CPU, so `run` gets a copy whose config says weights only; what the config itself
says of activations is compared with the scheme that compressed-tensors has under that name.
"""

import argparse
import json
import os
import pathlib
import shutil
import sys
import tempfile

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import models
from program import call, difference, run_layer, short

LIMIT = 2e-6
SIZES = models.Sizes(256, 128, 128, 4, 1)
# Our scheme, and the one of compressed-tensors that means the same.
COMPRESSED_TENSORS = {
    "int4_g128": "W4A16", "int4_g128_zp": "W4A16_ASYM", "int4_g32": None, "int4_channel": None,
    "int8_g128": None, "int8_channel": None, "int8_w8a8": "INT8",
    "w4a8": "W4AFP8", "fp8_channel_token": "FP8_DYNAMIC", "fp8_tensor_static": "FP8",
    "fp8_tensor": None, "fp8_block": "FP8_BLOCK", "nvfp4": "NVFP4", "nvfp4_w4a16": "NVFP4A16",
    "mxfp4": "MXFP4", "mxfp4_w4a16": "MXFP4A16", "mxfp8": "MXFP8", "mxfp8_w8a16": "MXFP8A16",
}  # fmt: skip
# Of llm-compressor's own files too transformers 5.23 loads no experts with zero points, W8A8, W4A8,
# MXFP8 or FP8 in blocks, and NVFP4 without its global scale.
BY_TRANSFORMERS = ["int4_g128", "int4_g32", "int4_channel", "int8_g128", "int8_channel",
                   "fp8_channel_token", "fp8_tensor_static", "fp8_tensor", "mxfp4_w4a16"]
# With static scales of activations.
CALIBRATED = ["fp8_tensor_static", "nvfp4"]
FP8 = ["fp8_block", "fp8_tensor", "fp8_tensor_static"]
# GPTQModel reads zero points of the layout gptq from its own files alone.
GPTQ = {"gptq": ["int4_g128", "int8_g128"], "gptq_v2": ["int4_g128_zp", "int4_g128"],
        "awq": ["int4_g128_zp"]}
MEANING = ["num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic"]


def cases():
    """Type of the model, scheme, layout, who reads it."""
    for scheme in COMPRESSED_TENSORS:
        yield "qwen3_moe", scheme, "compressed-tensors", "compressed-tensors"
    for scheme in BY_TRANSFORMERS:
        yield "qwen3_moe", scheme, "compressed-tensors", "transformers"
    for scheme in FP8:
        yield "qwen3_moe", scheme, "fp8", "transformers"
    yield "gpt_oss", "mxfp4_w4a16", "gpt-oss", "transformers"
    for layout, schemes in GPTQ.items():
        for scheme in schemes:
            yield "qwen3_moe", scheme, layout, "GPTQModel"


def meaning(arguments):
    if arguments is None:
        return None
    return {key: value for key in MEANING if (value := getattr(arguments, key)) is not None}


def check_config(directory, scheme):
    """Raises if compressed-tensors reads another scheme than its own of that name."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(config)
    preset = PRESET_SCHEMES.get(COMPRESSED_TENSORS[scheme])
    for group in config.config_groups.values() if preset else ():
        for operand in ("weights", "input_activations"):
            ours, theirs = meaning(getattr(group, operand)), meaning(preset.get(operand))
            if ours != theirs:
                raise ValueError(f"{operand}: {ours} instead of {theirs}")


def change(directory, name, of_config, of_tensors):
    """A copy with another config and other tensors."""
    copy = directory.with_name(name)
    shutil.copytree(directory, copy)
    config = json.loads((copy / "config.json").read_text())
    of_config(config["quantization_config"])
    (copy / "config.json").write_text(json.dumps(config))
    for file in copy.glob("*.safetensors"):
        save_file(of_tensors(load_file(file)), file, {"format": "pt"})
    (copy / "model.safetensors.index.json").unlink(missing_ok=True)
    return copy


def weights_only(directory):
    """transformers' own FP8 layout and integers that are not packed cannot be weights only: they
    become layouts of compressed-tensors that can."""
    def of_config(config):
        if config["quant_method"] == "fp8":
            block = config.get("weight_block_size")
            weights = {"num_bits": 8, "type": "float", "symmetric": True,
                       "strategy": "block" if block else "tensor", "block_structure": block}
            group = {"targets": [r"re:.*experts\.\d+\..*"], "weights": weights}
            config.clear()
            config.update(quant_method="compressed-tensors", format="float-quantized",
                          config_groups={"group_0": group})
        group = config.get("config_groups", {}).get("group_0", {})
        if config.get("format") == "int-quantized":
            bits.append(group["weights"]["num_bits"])
            config["format"] = group["format"] = "pack-quantized"
        group["input_activations"] = None

    def of_tensors(tensors):
        inputs = ("input_scale", "activation_scale", "input_global_scale")
        tensors = {name.replace("weight_scale_inv", "weight_scale"): tensor
                   for name, tensor in tensors.items() if not name.endswith(inputs)}
        for name in [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]:
            codes = tensors.pop(name)
            tensors[name + "_packed"] = pack_to_int32(codes, bits[0])
            tensors[name + "_shape"] = torch.tensor(codes.shape)
        return tensors

    bits = []  # of integers that are stored as int8
    return change(directory, "weights-only", of_config, of_tensors)


def with_f32_scales(directory):
    """compressed-tensors decodes in the type of the scales: with bf16 it would round weights."""
    half = (torch.bfloat16, torch.float16)
    return change(directory, "f32-scales", lambda config: None, lambda tensors: {
        name: tensor.float() if "_scale" in name and tensor.dtype in half else tensor
        for name, tensor in tensors.items()})


def by_compressed_tensors(directory, block, x):
    """The block with the experts that compressed-tensors decodes, one linear layer at a time."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(config)
    scheme = next(iter(config.config_groups.values()))
    compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors.update(load_file(file))

    def weight(expert, name):
        prefix = f"model.layers.0.mlp.experts.{expert}.{name}."
        parts = {key[len(prefix):]: value for key, value in tensors.items()
                 if key.startswith(prefix)}
        if config.format.startswith("nvfp4"):  # decompress() would round to bf16
            packed = parts["weight_packed"]
            codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1])
            return dequantize(codes.float(), parts["weight_scale"].float(), args=scheme.weights,
                              global_scale=parts["weight_global_scale"], dtype=torch.float32)
        return compressor.decompress(parts, scheme)["weight"].float()

    with torch.no_grad():
        for expert in range(SIZES.experts):
            block.experts.gate_up_proj[expert] = torch.cat([weight(expert, "gate_proj"),
                                                            weight(expert, "up_proj")])
            block.experts.down_proj[expert] = weight(expert, "down_proj")
    return models.expected(block, None, x)


def by_transformers(directory, layout, x):
    options = {}
    if layout == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    _, block = models.find_block(model.float())
    return models.expected(block, None, x)


def decoded_output(directory, layout, reader, block, x):
    if reader == "GPTQModel":
        import by_gptqmodel
        return by_gptqmodel.expected(directory, x)[0]
    if layout == "compressed-tensors":
        directory = with_f32_scales(directory)
    if reader == "transformers":
        return by_transformers(directory, layout, x)
    return by_compressed_tensors(directory, block, x)


def compare(program, model_type, scheme, layout, reader):
    with tempfile.TemporaryDirectory() as root:
        root = pathlib.Path(root)
        model, block, _ = models.build(model_type, SIZES)
        model.to(torch.bfloat16).save_pretrained(root / "plain")
        model.float()
        x = torch.randn(17, SIZES.hidden, generator=torch.Generator().manual_seed(2))
        save_file({"hidden_states": x}, root / "x.safetensors")
        calibrate = ["--calibrate", root / "x.safetensors"] if scheme in CALIBRATED else []
        call(program, "quantize", "--checkpoint", root / "plain", "--scheme", scheme, "--layout",
             layout, *calibrate, "--output", root / "ours")
        if layout == "compressed-tensors":
            check_config(root / "ours", scheme)
        wanted = decoded_output(root / "ours", layout, reader, block, x)
        plain = reader == "GPTQModel" or layout == "gpt-oss"
        file = root / "ours" if plain else weights_only(root / "ours")
        return max(difference(run_layer(program, file, x, experts, root), wanted)
                   for experts in ("reference", "cpu"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="the fusedmoe program")
    parser.add_argument("schemes", nargs="*", help="default: all")
    options = parser.parse_args()
    options.program = str(pathlib.Path(options.program).resolve())
    torch.set_num_threads(1)
    table = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("| scheme | layout | reader | largest difference |\n| --- | --- | --- | --- |",
          file=table, flush=True)
    bad = 0
    for model_type, scheme, layout, reader in cases():
        if options.schemes and scheme not in options.schemes:
            continue
        try:
            worst = compare(options.program, model_type, scheme, layout, reader)
            right = worst <= LIMIT
            text = f"{worst:.1e}" + ("" if right else " **wrong**")
        except Exception as error:
            text, right = f"**failed**: {type(error).__name__}: {short(error)}", False
        bad += not right
        print(f"| {scheme} | {layout} | {reader} | {text} |", file=table, flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
