"""Runs the program on one layer, and compares its output."""

import pathlib
import subprocess

from safetensors.torch import load_file, save_file


def call(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().removeprefix("error: "))


def run_layer(program, checkpoint, x, experts, directory, layer=None):
    """The output of the given layer, else of the first with experts."""
    directory = pathlib.Path(directory)
    chosen = [] if layer is None else ["--layer", layer]
    save_file({"hidden_states": x}, directory / "x.safetensors")
    call(program, "run", "--checkpoint", checkpoint, "--input", directory / "x.safetensors",
         "--output", directory / "y.safetensors", "--dtype", "f32", "--experts", experts,
         *chosen)
    return load_file(directory / "y.safetensors")["output"]


def difference(actual, wanted):
    return float((actual - wanted).abs().max() / wanted.abs().max())


def short(error):
    return " ".join(str(error).split())[:160]
