"""Llama 4 in transformers' experts interface.

Its block computes every expert for every token and has no such interface; this adds it.
"""

from __future__ import annotations

from typing import Any, Set, Tuple

import torch
from transformers import PreTrainedModel
from transformers.models.llama4 import modeling_llama4 as llama4

from ._experts import FusedExperts, experts_forward

_names: Set[str] = set()  # implementations that stand for fusedmoe
_published_forward = llama4.Llama4TextMoe.forward


def register_llama4(name: str) -> None:
    """Lets model.set_experts_implementation(name) choose fusedmoe in Llama 4."""
    _names.add(name)
    llama4.Llama4TextMoe.forward = _forward
    llama4.Llama4PreTrainedModel.set_experts_implementation = _set_experts_implementation
    # transformers looks for its decorator in the source of the model, and keeps the answer here.
    llama4.Llama4PreTrainedModel._can_set_experts_implementation_cached_value = True


def _set_experts_implementation(self: Any, implementation: Any) -> None:
    PreTrainedModel.set_experts_implementation(self, implementation)
    for module in self.modules():
        if isinstance(module, llama4.Llama4TextExperts):
            module.config = self.config.get_text_config()


def _forward(self: Any, hidden_states: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    config = getattr(self.experts, "config", None)
    chosen = getattr(config, "_experts_implementation", None) in _names
    if not chosen and not isinstance(self.experts, FusedExperts):
        published: Tuple[torch.Tensor, torch.Tensor] = _published_forward(self, hidden_states)
        return published
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(hidden_states)  # scores: 0 for experts that are not chosen
    weights, ids = torch.topk(scores, self.top_k, dim=1)
    output = self.shared_expert(hidden_states)
    output.add_(experts_forward(self.experts, hidden_states, ids, weights))
    return output, logits
