"""Every argument of files, quantization and ranks is obeyed or refused: a case for each."""

import functools
import inspect
import shutil

import numpy as np
import pytest
from conftest import golden_dir
from test_options import refused

import fusedmoe
from fusedmoe import Communicator
from fusedmoe.options import names

MIXTRAL = golden_dir() / "mixtral.safetensors"


def quantized(tmp_path, **arguments):
    steps = []
    given = {"checkpoint": MIXTRAL, "output": tmp_path / "out", "scheme": "int4_g32", **arguments}
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    written = fusedmoe.quantize_checkpoint(**given, progress=lambda *step: steps.append(step))
    done, total = steps[-1]  # of the tensors alone
    assert 0 < done == total < written
    return fusedmoe.Checkpoint(given["output"])


QUANTIZE = {
    "checkpoint": lambda q: refused("nowhere", q, checkpoint="nowhere"),
    "output": lambda q: refused("directory", q, output=""),
    "scheme": lambda q: refused("fp9", q, scheme="fp9"),
    "layout": lambda q: refused("sideways", q, layout="sideways")
    and all(q(layout=name).info["layout"] == name for name in ("gptq", "compressed-tensors")),
    "scale_rule": lambda q: refused("scale_rule", q, scale_rule="even"),
    "calibration": lambda q: refused("nowhere", q, scheme="nvfp4", calibration="nowhere"),
    "max_shard_bytes": lambda q: refused("max_shard_bytes", q, max_shard_bytes=0)
    and len(q(max_shard_bytes=1).files) > len(q().files),
    "progress": lambda q: q(),  # which looks at its steps
}

CHECKPOINT = {
    "path": lambda _: refused("nowhere", fusedmoe.Checkpoint, "nowhere"),
    "read_files": lambda _: fusedmoe.Checkpoint(MIXTRAL, read_files=True).info["hidden"] > 0,
    "family": lambda _: refused("nobody", fusedmoe.Checkpoint, MIXTRAL, family="nobody"),
}

EXPLAIN = {
    "checkpoint": lambda _: refused("nowhere", fusedmoe.explain, "nowhere")
    and "cpu" in str(fusedmoe.explain(MIXTRAL))
    and refused("compute_capability", fusedmoe.explain, MIXTRAL, compute_capability=90),
    "layer": lambda _: refused("layer", fusedmoe.explain, MIXTRAL, layer=99)
    and refused("layer cannot be used without", fusedmoe.explain, layer=0, num_experts=8),
}

VALUES = np.linspace(-1, 1, 32 * 64, dtype=np.float32).reshape(32, 64)
ACTIVATIONS = {
    "x": lambda _: refused("x", fusedmoe.quantize_activations, VALUES[0], "fp8_block"),
    "scheme": lambda _: refused("fp9", fusedmoe.quantize_activations, VALUES, "fp9")
    and refused("activations", fusedmoe.quantize_activations, VALUES, "int4_g32"),
    "scale": lambda _: refused("scale", fusedmoe.quantize_activations, VALUES, "fp8_block", scale=1.0),
}  # fmt: skip

MATRIX = fusedmoe.quantize_weights(VALUES, "nvfp4")
DEQUANTIZE = {
    "matrix": lambda _: refused(
        "scales", fusedmoe.dequantize_weights, MATRIX._replace(scales=None), "nvfp4", 64),
    "scheme": lambda _: refused("values", fusedmoe.dequantize_weights, MATRIX, "int8_g32", 64),
    "in_features": lambda _: refused("values", fusedmoe.dequantize_weights, MATRIX, "nvfp4", 65),
}  # fmt: skip


def meeting(make, **given):
    """A case for each argument with which the ranks of `make` meet."""

    def changed(**arguments):
        return make(**{**given, **arguments})

    def none(match, **arguments):
        return lambda _: refused(match, changed, **arguments)

    cases = {
        "rank": none("rank", rank=1),
        "size": none("rank|size", size=0),
        "gather": none("gather", gather=7),
        "folder": none("/dev/null", folder="/dev/null/ranks"),
        "address": none("no launcher", address=None),
        "port": none("port", port=65536),
        "token": none("token", token="short"),
        "device": none("device", device="tpu"),
        "timeout": none("timeout", timeout=-1.0),
        "shared_memory": none("shared_memory", shared_memory="no"),
        "peer_memory": none("peer_memory", peer_memory="no"),
    }
    known = inspect.signature(make).parameters
    return {name: case for name, case in cases.items() if name in known}, known


# Those of NCCL need a GPU, and those of PyTorch and MPI come down to from_gather().
ALONE = {"rank": 0, "size": 1}
TABLES = {
    "quantize_checkpoint": (QUANTIZE, inspect.signature(fusedmoe.quantize_checkpoint).parameters),
    "Checkpoint": (CHECKPOINT, inspect.signature(fusedmoe.Checkpoint).parameters),
    "explain": (
        EXPLAIN, set(inspect.signature(fusedmoe.explain).parameters) - names(fusedmoe.ExplainConfig)),
    "quantize_activations": (
        ACTIVATIONS, inspect.signature(fusedmoe.quantize_activations).parameters),
    "dequantize_weights": (DEQUANTIZE, inspect.signature(fusedmoe.dequantize_weights).parameters),
    "threads": meeting(Communicator.threads, size=1),
    "join": meeting(Communicator.join, **ALONE, address="127.0.0.1", port=1),
    "from_gather": meeting(Communicator.from_gather, **ALONE, gather=lambda text: [text]),
    "from_folder": meeting(Communicator.from_folder, **ALONE, folder="ranks"),
}  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_every_argument_is_obeyed_or_refused(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases, known = TABLES[table]
    assert set(cases) == set(known)
    for name, case in cases.items():
        assert case(functools.partial(quantized, tmp_path)), name
