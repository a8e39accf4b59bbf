"""Checkpoints that llm-compressor writes, and what their MoE layers compute.

A layer runs in f32 with the tool's own arithmetic: compressed-tensors quantizes and decodes
activations at each call, and decodes the weights that are stored.
"""

import torch
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import models

WEIGHTS_ONLY = ["W4A16", "W4A16_ASYM", "W8A16", "NVFP4A16", "MXFP4A16", "MXFP8A16", "TWO_GROUPS",
                "DOWN_IN_W8A16", "ACTORDER_WEIGHT", "W4A16_EVERYTHING"]
SCHEMES = WEIGHTS_ONLY + ["FP8_DYNAMIC", "FP8", "FP8_BLOCK", "W8A8", "W4AFP8", "NVFP4", "MXFP4",
                          "MXFP8", "LAYERS_DIFFER"]
EVERYTHING = "_EVERYTHING"  # but routers and attention: also what is beside the experts
PLAIN = ["lm_head", "re:.*gate$", "re:.*router.*", "re:.*shared_exp.*"]
ATTENTION = "re:.*self_attn.*"
# Schemes with several groups: targets and their presets, and what else stays plain.
GROUPS = {
    "TWO_GROUPS": ({ATTENTION: "FP8_DYNAMIC", r"re:.*experts\.\d+\..*": "W4A16"}, []),
    "DOWN_IN_W8A16": ({r"re:.*experts\.\d+\.(gate|up)_proj$": "W4A16",
                       r"re:.*experts\.\d+\.down_proj$": "W8A16"},
                      [r"re:.*layers\.1\..*", ATTENTION]),
    "LAYERS_DIFFER": ({r"re:.*layers\.0\..*experts\.\d+\..*": "FP8_DYNAMIC",
                       r"re:.*layers\.1\..*experts\.\d+\..*": "NVFP4A16"}, [ATTENTION]),
}


def tokenizer():
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(tokenizer_models.WordLevel({"a": 0, "b": 1}, unk_token="b")))


def recipe(scheme):
    if scheme.endswith(EVERYTHING):
        return QuantizationModifier(targets="Linear", scheme=scheme.removesuffix(EVERYTHING),
                                    ignore=["lm_head", r"re:.*\.gate$", ATTENTION])
    if scheme == "ACTORDER_WEIGHT":
        return GPTQModifier(targets="Linear", scheme="W4A16", actorder="weight",
                            ignore=PLAIN + [ATTENTION])
    if scheme not in GROUPS:
        return QuantizationModifier(targets="Linear", scheme=scheme, ignore=PLAIN + [ATTENTION])
    groups, plain = GROUPS[scheme]
    groups = {f"group_{i}": QuantizationScheme.model_validate(preset_name_to_scheme(name, [target]))
              for i, (target, name) in enumerate(groups.items())}
    return QuantizationModifier(config_groups=groups, ignore=PLAIN + plain)


def quantized(model_type, sizes, scheme, directory):
    model, _, _ = models.build(model_type, sizes)
    model.to(torch.bfloat16).save_pretrained(directory / "plain")
    model = AutoModelForCausalLM.from_pretrained(directory / "plain", dtype=torch.bfloat16)
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(3)).tolist()
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 16] * 8})
    oneshot(model=model, processor=tokenizer(), recipe=recipe(scheme), dataset=data,
            num_calibration_samples=8, max_seq_length=16)
    return model


def as_kernels_see_it(weight_codes, scale):
    """W4A8: FP8 tensor cores need E4M3 weights, so engines make E4M3 of the scales of groups, with
    one more scale for each row, and of their products with the codes (docs/number-formats.md)."""
    e4m3 = lambda values: values.to(torch.float8_e4m3fn).float()
    row = (scale.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    group = e4m3(e4m3(scale / row) / 8).repeat_interleave(128, -1)
    return e4m3(weight_codes * group) * (8 * row)


def decoded(module, w4a8):
    """The weights that will be stored, in f32: codes as the tool chooses them in bf16."""
    args = module.quantization_scheme.weights
    more = dict(zero_point=getattr(module, "weight_zero_point", None),
                global_scale=getattr(module, "weight_global_scale", None))
    codes = quantize(module.weight, module.weight_scale, args=args, **more).float()
    if w4a8:
        return as_kernels_see_it(codes, module.weight_scale.float())
    return dequantize(codes, module.weight_scale.float(), args=args, dtype=torch.float32, **more)


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


def expected(model, scheme, x):
    """Each MoE layer in f32, with stored weights and the tool's activations."""
    modules = [m for m in model.modules() if getattr(m, "quantization_scheme", None)]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        weights = [decoded(m, scheme == "W4AFP8") for m in modules]
    model.float()
    schemes = [m.quantization_scheme for m in modules]
    for module, weight, kept in zip(modules, weights, schemes):
        module.weight.data = weight
        module.quantization_scheme = kept.model_copy(update={"weights": None})
    one_input_scale(model)
    # One token at a time: of rows of several tokens in two dimensions, as experts get them,
    # compressed-tensors 0.20 makes one scale where it says one a token.
    result = {number: torch.cat([models.expected(block, None, row[None]) for row in x])
              for number, block in models.layers(model).items()}
    for module, kept in zip(modules, schemes):
        module.quantization_scheme = kept
    for name, value in list(model.named_parameters()) + list(model.named_buffers()):
        if name in state:
            value.data = state[name]
    return result


def write(model_type, sizes, scheme, directory, x):
    """Saves a checkpoint in directory / "saved"; what its MoE layers make of x, by number."""
    model = quantized(model_type, sizes, scheme, directory)
    wanted = expected(model, scheme, x)
    model.save_pretrained(directory / "saved", save_compressed=True)
    return wanted
