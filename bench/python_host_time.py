#!/usr/bin/env python3
"""Host time of one token through the Python package, beside the C++ call with the least of Python
around it: the median of 300 calls, on CUDA each with an empty stream. Needs PyTorch, and a GPU or
the argument cpu:

    PYTHONPATH=build/python python3 bench/python_host_time.py [cpu]
"""

import sys
import time

import torch

import fusedmoe
import fusedmoe.integrations.torch  # noqa: F401
from fusedmoe import _core
from fusedmoe._arrays import stream_of

EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 8, 2, 256, 128


def host_microseconds(call, device):
    call()  # packs, loads kernels
    times = []
    for _ in range(300):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        if device == "cuda":
            torch.cuda.synchronize()
    return sorted(times)[len(times) // 2] * 1e6


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    ours = "cuda:0" if device == "cuda" else device
    there = {"device": device}
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16, **there)
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16, **there)
    x = torch.randn(1, HIDDEN, dtype=torch.bfloat16, **there)
    topk_weights = torch.ones(1, TOPK, **there)
    topk_ids = torch.arange(TOPK, dtype=torch.int32, **there)[None]
    output = torch.empty_like(x)
    layer = fusedmoe.MoELayer.from_tensors(w13, w2, topk=TOPK, device=ours)
    arguments = (x, w13, w2, topk_weights, topk_ids)
    # Tensors of its own, scratch memory given.
    cache, stream = fusedmoe.PackCache(), stream_of(x, None)
    own = [fusedmoe.as_tensor(tensor) for tensor in (*arguments, output)]
    scratch = fusedmoe.empty([1 << 24], "u8", ours)
    calls = {
        "C++": lambda: _core.fused_experts(cache, *own, {}, stream, lambda nbytes: scratch),
        "fused_experts": lambda: fusedmoe.fused_experts(*arguments),
        "forward_routed": lambda: layer.forward_routed(x, topk_weights, topk_ids),
        "operator": lambda: torch.ops.fusedmoe.fused_experts(*arguments),
    }
    for name, call in calls.items():
        print(f"{name:<15} {host_microseconds(call, device):5.1f} us")


if __name__ == "__main__":
    main()
