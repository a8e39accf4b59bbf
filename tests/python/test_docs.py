"""The Python code blocks of the pages, as they are written."""

import json
import pathlib
import re
import shutil

import pytest
from conftest import golden_dir

ROOT = pathlib.Path(__file__).parents[2]
# The quick start runs as a whole, with its output: tests/docs/blocks_test.py.
PAGES = (
    "README.md",
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "quick-start"),
)
BLOCKS = [
    pytest.param(page, block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    )
]


@pytest.mark.parametrize("page, block", BLOCKS)
def test_block(page, block, tmp_path, monkeypatch):
    for package in re.findall(r"^import (torch|transformers)$", block, re.MULTILINE):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "gpt-oss-20b"
    if page == "docs/hugging-face.md":
        pytest.importorskip("transformers", minversion="5")
        from fusedmoe.demo import make_model

        make_model(folder, layers=1, hidden=64, intermediate=64, experts=8, topk=2, vocabulary=64)
    else:  # one layer, whose config lies in the file
        folder.mkdir()
        file = shutil.copy(golden_dir() / "gpt_oss_mxfp4.safetensors", folder / "model.safetensors")
        with open(file, "rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        (folder / "config.json").write_text(header["__metadata__"]["config"])
    # A file, because torch.compile reads the source.
    source = tmp_path / "block.py"
    source.write_text(block)
    exec(compile(block, source, "exec"), {"__name__": "block"})
