"""What would run, the doctor, and the package itself."""

import inspect
import json
import logging
import os
import pathlib
import re
import struct
import subprocess
import sys
import types
from typing import Optional

import numpy as np
import pytest
from conftest import golden_dir

import fusedmoe

GPT_OSS = dict(
    num_experts=128, topk=4, hidden=2880, intermediate=2880, scheme="mxfp4_w4a16",
    activation="swigluoai", has_bias=True,
)


def test_explain_needs_no_gpu():
    here = fusedmoe.explain(**GPT_OSS)
    assert here.chosen and here.chosen.experts == "cpu"
    assert here.workspace_bytes(64) > here.workspace_bytes(1) > 0
    hopper = fusedmoe.explain(**GPT_OSS, device="cuda", compute_capability=90)
    if hopper.chosen:  # compiled with CUDA
        assert hopper.workspace_bytes(64) > hopper.workspace_bytes(1) > 0
    there = fusedmoe.explain(**GPT_OSS, device="cuda", compute_capability=75)
    assert there.chosen is None
    assert all(candidate.text for candidate in there.candidates if candidate.reason != "supported")
    assert len(json.loads(there.json)) == len(there.candidates)
    assert "cpu" in str(there) == repr(there)
    with pytest.raises(NotImplementedError):
        fusedmoe.explain(**GPT_OSS, device="cuda", compute_capability=80, require="sm90")


def test_explain_refuses_unknown_names():
    with pytest.raises(TypeError, match="no setting 'dtypes'; there are: .*dtype"):
        fusedmoe.explain(**GPT_OSS, dtypes="bf16")
    with pytest.raises(TypeError, match="no setting with a checkpoint 'topk'; there are: .*device"):
        fusedmoe.explain(golden_dir() / "mixtral.safetensors", topk=2)


def test_checkpoints_say_what_they_are():
    checkpoint = fusedmoe.Checkpoint(golden_dir() / "mixtral.safetensors")
    assert checkpoint.info["family"] == "mixtral" and checkpoint.info["num_experts"] == 8
    assert checkpoint.scheme(checkpoint.moe_layers[0]) == checkpoint.info["scheme"]
    assert checkpoint.moe_layers == [0] and checkpoint.files
    assert fusedmoe.explain(checkpoint, dtype="f32").chosen.experts == "cpu"


def test_layers_with_schemes_of_their_own_are_explained_one_by_one(tmp_path):
    header, data = {}, b""
    for layer, dtype in enumerate(["F32", "F16"]):
        shapes = {"gate": (2, 32)}
        for expert in ("experts.0.", "experts.1."):
            shapes |= {expert + "gate_proj": (16, 32), expert + "up_proj": (16, 32)}
            shapes[expert + "down_proj"] = (32, 16)
        for name, shape in shapes.items():
            begin = len(data)
            data += bytes(shape[0] * shape[1] * int(dtype[1:]) // 8)
            header[f"model.layers.{layer}.mlp.{name}.weight"] = {
                "dtype": dtype, "shape": shape, "data_offsets": [begin, len(data)]
            }  # fmt: skip
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 32}
    config |= {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="one must be named: f32 in layer 0, f16 in layer 1"):
        fusedmoe.explain(tmp_path)
    gpu = {"device": "cuda", "compute_capability": 90, "dtype": "f16"}
    assert fusedmoe.explain(tmp_path, layer=0, **gpu).chosen is None
    assert fusedmoe.explain(tmp_path, layer=1, **gpu).chosen.experts == "sm90"
    with pytest.raises(ValueError, match="layer with experts"):
        fusedmoe.explain(tmp_path, layer=2)
    with pytest.raises(ValueError, match="without a checkpoint"):
        fusedmoe.explain(**GPT_OSS, layer=0)


def test_doctor(monkeypatch):
    monkeypatch.setenv("FUSEDMOE_TOKEN", "a secret of ranks")
    output = subprocess.run(
        [sys.executable, "-m", "fusedmoe", "doctor"], capture_output=True, text=True, check=True
    ).stdout
    assert fusedmoe.__version__ in output and fusedmoe.cpu_isa() in output
    assert "FUSEDMOE_TOKEN=(set)\n" in output and "a secret" not in output
    wrong = subprocess.run([sys.executable, "-m", "fusedmoe"], capture_output=True, check=False)
    assert wrong.returncode == 2
    subprocess.run([sys.executable, "-m", "fusedmoe", "--help"], check=True)


def test_threads_and_devices():
    threads = fusedmoe.num_threads()
    fusedmoe.set_num_threads(1)
    assert fusedmoe.num_threads() == 1
    fusedmoe.set_num_threads(0)
    assert fusedmoe.num_threads() == threads
    assert fusedmoe.device_problem("cpu") == ""
    with pytest.raises(ValueError):
        fusedmoe.device_problem("gpu")


def test_the_package_is_typed_and_documented():
    assert (pathlib.Path(fusedmoe.__file__).parent / "py.typed").exists()
    for name in fusedmoe.__all__:
        value = getattr(fusedmoe, name)
        if callable(value) and not name.startswith("_"):
            assert value.__doc__, name


def test_types_are_right():
    """Of the package, and of a program that uses it; what is wrong there is found."""
    pytest.importorskip("mypy")
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--config-file", root / "pyproject.toml"]
    command += ["--cache-dir", os.devnull, pathlib.Path(fusedmoe.__file__).parent]
    command += [pathlib.Path(__file__).parent / "typed_program.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def signatures():
    for name in fusedmoe.__all__:
        public = getattr(fusedmoe, name)
        if not inspect.isclass(public) and callable(public):
            yield name, inspect.signature(public)
        for method, function in vars(public).items() if inspect.isclass(public) else ():
            if isinstance(function, classmethod):
                function = function.__func__
            if inspect.isfunction(function) and (method[0] != "_" or method == "__call__"):
                yield f"{name}.{method}", inspect.signature(function)


def test_signatures_say_their_types():
    found = dict(signatures())
    assert {"fused_experts", "cpu_isa", "MoELayer.__call__"} <= set(found)
    for name, signature in found.items():
        arguments = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
        assert all(p.annotation is not p.empty for p in arguments), name
        assert signature.return_annotation is not signature.empty, name
    options = found["MoELayer.from_checkpoint"].parameters
    assert options["num_threads"].annotation == Optional[int] and "options" not in options


def public_callables():
    """Functions, classes and their methods, but for what they have from Python's own classes."""
    for name in fusedmoe.__all__:
        public = getattr(fusedmoe, name)
        if callable(public):
            yield name, public
        for base in inspect.getmro(public) if inspect.isclass(public) else ():
            for method in vars(base) if base.__module__ != "builtins" else ():
                function = getattr(public, method)
                if callable(function) and (method[0] != "_" or method in ("__call__", "__len__")):
                    yield f"{name}.{method}", function


def test_every_public_callable_has_a_signature():
    """Methods of the extension have it as the first line of their documentation."""
    found = dict(public_callables())
    assert {"PackCache", "PackCache.clear", "Tensor.view", "LayerOptions"} <= set(found)
    with pytest.raises(TypeError):
        found.pop("Tensor")()  # made by functions alone
    for name, function in found.items():
        try:
            inspect.signature(function)
        except ValueError:
            line = rf"{name.rpartition('.')[2]}\(self.*\) -> \S+"
            assert re.fullmatch(line, function.__doc__.splitlines()[0]), name


def test_the_logger_hears_once_what_was_chosen(caplog):
    def make(hidden):
        w13, w2 = np.zeros((2, 32, hidden), "float32"), np.zeros((2, hidden, 16), "float32")
        fusedmoe.MoELayer.from_tensors(w13, w2, topk=1, dtype="f32")

    with caplog.at_level(logging.INFO, "fusedmoe"):
        for hidden in (96, 96, 160):
            make(hidden)
    messages = [record.getMessage() for record in caplog.records if record.name == "fusedmoe"]
    assert [f"hidden {hidden}" in text for hidden, text in zip((96, 160), messages)] == [True, True]
    assert all(text.startswith("cpu+no_ep runs 2 experts") for text in messages)


def test_only_who_listens_hears_what_is_not_used(tmp_path):
    make = "import numpy as np, fusedmoe; w = np.zeros((2, 32, 16), 'float32'); "
    make += "fusedmoe.MoELayer.from_tensors(w, w[:, :16].copy(), topk=1, dtype='f32')"
    (tmp_path / "fusedmoe").mkdir()
    (tmp_path / "fusedmoe" / "tuned_configs.json").write_text("[]")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("FUSEDMOE_TUNED_CONFIGS", None)

    def printed(code):
        command = [sys.executable, "-c", code + make]
        result = subprocess.run(command, env=environment, capture_output=True, check=True)
        return (result.stdout + result.stderr).decode()

    assert printed("") == ""
    listening = printed("import logging; logging.basicConfig(); ")
    assert listening.startswith("WARNING:fusedmoe:kernel configurations that were tuned are not ")
    assert "tuned_configs.json" in listening and listening.count("\n") == 1


def test_a_build_asks_for_cutlass_where_nvcc_is(tmp_path, monkeypatch):
    backend = pathlib.Path(__file__).parents[2] / "python/build_backend"
    package = types.ModuleType("scikit_build_core")
    package.build = types.ModuleType("scikit_build_core.build")
    package.build.get_requires_for_build_wheel = lambda settings: ["ninja"]
    package.build.build_wheel = lambda folder, settings=None: os.environ.get("CUTLASS_ROOT")
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", package.build)
    monkeypatch.syspath_prepend(backend)
    for name in ("CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE", "CUDACXX", "CUTLASS_ROOT", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    import fusedmoe_build

    requires = fusedmoe_build.get_requires_for_build_wheel
    assert requires() == ["ninja"]
    (tmp_path / "nvcc").touch(0o755)
    install_deps = (backend.parents[1] / "scripts/install-deps.sh").read_text()
    assert fusedmoe_build.CUTLASS in install_deps
    assert requires() == ["ninja", fusedmoe_build.CUTLASS]
    assert requires({"cmake.define.FUSEDMOE_CUDA": "OFF"}) == ["ninja"]
    assert requires({"cmake.define.FUSEDMOE_CUDA": "ON"}) == ["ninja", fusedmoe_build.CUTLASS]
    monkeypatch.setenv("CMAKE_ARGS", "-GNinja -DFUSEDMOE_CUDA:STRING=off")
    assert requires() == ["ninja"]
    monkeypatch.setenv("CMAKE_ARGS", "")
    monkeypatch.setenv("CUTLASS_ROOT", "/somewhere")
    assert requires() == ["ninja"] and fusedmoe_build.build_wheel("dist") == "/somewhere"
    # Where pip has put it.
    monkeypatch.delenv("CUTLASS_ROOT")
    (tmp_path / "normal/cutlass_library").mkdir(parents=True)
    (tmp_path / "normal/cutlass_library/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "normal")
    assert fusedmoe_build.build_wheel("dist") == str(tmp_path / "normal")
    monkeypatch.delenv("CUTLASS_ROOT")


def test_links_of_the_package_lead_to_one_place():
    root = pathlib.Path(__file__).parents[2]
    home = re.search(r"HOMEPAGE_URL (\S+)", (root / "CMakeLists.txt").read_text()).group(1)
    project = (root / "pyproject.toml").read_text()
    urls = re.findall(r'^\w+ = "(https://[^"]*)"$', project, re.MULTILINE)
    assert urls and all(url.startswith(home) for url in urls)
    readme = (root / "README.md").read_text()
    defined = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", readme, re.MULTILINE))
    raw = home.replace("github.com", "raw.githubusercontent.com") + "/main/"
    for name, url in defined.items():
        assert url in (f"{home}/blob/main/{name}", raw + name)
        assert (root / name).exists(), name
    other = re.compile(r"```.*?```|`[^`]*`|^\[[^\]]+\]: \S+$", re.DOTALL | re.MULTILINE)
    prose = other.sub("", readme)
    assert not re.findall(r"\]\((?!https://)", prose)
    used = re.findall(r"\]\[([^\]]+)\]", prose)
    used += re.findall(r"\[([^\]]+\.(?:md|h|c|cpp|py)|LICENSE)\](?!\[)", prose)
    assert set(used) == set(defined)


def test_importing_needs_no_other_package():
    code = "import sys, fusedmoe; print(*{'numpy', 'torch'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == ""


def test_version_is_that_of_the_headers():
    header = (pathlib.Path(__file__).parents[2] / "include/fusedmoe/version.h").read_text()
    numbers = re.findall(r"#define FUSEDMOE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header)
    assert fusedmoe.version_info == tuple(map(int, numbers)) and len(numbers) == 3
    assert fusedmoe.__version__ == ".".join(numbers)


def test_a_checkpoint_is_quantized(tmp_path):
    source = golden_dir() / "mixtral.safetensors"
    steps = []
    written = fusedmoe.quantize_checkpoint(
        source, tmp_path / "int4", "int4_g32", progress=lambda *step: steps.append(step)
    )
    assert fusedmoe.Checkpoint(tmp_path / "int4").info["scheme"] == "int4_g32"
    assert written == sum(file.stat().st_size for file in (tmp_path / "int4").iterdir())
    assert steps[-1][0] == steps[-1][1]

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fusedmoe.quantize_checkpoint(source, tmp_path / "no", "int4_g32", progress=stop)
    with pytest.raises(ValueError, match="scale_rule"):
        fusedmoe.quantize_checkpoint(source, tmp_path / "no", "mxfp4_w4a16", scale_rule="odd")
    with pytest.raises(ValueError, match="awq"):
        fusedmoe.quantize_checkpoint(source, tmp_path / "no", "nvfp4_w4a16", layout="awq")
    assert [path.name for path in tmp_path.iterdir()] == ["int4"]


@pytest.mark.parametrize("program", ["bench", "demo"])
def test_programs_name_the_packages_that_they_miss(program):
    code = f"""
import importlib.util, runpy, sys
find = importlib.util.find_spec
sys.modules["torch"] = None  # "import torch" fails
importlib.util.find_spec = lambda name, *more: name != "torch" and find(name, *more) or None
sys.argv = ["{program}"]
runpy.run_module("fusedmoe.{program}", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert re.match(rf"fusedmoe.{program} needs .*: pip install .*torch", done.stderr), done.stderr
