"""Experts of Hugging Face transformers 5 by fusedmoe.

Any model in memory:

    fusedmoe.integrations.transformers.register()
    model.set_experts_implementation("fusedmoe")

The experts of a layer are packed at its first forward, from where they are: the model keeps its own
copy. Packing happens again after weights were replaced, moved or changed in place; only writes that
PyTorch does not count, as to `parameter.data`, need forget(model).

A checkpoint, whose experts go from the file into the packed form and keep their scheme:

    model = fusedmoe.integrations.transformers.from_pretrained("gpt-oss-20b/")

A layer that cannot be served raises NotImplementedError that says why; nothing else runs instead.
For inference: there is no backward. torch.compile keeps the experts in its graph.
"""

from __future__ import annotations

from transformers.integrations import moe

from ._experts import FusedExperts, experts_forward, forget
from ._llama4 import register_llama4
from ._pretrained import from_pretrained

__all__ = ["FusedExperts", "experts_forward", "forget", "from_pretrained", "register"]


def register(name: str = "fusedmoe") -> None:
    """Adds the implementation to transformers' experts interface, for Llama 4 too."""
    moe.ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    register_llama4(name)
