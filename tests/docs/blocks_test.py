"""The examples of a page, as they are written, in order, in an empty folder; where a text block follows one,
that is what it prints.

usage: blocks_test.py PAGE FOLDER BUILD [CPP_PROGRAM]

A block with a title is a file. Other sh blocks run in bash and Python blocks with python3, unless they import a package
that is not here; for a C++ block without title CPP_PROGRAM runs, which the build has made of it. Other blocks (cmake)
belong to other tests. What a reader has to begin with is there: the program on the PATH; a wheel in dist/, made of what BUILD holds; fusedmoe/build, which is
BUILD. Numbers and the level of instructions depend on the machine, so any number stands for every other.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

page, folder, build, *cpp_program = (pathlib.Path(argument) for argument in sys.argv[1:])
venv_python = folder / ".venv/bin/python3"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
# Debian has it in a package of its own.
HAVE_VENV = subprocess.run([sys.executable, "-c", "import ensurepip"], capture_output=True).returncode == 0


def write_wheel(dist):
    """The package and the program of the build, as pip takes them."""
    package = build / "python/fusedmoe"
    version = re.search(
        r'^CMAKE_PROJECT_VERSION:\w+=(.*)$', (build / "CMakeCache.txt").read_text(), re.MULTILINE
    ).group(1)
    name = f"fusedmoe-{version}"
    dist.mkdir()
    with zipfile.ZipFile(dist / f"{name}-py3-none-any.whl", "w") as wheel:
        files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        for path in files:
            wheel.write(path, path.relative_to(package.parent))
        wheel.write(build / "cli/fusedmoe", f"{name}.data/scripts/fusedmoe")
        info = f"{name}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: fusedmoe\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def without_numbers(text):
    text = re.sub(r"isa=\w+", "isa=ISA", text)
    return re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "N", text).split()


def commands_of(language, block):
    return {
        "sh": ["bash", "-euo", "pipefail", "-c", block],
        "python": [venv_python if venv_python.exists() else sys.executable, "-c", block],
        "cpp": cpp_program,
    }.get(language)


shutil.rmtree(folder, ignore_errors=True)
(folder / "fusedmoe").mkdir(parents=True)
(folder / "fusedmoe/build").symlink_to(build)
environment = {**os.environ, "PATH": f"{folder}/.venv/bin:{build}/cli:{os.environ['PATH']}"}
blocks = FENCE.findall(page.read_text())
if HAVE_VENV and any("venv" in block for _, _, block in blocks):
    write_wheel(folder / "dist")
    environment.pop("PYTHONPATH")  # so that the wheel is what runs
ran = 0
for (language, title, block), (next_language, _, expected) in zip(blocks, [*blocks[1:], ("", "", "")]):
    if title:
        (folder / title).write_text(block)
        continue
    command = commands_of(language, block)
    imports = re.findall(r"^import (\w+)", block, re.MULTILINE) if language == "python" else []
    missing = any(name != "fusedmoe" and not importlib.util.find_spec(name) for name in imports)
    if not command or missing or ("venv" in block and not HAVE_VENV):
        continue
    print(f"--- {language}\n{block}", flush=True)
    result = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(result.stdout, flush=True)
    ran += 1
    if next_language == "text":
        assert without_numbers(result.stdout) == without_numbers(expected), f"the page has\n{expected}"
shutil.rmtree(folder)
assert ran, "no block ran"
