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

    def differences():  # of those that can run here
        rows = json.loads(file.read_text())["rows"]
        return {row["name"]: row["difference"] for row in rows if "error" not in row}

    assert {"fusedmoe", "hf eager", "hf batched_mm"} <= set(differences())
    assert max(differences().values()) < 1e-5
    assert picture.exists() == ("--plot" in outputs)
    assert "hf eager" in capsys.readouterr().out
    assert bench.main([*sizes, "--scheme", "mxfp4_w4a16", "--json", str(file)]) == 0
    assert max(differences().values()) < 3e-2


def test_bench_hands_scaled_grouped_mm_what_it_documents(tmp_path, monkeypatch):
    row_wise = torch.nn.functional.ScalingType.RowWise

    def stand_in(a, b, scale_a, recipe_a, scale_b, recipe_b, offs, output_dtype):
        assert recipe_a == recipe_b == row_wise and a.dtype == b.dtype == torch.float8_e4m3fn
        assert scale_b.is_contiguous() and b.stride(1) == 1  # column-major, as kernels need it
        a, b = a.float() * scale_a[:, None], b.float() * scale_b[:, None, :]
        starts = [0, *offs.tolist()]
        parts = [a[i:j] @ m for i, j, m in zip(starts, starts[1:], b)]
        return torch.cat(parts).to(output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", stand_in)
    sizes = "--experts 8 --topk 2 --hidden 64 --intermediate 96 --tokens 5 --min-time 0".split()
    only = ["--only", "fusedmoe", "torch scaled_mm", "vllm", "--json", str(tmp_path / "bench.json")]
    assert bench.main([*sizes, "--scheme", "fp8_channel_token", *only]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "bench.json").read_text())["rows"]}
    assert rows["torch scaled_mm"]["difference"] < 3e-2
    assert "vllm" not in rows or "needs a GPU" in rows["vllm"]["error"]


def test_demo_and_the_example_generate(tmp_path):
    sizes = [text for name, size in SMALL.items() for text in (f"--{name}", size)]
    only = ["--implementations", "fusedmoe", "eager", "unknown", "f32", "--new-tokens", 4]
    only += ["--prompts", 5, 9]
    results = json.loads(run("-m", "fusedmoe.demo", *sizes, *only, "--json"))["results"]
    assert [r["implementation"] for r in results] == ["f32", "fusedmoe", "eager", "unknown"]
    assert "unknown" in results.pop()["failure"]
    assert all(len(result["tokens"]) == 4 for result in results)
    assert all(len(result["prompt_tokens_per_s"]) == 2 for result in results)
    assert all(result["experts_ms"] > 0 for result in results)
    exact, own, eager = (result["error"] for result in results)
    assert exact == 0 < own < eager < 0.05

    demo.make_model(tmp_path, **SMALL)
    example = pathlib.Path(__file__).parents[2] / "examples" / "generate.py"
    assert len(run(example, tmp_path, "--new-tokens", 4).split()) == 3 + 4
