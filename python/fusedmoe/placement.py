"""Which rank holds which expert, and the loads that say where experts should be."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence

from . import _core
from ._arrays import Array, array, invalid
from .ranks import Communicator


def linear_placement(num_experts: int, num_ranks: int, redundant: int = 0) -> str:
    """Consecutive experts on each rank, and copies of experts 0, 1, ... behind them, as JSON."""
    return _core.make_placement("linear", num_experts, num_ranks, redundant)


def round_robin_placement(num_experts: int, num_ranks: int) -> str:
    """Expert e on rank e % num_ranks, as JSON."""
    return _core.make_placement("round_robin", num_experts, num_ranks, 0)


class LoadWindow:
    """How many tokens chose each expert of some layers in the last calls: loads for balance().

    Args:
        num_layers: how many.
        num_experts: of each layer.
        num_calls: of a layer that count; older ones are forgotten.
    """

    def __init__(self, num_layers: int, num_experts: int, num_calls: int) -> None:
        self._handle = _core.LoadWindow(num_layers, num_experts, num_calls)
        self._num_experts = num_experts

    def add(self, layer: int, expert_load: Array) -> None:
        """Adds what a call of the layer has filled: (num_experts) int32."""
        self._handle.add(layer, array(expert_load))

    def loads(self, communicator: Optional[Communicator] = None) -> List[List[float]]:
        """(num_layers, num_experts): sums over the calls.

        Args:
            communicator: sums over its ranks too, the same on all, which all call this.
        """
        sums = self._handle.loads(None if communicator is None else communicator._handle)
        each = self._num_experts
        return [sums[begin : begin + each] for begin in range(0, len(sums), each)]

    def clear(self) -> None:
        """Forgets all calls."""
        self._handle.clear()


class BalancedLayer(NamedTuple):
    """What balance() makes of a layer's loads."""

    placement: str
    """JSON, for placement= of a layer."""
    before: float
    """Load of the busiest rank over the mean of all, with the placement that there was."""
    after: float
    """The same with the new placement; 1 is even, 0 without loads."""


def balance(
    loads: Any,
    num_ranks: int,
    *,
    redundant: int = 0,
    num_hosts: int = 1,
    num_groups: int = 0,
    placements: Sequence[str] = (),
) -> List[BalancedLayer]:
    """Spreads the experts of each layer over ranks by DeepSeek's algorithm (EPLB).

    Args:
        loads: (layers, experts), tokens that chose each, or (experts) of one layer: lists, or an
            array that has tolist().
        num_ranks: each holds equally many experts.
        redundant: copies beyond one of each expert; the busiest are copied.
        num_hosts: above 1, each host holds whole groups, and the copies of an expert share a host.
        num_groups: consecutive experts of equal number; 0: each is one of its own.
        placements: what the ranks hold now, one for all layers or one for each. An expert that
            stays on its rank keeps its place there. Empty: linear_placement().
    """
    rows = _rows_of(loads)
    if any(len(row) != len(rows[0]) for row in rows):
        raise invalid("loads", "loads: the layers have different numbers of experts")
    layers = _core.balance(
        [load for row in rows for load in row],
        len(rows[0]),
        num_ranks,
        redundant,
        num_hosts,
        num_groups,
        list(placements),
    )
    return [BalancedLayer(*layer) for layer in layers]


def _rows_of(loads: Any) -> List[List[float]]:
    """A list for each layer."""
    try:
        rows = loads.tolist() if hasattr(loads, "tolist") else list(loads)
        if not rows or not hasattr(rows[0], "__len__"):
            rows = [rows]
        return [[float(load) for load in row] for row in rows]
    except (TypeError, ValueError):
        found = type(loads).__name__
        message = f"loads: was a {found}; must be numbers, (layers, experts)"
        raise invalid("loads", message) from None
