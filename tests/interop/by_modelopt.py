"""Checkpoints that NVIDIA ModelOpt writes, and what their MoE layers compute.

ModelOpt's quantizers compute in the dtype of their input, so a layer runs in f32. Those of NVFP4
need a GPU; without one ModelOpt quantizes the weights as it saves them and decodes what it saved.
"""

import copy

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import models

# Layer 0 in FP8 with its inputs, the others in NVFP4 by weights alone.
FP8 = {"num_bits": (4, 3)}
MIXED_PRECISION = {"algorithm": "max", "quant_cfg": mtq.W4A16_NVFP4_CFG["quant_cfg"] + [
    {"quantizer_name": "*layers.0.mlp.experts*weight_quantizer*", "cfg": FP8},
    {"quantizer_name": "*layers.0.mlp.experts*input_quantizer*", "cfg": FP8}]}

# Without a GPU ModelOpt does not compute its other formats.
WEIGHTS_ONLY = ["FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "W4A16_NVFP4_CFG"]
SCHEMES = WEIGHTS_ONLY + ["FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "MIXED_PRECISION"]


def one_input_scale(model):
    """Engines quantize hidden states once: static scales are the largest of all experts."""
    groups = {}
    for name, quantizer in model.named_modules():
        if name.endswith("input_quantizer") and hasattr(quantizer, "_amax"):
            layer, _, rest = name.partition(".experts.")
            groups.setdefault((layer, "down_proj" in rest), []).append(quantizer)
    for quantizers in groups.values():
        largest = max(float(quantizer._amax.max()) for quantizer in quantizers)
        for quantizer in quantizers:
            quantizer._amax.fill_(largest)


def decode_nvfp4(experts, number, directory):
    """Gives the experts the weights that were saved, and no quantizers, if they are in NVFP4."""
    tensors = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()
                        if f"layers.{number}." in name and ".experts." in name}

    def weight(expert, *names):
        """The first of the names that is there: Mixtral has its own."""
        for name in names:
            start = next((key for key in tensors if key.endswith(f".{expert}.{name}.weight")), None)
            if start:
                packed = tensors[start]
                shape = torch.Size((packed.shape[0], 2 * packed.shape[1]))
                return NVFP4QTensor(shape, torch.float32, packed).dequantize(
                    scale=tensors[start + "_scale"], double_scale=tensors[start + "_scale_2"],
                    block_sizes={-1: 16})

    if not any(name.endswith("weight_scale_2") for name in tensors):
        return
    mtq.disable_quantizer(experts, "*")
    for expert in range(len(experts.gate_up_proj)):
        experts.gate_up_proj.data[expert] = torch.cat(
            [weight(expert, "gate_proj", "w1"), weight(expert, "up_proj", "w3")])
        experts.down_proj.data[expert] = weight(expert, "down_proj", "w2")


def write(model_type, sizes, scheme, directory, x):
    """Saves a checkpoint in directory / "saved"; what its MoE layers make of x, by number."""
    model, _, _ = models.build(model_type, sizes)
    model.to(torch.bfloat16).save_pretrained(directory / "plain")
    model = AutoModelForCausalLM.from_pretrained(directory / "plain", dtype=torch.bfloat16)
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(3))
    config = MIXED_PRECISION if scheme == "MIXED_PRECISION" else getattr(mtq, scheme)
    with torch.no_grad():
        mtq.quantize(model, config, lambda calibrated: calibrated(ids))
    computed = copy.deepcopy(model).float()
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=directory / "saved")
    one_input_scale(computed)
    wanted = {}
    for number, block in models.layers(computed).items():
        decode_nvfp4(block.experts, number, directory / "saved")
        wanted[number] = torch.cat([models.expected(block, None, row[None]) for row in x])
    return wanted
