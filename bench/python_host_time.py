#!/usr/bin/env python3
"""Host time of one token on CUDA through the Python package, beside the C++ call with the least of
Python around it: the median of 300 calls, each with an empty stream. Needs PyTorch and a GPU:

    PYTHONPATH=build-cuda/python python3 bench/python_host_time.py
"""

import time

import torch

import fusedmoe
import fusedmoe.integrations.torch  # noqa: F401
from fusedmoe import _core

EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 8, 2, 256, 128


def host_microseconds(call):
    call()  # packs, loads kernels
    times = []
    for _ in range(300):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return sorted(times)[len(times) // 2] * 1e6


def main():
    cuda = {"device": "cuda"}
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16, **cuda)
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16, **cuda)
    x = torch.randn(1, HIDDEN, dtype=torch.bfloat16, **cuda)
    topk_weights = torch.ones(1, TOPK, **cuda)
    topk_ids = torch.arange(TOPK, dtype=torch.int32, **cuda)[None]
    output = torch.empty_like(x)
    layer = fusedmoe.MoELayer.from_tensors(w13, w2, topk=TOPK, device="cuda:0")
    arguments = (x, w13, w2, topk_weights, topk_ids)
    # Tensors of its own, scratch memory given.
    cache, stream = fusedmoe.PackCache(), torch.cuda.current_stream().cuda_stream
    own = [fusedmoe.as_tensor(tensor) for tensor in (*arguments, output)]
    scratch = fusedmoe.empty([1 << 24], "u8", "cuda:0")
    calls = {
        "C++": lambda: _core.fused_experts(cache, *own, {}, stream, lambda nbytes: scratch),
        "fused_experts": lambda: fusedmoe.fused_experts(*arguments),
        "forward_routed": lambda: layer.forward_routed(x, topk_weights, topk_ids),
        "operator": lambda: torch.ops.fusedmoe.fused_experts(*arguments),
    }
    for name, call in calls.items():
        print(f"{name:<15} {host_microseconds(call):5.1f} us")


if __name__ == "__main__":
    main()
