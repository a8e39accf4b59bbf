"""python -m fusedmoe doctor: what a bug report needs."""

import importlib.metadata
import os
import platform
import sys

import fusedmoe
from fusedmoe import _core

_SECRETS = ("FUSEDMOE_TOKEN",)  # a report may be public
_PACKAGES = ("numpy", "torch", "transformers", "vllm", "cupy", "jax", "ml_dtypes")


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def doctor() -> int:
    """Prints versions, processor and devices; 0 if the library can run here."""
    print(f"fusedmoe {fusedmoe.__version__} in {os.path.dirname(_core.__file__)}")
    print(f"python {platform.python_version()}, {platform.platform()}, {platform.machine()}")
    print(f"cpu: isa {fusedmoe.cpu_isa()}, threads {fusedmoe.num_threads()}")
    print("cuda: " + _core.cuda_device_summary().strip().replace("\n", "\n      "))
    for name, value in sorted(os.environ.items()):
        if name.startswith(("FUSEDMOE_", "OMP_", "CUDA_VISIBLE")):
            print(f"{name}={'(set)' if name in _SECRETS else value}")
    for package in _PACKAGES:
        print(f"{package} {_version_of(package)}")
    chosen = fusedmoe.explain(num_experts=8, topk=2, hidden=64, intermediate=32).chosen
    print(f"a small bf16 layer runs on: {chosen.experts if chosen else 'nothing'}")
    return 0 if chosen else 1


def main() -> int:
    if sys.argv[1:] != ["doctor"]:
        asked = sys.argv[1:] in (["-h"], ["--help"])
        print("usage: python -m fusedmoe doctor", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    return doctor()


if __name__ == "__main__":
    sys.exit(main())
