"""The references leave nothing out: docs/reference.md has every public name of the Python package, and each header
has a group, whose marks are in pairs.

usage: reference_test.py ROOT
"""

import ast
import pathlib
import re
import subprocess
import sys

root = pathlib.Path(sys.argv[1])
filter_ = [sys.executable, root / "scripts/doxygen_filter.py"]


def doxygen(argument):
    return subprocess.run([*filter_, argument], stdout=subprocess.PIPE, text=True, check=True).stdout


tree = ast.parse((root / "python/fusedmoe/__init__.py").read_text())
(public,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")
page = (root / "docs/reference.md").read_text()
missing = [name for name in ast.literal_eval(public) if name[0] != "_" and f"::: fusedmoe.{name}\n" not in page]
assert not missing, f"docs/reference.md lacks {missing}"

pages = doxygen("--pages")
groups = re.findall(r"@defgroup (\w+)", pages)
headers = [*root.glob("include/*.h"), *root.glob("include/fusedmoe/*.h")]
for header in headers:
    text = doxygen(header)
    assert text.count("@{ */") == text.count("@} */") > 0, header
    groups += re.findall(r"@defgroup (\w+)", text)
    assert f"@ref {header.relative_to(root / 'include')} |" in pages, header
assert len(set(groups)) == len(groups), "several groups have one name"
print(f"{len(headers)} headers")
