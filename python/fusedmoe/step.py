"""A call of a layer in three parts."""

from __future__ import annotations

from . import _core
from ._arrays import Array


class Step:
    """A call of a layer in three parts, see MoELayer.begin()."""

    def __init__(self, handle: _core.Step, out: Array) -> None:
        self._handle = handle
        self._out = out

    def compute(self) -> None:
        """Runs shared experts and, on the rows that arrive, the routed ones."""
        self._handle.compute()

    def finish(self) -> Array:
        """Writes and returns the output."""
        self._handle.finish()
        return self._out
