"""Fused Mixture-of-Experts layers on the CPU and on NVIDIA GPUs.

Arrays may be of NumPy, PyTorch, CuPy, JAX or anything else with DLPack; none of them is needed, and
nothing is copied. A bad call raises ValueError, what nothing here can serve NotImplementedError,
missing memory MemoryError, a bad file OSError, and a failing GPU RuntimeError; each names what is
wrong, and `error.argument` is the argument's name.

The logger "fusedmoe" of Python's logging hears what was chosen, and why: of each kernel that is
made one message of level INFO, once for those alike.
"""

from . import machine as _machine
from ._arrays import as_tensor, empty, load_file
from ._core import PackCache, Tensor
from ._core import set_log as _set_log
from ._core import version as __version__
from .checkpoint import Checkpoint
from .experts import clear_cache, fused_experts
from .layer import MoELayer
from .machine import cpu_isa, cuda_device_count, device_problem, num_threads, set_num_threads
from .options import (
    CheckpointInfo,
    DeviceConfig,
    ExpertSettings,
    ExplainConfig,
    LayerInfo,
    LayerOptions,
    SharedExperts,
)
from .placement import (
    BalancedLayer,
    LoadWindow,
    balance,
    linear_placement,
    round_robin_placement,
)
from .quant import (
    QuantizedMatrix,
    dequantize_weights,
    quantize_activations,
    quantize_checkpoint,
    quantize_weights,
    schemes,
)
from .ranks import Communicator
from .router import route, router_logits
from .selection import Candidate, Selection, SimulatedStep, explain, rank_costs

__all__ = [
    "BalancedLayer",
    "Candidate",
    "Checkpoint",
    "CheckpointInfo",
    "Communicator",
    "DeviceConfig",
    "ExpertSettings",
    "ExplainConfig",
    "LayerInfo",
    "LayerOptions",
    "LoadWindow",
    "MoELayer",
    "PackCache",
    "QuantizedMatrix",
    "Selection",
    "SharedExperts",
    "SimulatedStep",
    "Tensor",
    "__version__",
    "as_tensor",
    "balance",
    "clear_cache",
    "cpu_isa",
    "cuda_device_count",
    "dequantize_weights",
    "device_problem",
    "empty",
    "explain",
    "fused_experts",
    "linear_placement",
    "load_file",
    "num_threads",
    "quantize_activations",
    "quantize_checkpoint",
    "quantize_weights",
    "rank_costs",
    "round_robin_placement",
    "route",
    "router_logits",
    "schemes",
    "set_num_threads",
    "version_info",
]

version_info = tuple(map(int, __version__.split(".")))
"""The version as numbers, to compare with."""

_set_log(_machine.log)
