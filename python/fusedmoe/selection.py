"""What would run, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, List, NamedTuple, Optional, Union

from . import _core
from ._arrays import Array, Path, array, checked, invalid
from .checkpoint import Checkpoint
from .options import DeviceConfig, ExplainConfig, names, takes
from .placement import linear_placement

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Candidate:
    """An implementation, and whether it can serve the configuration."""

    experts: str
    prepare_finalize: str
    chosen: bool
    reason: str
    """A stable code: "supported", "device", "quant_scheme", ..."""
    text: str
    """Why not; or what would be multiplied, and by which code."""


class SimulatedStep(NamedTuple):
    """How long a layer would take on ranks; each number that of the rank with most."""

    dispatch_us: float
    experts_us: float
    combine_us: float
    inside_bytes: float
    """Rows of dispatch that leave or reach a rank within its host."""
    between_bytes: float
    """The same from and to other hosts."""
    balance: float
    """Rows of the busiest rank's experts over the mean."""
    quantize_us: float
    """Of dispatch_us, if rows are quantized before they travel; else 0."""

    @property
    def step_us(self) -> float:
        """Dispatch, experts and combine one after the other."""
        return self.dispatch_us + self.experts_us + self.combine_us


def rank_costs() -> str:
    """The costs by which layers choose how their rows travel, as JSON.

    They come from the file that the environment variable FUSEDMOE_RANK_COSTS names: `fusedmoe
    bench --calibrate` writes such a file of the ranks that it runs on. Else they are what H200s
    cost, and what is assumed of a network.

    Raises:
        OSError: for a file that cannot be read.
        ValueError: for one that says something else.
    """
    return _core.rank_costs()


class Selection:
    """The chosen implementation, and for every other the reason it was not chosen."""

    def __init__(self, handle: _core.Selection) -> None:
        self._handle = handle
        self.candidates: List[Candidate] = [Candidate(*row) for row in handle.candidates()]
        """In order of preference."""

    @property
    def chosen(self) -> Optional[Candidate]:
        """None where nothing fits."""
        return next((candidate for candidate in self.candidates if candidate.chosen), None)

    @property
    def json(self) -> str:
        """All candidates as a JSON array."""
        return self._handle.json()

    def workspace_bytes(self, num_tokens: int, num_threads: int = 0) -> int:
        """Scratch memory of the experts alone. Needs no GPU where compute_capability was given."""
        return self._handle.workspace_bytes(num_tokens, num_threads)

    def packed_bytes(self) -> int:
        """Memory that the packed weights will take, before any are packed. Needs no GPU either."""
        return self._handle.packed_bytes()

    def peer_bytes(
        self,
        num_ranks: int,
        max_tokens_per_rank: int,
        *,
        combine: Optional[str] = None,
        combine_dtype: Optional[str] = None,
    ) -> int:
        """Memory that each GPU lends the others for a layer, for Communicator.map_peers().

        Args:
            num_ranks: that share the experts and have tokens of their own.
            max_tokens_per_rank: as for a layer; so are
            combine: "per_rank" or "per_slot", and
            combine_dtype: "f32", or the layer's.

        Raises:
            NotImplementedError: where nothing fits the configuration.
        """
        settings = {"combine": combine, "combine_dtype": combine_dtype}
        given = {name: value for name, value in settings.items() if value is not None}
        return self._handle.peer_bytes(num_ranks, max_tokens_per_rank, given)

    def simulate(
        self,
        topk_ids: Optional[Array] = None,
        *,
        tokens_per_rank: int,
        num_ranks: Optional[int] = None,
        placement: Optional[str] = None,
        num_hosts: int = 1,
        costs: Optional[str] = None,
        to_each_expert: bool = False,
    ) -> SimulatedStep:
        """How long a layer with the chosen experts would take on ranks that are not here.

        Args:
            topk_ids: (num_tokens, topk) int32, the tokens of the ranks one behind the other, again
                from the first where there are not enough. None: ids at random.
            tokens_per_rank: of each rank.
            num_ranks: with consecutive experts on each; or
            placement: JSON, as balance() makes it.
            num_hosts: of equally many ranks.
            costs: JSON of `fusedmoe bench --calibrate`; None: rank_costs().
            to_each_expert: a row goes to each expert, as other libraries' batched formats have it,
                not once to each rank.

        Raises:
            NotImplementedError: where nothing fits the configuration.
        """
        if (num_ranks is None) == (placement is None):
            raise invalid("placement", "simulate() takes either num_ranks or placement")
        if placement is None:
            placement = linear_placement(self._handle.num_experts(), num_ranks or 0)
        numbers = self._handle.simulate(
            None if topk_ids is None else array(topk_ids),
            tokens_per_rank,
            placement,
            num_hosts,
            rank_costs() if costs is None else costs,
            to_each_expert,
        )
        return SimulatedStep(*numbers)

    def __str__(self) -> str:
        return self._handle.table()

    __repr__ = __str__  # a notebook and the prompt show the table


@takes(ExplainConfig)
def explain(
    checkpoint: Union[Checkpoint, Path, None] = None,
    layer: Optional[int] = None,
    **config: Unpack[ExplainConfig],
) -> Selection:
    """What would run a layer of the checkpoint, or of the configuration. Needs no GPU.

    Succeeds too where nothing fits, but with `require`.

    Args:
        checkpoint: with it, config is dtype, device, compute_capability (90 is Hopper, which need
            not be here) and require.
        layer: of the checkpoint; without it all layers must have one scheme.
        **config: without a checkpoint also num_experts, num_local_experts, topk, hidden,
            intermediate, scheme, activation and its parameters (alpha, beta, limit, situ_beta,
            situ_linear_beta), has_bias, has_expert_map, apply_router_weight_on_input,
            batch_invariant, monolithic.

    Raises:
        ValueError: without a layer, for layers of several schemes, which it names.
        NotImplementedError: where `require` does not fit.
        TypeError: for other names.
    """
    if checkpoint is None:
        if layer is not None:
            raise invalid("layer", "layer cannot be used without a checkpoint")
        return Selection(_core.explain(checked(config, names(ExplainConfig), "setting")))
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    settings = checked(config, names(DeviceConfig), "setting with a checkpoint")
    return Selection(_core.explain_checkpoint(opened._handle, layer, settings))
