"""Checkpoints that GPTQModel writes, and what their MoE layers compute.

GPTQModel decodes the weights it has stored; a layer runs with them in f32.
"""

import multiprocessing
import os

import torch

import models

# It takes half of the cores for its workers and does not start with a single one.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
# It would compile what decodes the weights; eager code takes scales of any type.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # noqa: E402
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm  # noqa: E402

from by_llmcompressor import tokenizer  # noqa: E402

SCHEMES = {
    "GPTQ_4": dict(bits=4, group_size=32),
    "GPTQ_4_ASYM": dict(bits=4, group_size=32, sym=False),
    "GPTQ_8": dict(bits=8, group_size=32),
    "GPTQ_V2_4_ASYM": dict(bits=4, group_size=32, sym=False, format="gptq_v2"),
    "AWQ_4": dict(bits=4, group_size=32, sym=False, method="awq", format="gemm"),
    # Down in 8 bits, the second layer plain.
    "GPTQ_DYNAMIC": dict(bits=4, group_size=32, dynamic={
        r"-:model\.layers\.1\..*": {}, r"+:.*\.(down_proj|w2)$": {"bits": 8}}),
}
WEIGHTS_ONLY = list(SCHEMES)


def decoded(linear):
    """(N, K) in f32: with f16 scales the tool would round each weight to f16."""
    if hasattr(linear, "dequantize_weight"):
        linear.scales.data = linear.scales.float()
        return linear.dequantize_weight().float().T
    return dequantize_gemm(linear.qweight, linear.qzeros, linear.scales.float(), linear.bits,
                           linear.group_size).float().T


def expected(directory, x):
    # In bf16, the dtype of the model, it would round the scales, which are f16.
    model = GPTQModel.load(str(directory), backend=BACKEND.TORCH, device="cpu",
                           dtype=torch.float16).model
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if hasattr(child, "qweight"):
                weight = decoded(child).contiguous()
                plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                plain.weight.data = weight
                setattr(module, name, plain)
    return {number: models.expected(block.float(), None, x)
            for number, block in models.layers(model).items()}


def write_here(model_type, sizes, scheme, directory, x):
    os.chdir(directory)  # where it leaves its logs
    model, _, _ = models.build(model_type, sizes)
    model.to(torch.bfloat16).save_pretrained(directory / "plain")
    tokenizer().save_pretrained(directory / "plain")
    model = GPTQModel.load(str(directory / "plain"), QuantizeConfig(**SCHEMES[scheme]),
                           device="cpu")
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(3)).tolist()
    model.quantize([{"input_ids": row, "attention_mask": [1] * 16} for row in ids], batch_size=1)
    model.save(str(directory / "saved"))
    outputs = expected(directory / "saved", torch.from_numpy(x))
    return {number: output.numpy() for number, output in outputs.items()}


def write(*arguments):
    """Saves a checkpoint in directory / "saved"; what its MoE layers make of x, by number.

    In a process of its own: GPTQModel changes classes of transformers, after which a second
    Mixtral is saved under other names.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply_async(write_here, (*arguments[:-1], arguments[-1].numpy()))
        outputs = result.get(timeout=1200)  # it does not always end when it fails
        return {number: torch.from_numpy(output) for number, output in outputs.items()}
