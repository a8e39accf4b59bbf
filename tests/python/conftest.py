"""A small layer, and the golden vectors (tests/data/README.md)."""

import os
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

import fusedmoe


@pytest.fixture
def problem():
    """Tensors of 8 experts, top-2, hidden 64, intermediate 32, 5 tokens, in float32."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    ids = np.stack([rng.permutation(8)[:2] for _ in range(5)]).astype(np.int32)
    return SimpleNamespace(
        x=normal(5, 64),
        w13=normal(8, 64, 64) / 8,
        w2=normal(8, 64, 32) / 6,
        gate=normal(8, 64) / 8,
        ids=ids,
        weights=rng.random((5, 2), dtype=np.float32),
    )


def plain_experts(problem):
    """The same sum in NumPy."""
    result = np.zeros_like(problem.x)
    for token, x in enumerate(problem.x):
        for expert, weight in zip(problem.ids[token], problem.weights[token]):
            if expert >= 0:
                gate, up = np.split(problem.w13[expert] @ x, 2)
                act = gate / (1 + np.exp(-gate)) * up
                result[token] += weight * (problem.w2[expert] @ act)
    return result


def need_cuda():
    """Skips the module where there is no GPU; with FUSEDMOE_EXPECT_CUDA it fails then."""
    reason = fusedmoe.device_problem("cuda:0")
    if reason and "FUSEDMOE_EXPECT_CUDA" not in os.environ:
        pytest.skip(f"no GPU for the library: {reason}", allow_module_level=True)
    assert not reason, reason


def devices():
    """For tests that run on each: "cpu", and "cuda" where there is a GPU or must be one."""
    there = "FUSEDMOE_EXPECT_CUDA" in os.environ or not fusedmoe.device_problem("cuda:0")
    return ["cpu", "cuda"] if there else ["cpu"]


def golden_dir():
    return pathlib.Path(os.environ["FUSEDMOE_GOLDEN_DIR"])


def relative_error(actual, expected):
    return np.abs(actual - expected).max() / np.abs(expected).max()


def f32(tensor):
    return np.from_dlpack(fusedmoe.as_tensor(tensor).astype("f32"))
