"""What **options, settings and infos hold: names and types, for type checkers and help().

Annotations are types here, not texts that takes() would have to read at each import.
"""

import inspect
from typing import Any, Callable, FrozenSet, List, Optional, TypedDict, TypeVar

from ._arrays import Array, DeviceLike, DTypeLike, Path
from .ranks import Communicator


class LayerOptions(TypedDict, total=False):
    """Options of a layer. None, or not given: the default.

    Attributes:
        device: "cpu" (default) or "cuda:0", or a device of PyTorch.
        dtype: of hidden states, "bf16" (default), "f32" or "f16", or a dtype of PyTorch or NumPy.
        output_dtype: dtype (default) or "f32".
        require: an implementation by name, or an error.
        plan: `plan_json` of another layer, exactly that or an error.
        batch_invariant: rows do not depend on their batch.
        inplace: the output may be the input.
        monolithic: the experts route by themselves.
        tp_size: of the ranks that share the layer. Without a communicator each output is
            one rank's part: add those of all ranks; shared experts are those of rank 0.
        tp_rank: this rank's place among them.
        ep_size: ranks that share the experts.
        ep_rank: this rank's place among them.
        dp_size: groups of ranks with tokens of their own.
        sequence_parallel: the ranks of a group each have a part of its tokens.
        num_threads: of the CPU.
        max_workspace_bytes: longer inputs run in chunks.
        packed_weights: a file of save_packed(), whose routed experts are used instead of
            packing those given.
        packed_read: read it into memory instead of mapping it.
        packed_verify: compare the checksum of its contents, which reads all of them
            (default).
        communicator: of the ranks; making the layer is then collective. Without
            the sizes above all its ranks share the experts and have tokens of their own. Only
            what this rank holds is read. The options below need one, but for placement.
        max_tokens_per_rank: the most that any gives to a call.
        placement: JSON, as linear_placement() returns it.
        nearest_replica: take that of a token's experts.
        combine: "per_rank" or "per_slot". Default: "per_slot" with batch_invariant, and on GPUs
            that read each other's memory where that is predicted to be faster; else "per_rank".
        combine_dtype: of rows per rank.
        dispatch_dtype: of rows on their way to other ranks: dtype, or that of the
            activations, "e4m3", "i8" or "e2m1". Default: as the experts read rows, and
            between GPUs of one host quantized where that is predicted to be faster.
        receive_capacity: the most rows that this rank takes in a call.
        drop_rows: drop those that do not fit, instead of an error.
        lanes: so many calls may be in flight at the same time, on GPUs that read each other's
            memory.
    """

    device: Optional[DeviceLike]
    dtype: Optional[DTypeLike]
    output_dtype: Optional[DTypeLike]
    require: Optional[str]
    plan: Optional[str]
    batch_invariant: Optional[bool]
    inplace: Optional[bool]
    monolithic: Optional[bool]
    tp_size: Optional[int]
    tp_rank: Optional[int]
    ep_size: Optional[int]
    ep_rank: Optional[int]
    dp_size: Optional[int]
    sequence_parallel: Optional[bool]
    num_threads: Optional[int]
    max_workspace_bytes: Optional[int]
    packed_weights: Optional[Path]
    packed_read: Optional[bool]
    packed_verify: Optional[bool]
    communicator: Optional[Communicator]
    max_tokens_per_rank: Optional[int]
    placement: Optional[str]
    nearest_replica: Optional[bool]
    combine: Optional[str]
    combine_dtype: Optional[DTypeLike]
    dispatch_dtype: Optional[DTypeLike]
    receive_capacity: Optional[int]
    drop_rows: Optional[bool]
    lanes: Optional[int]


class ActivationSettings(TypedDict, total=False):
    """The scheme of experts and their activation; fused_experts() says what they mean."""

    scheme: Optional[str]
    activation: Optional[str]
    alpha: Optional[float]
    beta: Optional[float]
    limit: Optional[float]
    situ_beta: Optional[float]
    situ_linear_beta: Optional[float]


class ExpertSettings(ActivationSettings, total=False):
    """What belongs to w13 and w2; fused_experts() says what they mean. None: the default."""

    gate_up_layout: Optional[str]
    transposed: Optional[bool]
    scale_layout: Optional[str]
    w1_scale: Optional[Array]
    w1_zp: Optional[Array]
    w1_global_scale: Optional[Array]
    a1_scale: Optional[Array]
    w1_bias: Optional[Array]
    w2_scale: Optional[Array]
    w2_zp: Optional[Array]
    w2_global_scale: Optional[Array]
    a2_scale: Optional[Array]
    w2_bias: Optional[Array]


class SharedExperts(ExpertSettings, total=False):
    """Shared experts, as one expert that every token uses."""

    w13: Array
    w2: Array
    gate: Optional[Array]


class DeviceConfig(TypedDict, total=False):
    """Where a layer of a checkpoint would run; explain() says what they mean."""

    dtype: Optional[DTypeLike]
    device: Optional[DeviceLike]
    compute_capability: Optional[int]
    require: Optional[str]


class ExplainConfig(DeviceConfig, ActivationSettings, total=False):
    """A configuration without a checkpoint."""

    num_experts: Optional[int]
    num_local_experts: Optional[int]
    topk: Optional[int]
    hidden: Optional[int]
    intermediate: Optional[int]
    has_bias: Optional[bool]
    has_expert_map: Optional[bool]
    apply_router_weight_on_input: Optional[bool]
    batch_invariant: Optional[bool]
    monolithic: Optional[bool]


class LayerInfo(TypedDict):
    """What a layer is."""

    num_experts: int
    num_local_experts: int
    num_zero_experts: int
    topk: int
    hidden: int
    intermediate: int
    dtype: str
    output_dtype: str
    scheme: str
    device: str
    packed_bytes: int


class CheckpointInfo(TypedDict):
    """What a checkpoint is; `scheme` is that of the first layer with experts."""

    family: str
    scheme: str
    layout: str
    activation: str
    num_layers: int
    num_experts: int
    topk: int
    hidden: int
    intermediate: int
    shared_intermediate: int


def _keywords(options: Any) -> List[inspect.Parameter]:
    """The keys of one of the classes above as parameters."""
    absent = {name: inspect.Parameter.empty for name in options.__required_keys__}
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=absent.get(name), annotation=hint
        )
        for name, hint in options.__annotations__.items()
    ]


for _kind in (
    LayerOptions, ExpertSettings, SharedExperts, DeviceConfig, ExplainConfig, LayerInfo, CheckpointInfo,
):  # fmt: skip
    setattr(_kind, "__signature__", inspect.Signature(_keywords(_kind)))


def names(options: Any) -> FrozenSet[str]:
    """The keys of one of the classes above."""
    return frozenset(options.__annotations__)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes(options: Any) -> Callable[[_Function], _Function]:
    """Says in the signature of a function which **options it takes, for help() and inspect."""

    def spell_out(function: _Function) -> _Function:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        named += _keywords(options)
        setattr(function, "__signature__", signature.replace(parameters=named))
        return function

    return spell_out
