"""What a layer is made of, as the extension reads it: known names, and arrays that it can import."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Mapping, Optional

from ._arrays import array, checked, given
from .options import ExpertSettings, LayerOptions, SharedExperts, names
from .ranks import Communicator

_OPTIONS, _EXPERTS, _SHARED = names(LayerOptions), names(ExpertSettings), names(SharedExperts)


def of_layer(options: LayerOptions) -> Dict[str, Any]:
    """The options of a layer; others raise TypeError."""
    known = dict(checked(options, _OPTIONS, "option"))
    if known.get("packed_weights") is not None:
        known["packed_weights"] = os.fspath(known["packed_weights"])
    communicator = known.get("communicator")
    if communicator is not None:
        if not isinstance(communicator, Communicator):
            found = type(communicator).__name__
            raise TypeError(f"communicator: was a {found}; must be a fusedmoe.Communicator")
        known["communicator"] = communicator._handle
    return known


def of_experts(weights: Optional[ExpertSettings]) -> Dict[str, Any]:
    """What belongs to w13 and w2; other names raise TypeError."""
    return _arrays(checked(weights or {}, _EXPERTS, "name in weights"))


def of_shared(shared: Optional[SharedExperts]) -> Dict[str, Any]:
    """The same of shared experts, with their w13, w2 and gate."""
    return _arrays(checked(shared or {}, _SHARED, "name in shared"))


def of_router(router: Mapping[str, Any]) -> Dict[str, Any]:
    """Those that are given."""
    return _arrays(given(router))


def source_of_lost(
    lost: Optional[Callable[[int], Mapping[str, Any]]],
) -> Optional[Callable[[int], Dict[str, Any]]]:
    """What rebind() asks for the settings of one expert, with its w13 and w2."""
    if lost is None:
        return None
    known, ask = _EXPERTS | {"w13", "w2"}, lost
    return lambda expert: _arrays(checked(ask(expert), known, "name in lost()"))


def _arrays(settings: Mapping[str, Any]) -> Dict[str, Any]:
    plain = (str, int, float, bool)
    return {
        key: value if isinstance(value, plain) else array(value)
        for key, value in settings.items()
    }
