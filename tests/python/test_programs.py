"""python -m fusedmoe.bench and .demo, and examples/generate.py, where torch and transformers are."""

import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

from fusedmoe import bench, demo  # noqa: E402

SMALL = dict(layers=1, hidden=64, intermediate=96, experts=8, topk=2, vocabulary=128)


def run(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_bench_compares_and_writes(tmp_path, capsys):
    sizes = "--experts 8 --topk 2 --hidden 64 --intermediate 96 --tokens 1 5 --min-time 0".split()
    file, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    outputs = ["--json", str(file)]
    try:
        import matplotlib  # noqa: F401

        outputs += ["--plot", str(picture)]
    except ImportError:
        pass
    assert bench.main([*sizes, "--dtype", "f32", *outputs]) == 0
    results = json.loads(file.read_text())
    names = {row["name"] for row in results["rows"]}
    assert {"fusedmoe", "hf eager", "hf batched_mm"} <= names
    assert all(row["difference"] < 1e-5 for row in results["rows"])
    assert picture.exists() == ("--plot" in outputs)
    assert "hf eager" in capsys.readouterr().out
    assert bench.main([*sizes, "--scheme", "mxfp4_w4a16", "--json", str(file)]) == 0
    assert all(row["difference"] < 3e-2 for row in json.loads(file.read_text())["rows"])


def test_demo_and_the_example_generate(tmp_path):
    sizes = [text for name, size in SMALL.items() for text in (f"--{name}", size)]
    only = ["--implementations", "fusedmoe", "eager", "--new-tokens", 4]
    results = json.loads(run("-m", "fusedmoe.demo", *sizes, *only, "--json"))["results"]
    assert [result["implementation"] for result in results] == ["fusedmoe", "eager"]
    assert all(len(result["tokens"]) == 4 for result in results)

    demo.make_model(tmp_path, **SMALL)
    example = pathlib.Path(__file__).parents[2] / "examples" / "generate.py"
    assert len(run(example, tmp_path, "--new-tokens", 4).split()) == 3 + 4
