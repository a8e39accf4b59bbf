"""Checkpoints that AutoRound writes, and what their MoE layers compute.

AutoRound's linear layers decode the weights that were saved, with scales in f32.
"""

import torch
from auto_round import AutoRound
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import models
from by_llmcompressor import tokenizer

GROUP = 32
# 4 bits but for down, the second layer plain: names that AutoRound widens to patterns.
SCHEMES = {"AUTO_GPTQ_MIXED": {"layers.1.mlp.experts": {"bits": 16}, "self_attn": {"bits": 16},
                               "layers.0.mlp.experts.*down_proj": {"bits": 8}}}
WEIGHTS_ONLY = list(SCHEMES)


def decoded(tensors, name):
    """(N, K) in f32."""
    if name + ".weight" in tensors:
        return tensors[name + ".weight"].float()
    words, scales = tensors[name + ".qweight"], tensors[name + ".scales"].float()
    inputs = scales.shape[0] * GROUP
    layer = QuantLinear(32 * words.shape[0] // inputs, GROUP, inputs, scales.shape[1], bias=False)
    layer.qweight, layer.qzeros, layer.scales = words, tensors[name + ".qzeros"], scales
    return layer(torch.eye(inputs)).T


def write(model_type, sizes, scheme, directory, x):
    """Saves a checkpoint in directory / "saved"; what its MoE layers make of x, by number."""
    model, _, _ = models.build(model_type, sizes)
    model.to(torch.bfloat16).save_pretrained(directory / "plain")
    tokenizer().save_pretrained(directory / "plain")
    given = AutoModelForCausalLM.from_pretrained(directory / "plain", dtype=torch.bfloat16)
    rounder = AutoRound(given, tokenizer(), bits=4, group_size=GROUP, sym=True, iters=0,
                        disable_opt_rtn=True, device_map="cpu", layer_config=SCHEMES[scheme])
    rounder.quantize_and_save(str(directory / "all"), format="auto_round")
    (saved,) = (directory / "all").iterdir()
    saved.rename(directory / "saved")
    tensors = {}
    for file in (directory / "saved").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}
    wanted = {}
    with torch.no_grad():
        for number, block in models.layers(model.float()).items():
            for e in range(sizes.experts):
                gate, up, down = (
                    decoded(tensors, f"model.layers.{number}.mlp.experts.{e}.{matrix}_proj")
                    for matrix in ("gate", "up", "down"))
                block.experts.gate_up_proj[e], block.experts.down_proj[e] = torch.cat([gate, up]), down
            wanted[number] = models.expected(block, None, x)
    return wanted
