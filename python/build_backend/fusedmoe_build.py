"""The build backend of the wheel: scikit-build-core's, and CUTLASS's headers where nvcc is.

Only a build with CUDA needs them, and the wheel that has them brings 100 MB of others along. So they
are asked for when the build is, not in pyproject.toml.
"""

import importlib.util
import os
import pathlib
import shutil

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403

CUTLASS = "nvidia-cutlass==4.2.0.0"  # as in scripts/install-deps.sh


def _is_off(value):
    return str(value).upper() in ("0", "OFF", "NO", "FALSE", "N")


def _without_cuda(config_settings):
    settings = config_settings or {}
    for key in ("cmake.define.FUSEDMOE_CUDA", "skbuild.cmake.define.FUSEDMOE_CUDA"):
        if _is_off(settings.get(key, "")):
            return True
    words = os.environ.get("CMAKE_ARGS", "") + " " + os.environ.get("SKBUILD_CMAKE_DEFINE", "")
    defined = [word.removeprefix("-D") for word in words.replace(";", " ").split()]
    return any(
        word.startswith("FUSEDMOE_CUDA") and _is_off(word.partition("=")[2]) for word in defined
    )


def _has_nvcc():
    root = os.environ.get("CUDA_PATH") or os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return bool(
        os.environ.get("CUDACXX")
        or shutil.which("nvcc")
        or os.access(os.path.join(root, "bin", "nvcc"), os.X_OK)
    )


def _cuda_requires(config_settings):
    if _without_cuda(config_settings) or not _has_nvcc() or os.environ.get("CUTLASS_ROOT"):
        return []
    return [CUTLASS]


def get_requires_for_build_wheel(config_settings=None):
    requires = _build.get_requires_for_build_wheel(config_settings)
    return [*requires, *_cuda_requires(config_settings)]


get_requires_for_build_editable = get_requires_for_build_wheel


def _name_cutlass():
    """pip puts what get_requires_for_build_wheel() asks for into a folder of its own, in which
    scikit-build-core does not let CMake look."""
    found = importlib.util.find_spec("cutlass_library")
    if found is not None:
        os.environ.setdefault("CUTLASS_ROOT", str(pathlib.Path(found.origin).parents[1]))


def build_wheel(*args, **settings):
    _name_cutlass()
    return _build.build_wheel(*args, **settings)


def build_editable(*args, **settings):
    _name_cutlass()
    return _build.build_editable(*args, **settings)
