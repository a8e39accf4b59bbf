"""Checkpoints that NVIDIA ModelOpt writes, and what their first MoE layer computes.

ModelOpt's quantizers compute in the dtype of their input, so the layer runs in f32.
"""

import copy

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM

import models

# Without a GPU ModelOpt does not compute its other formats.
SCHEMES = ["FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"]


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


def write(model_type, sizes, scheme, directory, x):
    """Saves a checkpoint in directory / "saved"; what its first MoE layer makes of x."""
    model, _, _ = models.build(model_type, sizes)
    model.to(torch.bfloat16).save_pretrained(directory / "plain")
    model = AutoModelForCausalLM.from_pretrained(directory / "plain", dtype=torch.bfloat16)
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        mtq.quantize(model, getattr(mtq, scheme), lambda calibrated: calibrated(ids))
    computed = copy.deepcopy(model).float()
    one_input_scale(computed)
    _, block = models.find_block(computed)
    wanted = torch.cat([models.expected(block, None, row[None]) for row in x])
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=directory / "saved")
    return wanted
