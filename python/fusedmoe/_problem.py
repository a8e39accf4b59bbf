"""The layer that the benchmark measures: a shape and random weights of it."""

from __future__ import annotations

import argparse
from typing import Any, Dict, Tuple

import torch

import fusedmoe

SHAPES = {  # experts, topk, hidden, intermediate
    "small": (32, 4, 1024, 1024),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "olmoe": (64, 8, 2048, 1024),
}
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}

Routed = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden_states, weights, ids


class Problem:
    """Random weights of one layer: w13 and w2 in `dtype`, and `settings` of a quantized form."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.shape = tuple(
            given if given else preset
            for given, preset in zip(
                (args.experts, args.topk, args.hidden, args.intermediate), SHAPES[args.shape]
            )
        )
        self.experts, self.topk, self.hidden, self.intermediate = self.shape
        self.dtype, self.device = DTYPES[args.dtype], torch.device(args.device)
        self.dtype_name, self.scheme = args.dtype, args.scheme
        self.generator = torch.Generator().manual_seed(args.seed)
        self.w13 = self._random(self.experts, 2 * self.intermediate, self.hidden)
        self.w2 = self._random(self.experts, self.hidden, self.intermediate)
        self.settings: Dict[str, Any] = {}
        self.stored = (self.w13, self.w2)
        on_cpu = self.device.type == "cpu"
        self.probe = cpu_probe() if on_cpu else torch.ones(1 << 27, device=self.device)
        if args.scheme:
            self._quantize(args.scheme)

    def _random(self, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float32)
        return (values / shape[-1] ** 0.5).to(self.dtype).to(self.device)

    def _quantize(self, scheme: str) -> None:
        stored = []
        for name, weights in (("w1", self.w13), ("w2", self.w2)):
            matrices = [fusedmoe.quantize_weights(w.cpu(), scheme) for w in weights]
            for expert, matrix in enumerate(matrices):
                decoded = fusedmoe.dequantize_weights(matrix, scheme, weights.shape[-1])
                weights[expert] = torch.from_dlpack(decoded)
            parts = [
                torch.stack([torch.from_dlpack(_as_bytes(m[part])) for m in matrices])
                for part in range(4)
                if matrices[0][part] is not None
            ]
            names = ("", "_scale", "_zp", "_global_scale")
            given = [n for n, part in zip(names, matrices[0]) if part is not None]
            for suffix, tensor in zip(given, parts):
                if suffix:
                    self.settings[name + suffix] = tensor.to(self.device)
                else:
                    stored.append(tensor.to(self.device))
        self.stored = (stored[0], stored[1])
        self.settings["scheme"] = scheme

    def routed(self, tokens: int) -> Routed:
        """Hidden states, router weights, and ids by uniformly random logits."""
        logits = torch.randn(tokens, self.experts, generator=self.generator)
        weights, ids = torch.softmax(logits, -1).topk(self.topk)
        x = torch.randn(tokens, self.hidden, generator=self.generator).to(self.dtype)
        return x.to(self.device), weights.to(self.device), ids.to(torch.int32).to(self.device)


def cpu_probe() -> torch.Tensor:
    """Memory larger than caches, to measure the bandwidth: in large pages, as packed weights are,
    and written, because pages that nobody has written are all the same memory."""
    return torch.from_dlpack(fusedmoe.empty([96 << 20], "u8")).fill_(1)


def _as_bytes(tensor: Any) -> fusedmoe.Tensor:
    viewed: fusedmoe.Tensor = tensor
    return viewed.view("u8") if viewed.dtype in ("e4m3", "e5m2", "e8m0") else viewed
