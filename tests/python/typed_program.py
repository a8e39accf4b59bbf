"""A program that uses the package, for mypy --strict alone; see test_package.py."""

from typing import Dict, List

import numpy as np

import fusedmoe


def layer_of(path: str, communicator: fusedmoe.Communicator) -> fusedmoe.MoELayer:
    options: fusedmoe.LayerOptions = {"device": "cpu", "num_threads": 2, "packed_read": True}
    layer = fusedmoe.MoELayer.from_checkpoint(path, 3, **options)
    print(layer.info["hidden"] + 1, layer.plan_line.upper(), layer.workspace_bytes(4) + 1)
    fusedmoe.MoELayer.from_checkpoint(fusedmoe.Checkpoint(path), communicator=communicator)
    fusedmoe.MoELayer.from_checkpoint(path, num_thread=2)  # type: ignore[call-arg]
    fusedmoe.MoELayer.from_checkpoint(path, num_threads="2")  # type: ignore[arg-type]
    print(layer.info["hidde"])  # type: ignore[typeddict-item]
    return layer


def experts() -> fusedmoe.MoELayer:
    w13, w2 = np.zeros((8, 64, 64), np.float32), np.zeros((8, 64, 32), np.float32)
    weights: fusedmoe.ExpertSettings = {"activation": "gelu", "limit": 7.0}
    shared: fusedmoe.SharedExperts = {"w13": w13[:1], "w2": w2[:1], "gate": None}
    layer = fusedmoe.MoELayer.from_tensors(w13, w2, topk=2, weights=weights, shared=shared)
    layer.repack(0, w13[:1], w2[:1], weights)
    wrong: fusedmoe.ExpertSettings = {"activations": "gelu"}  # type: ignore[typeddict-unknown-key]
    return fusedmoe.MoELayer.from_tensors(w13, w2, topk=2, weights=wrong)


def arrays() -> List[int]:
    tensors: Dict[str, fusedmoe.Tensor] = fusedmoe.load_file("weights.safetensors")
    tensor = tensors["x"].astype("f32").to("cpu")
    print(np.from_dlpack(tensor).sum(), fusedmoe.as_tensor(tensor).nbytes + 1)
    selection = fusedmoe.explain(num_experts=8, topk=2, hidden=64, intermediate=32, device="cuda")
    fusedmoe.explain(num_expert=8)  # type: ignore[call-arg]
    if selection.chosen is not None:
        print(selection.chosen.experts.upper(), selection.packed_bytes() + fusedmoe.num_threads())
    cache = fusedmoe.PackCache()
    cache.clear()
    return [size + len(cache) for size in tensor.shape]
