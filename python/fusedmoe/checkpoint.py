"""Checkpoints: folders and files of published models."""

from __future__ import annotations

import os
from typing import List, Optional, cast

from . import _core
from ._arrays import Path
from .options import CheckpointInfo


class Checkpoint:
    """A folder with config.json and *.safetensors, one safetensors file whose metadata has the
    config, or a GGUF file. Reads headers only.

    Args:
        path: the folder or the file.
        read_files: read tensors when they are needed instead of mapping the files; mapped files
            must not be changed in place before their layers are made.
        family: how the model's tensors are named: a built-in family, or a JSON file
            (docs/families.md); default: the family that the config names.

    Raises:
        OSError: for files that cannot be read or are malformed.
        NotImplementedError: for a model that the library does not know.
    """

    def __init__(
        self, path: Path, *, read_files: bool = False, family: Optional[Path] = None
    ) -> None:
        named = "" if family is None else os.fspath(family)
        self._handle = _core.open_checkpoint(os.fspath(path), read_files, named)
        self.info = cast(CheckpointInfo, self._handle.info())
        """family, scheme, layout, activation, num_layers, num_experts, topk, hidden, ..."""
        self.moe_layers: List[int] = self._handle.moe_layers()
        """The layers that hold experts, ascending."""

    @property
    def files(self) -> List[str]:
        """Paths of all files that the checkpoint consists of."""
        return self._handle.files()

    def scheme(self, layer: int) -> str:
        """Number formats of a layer's experts; `info` says those of the first one."""
        return self._handle.scheme(layer)

    def __repr__(self) -> str:
        return f"fusedmoe.Checkpoint({self.info['family']}, {self.info['scheme']})"
