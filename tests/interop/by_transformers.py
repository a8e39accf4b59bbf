"""Checkpoints in FP8 that transformers writes, and what their MoE layers compute.

transformers asks for a GPU before it quantizes, but does it in plain PyTorch. Its kernels do need
one, so a layer is computed with the weights that transformers decodes, and inputs rounded here as
these kernels do.
"""

import torch
from transformers import FineGrainedFP8Config
from transformers.integrations import finegrained_fp8
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import models

FineGrainedFP8HfQuantizer.validate_environment = lambda self, *arguments, **options: None

# Of types that store a layer's experts one by one transformers 5.24 saves the scales of all in one
# tensor, which it does not read back itself.
WEIGHTS_ONLY = []
SCHEMES = ["FP8_BLOCKS"]
BLOCK = (128, 128)


def rounded(rows):
    groups = rows.float().reshape(*rows.shape[:-1], -1, BLOCK[1])
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).reshape(rows.shape)


def linear(self, rows, weight, scale, activation_scale=None):
    decoded = finegrained_fp8._dequantize_fp8_weight(weight, scale, BLOCK, torch.float32)
    return torch.nn.functional.linear(rounded(rows), decoded)


finegrained_fp8.FP8Experts.linear = linear


def write(model_type, sizes, scheme, directory, x):
    """Saves a checkpoint in directory / "saved"; what its MoE layers make of x, by number."""
    model, _, _ = models.build(model_type, sizes)
    model.to(torch.bfloat16).save_pretrained(directory / "plain")
    config = FineGrainedFP8Config(modules_to_not_convert=["lm_head", "gate", "self_attn", "visual"])
    model = type(model).from_pretrained(directory / "plain", dtype=torch.bfloat16,
                                        quantization_config=config,
                                        experts_implementation="eager")
    model.save_pretrained(directory / "saved")
    for block in models.layers(model).values():
        block.gate.float()
    return {number: models.expected(block, None, x) for number, block in models.layers(model).items()}
