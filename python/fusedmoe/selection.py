"""What would run, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Optional, Union

from . import _core
from ._arrays import Path, checked, invalid
from .checkpoint import Checkpoint
from .options import DeviceConfig, ExplainConfig, names, takes

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
