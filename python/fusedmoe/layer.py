"""Layers: router, shared experts and experts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Union, cast

from . import _core, _settings
from ._arrays import Array, Path, array, invalid, output_like, scratch_of, stream_of
from .checkpoint import Checkpoint
from .options import ExpertSettings, LayerInfo, LayerOptions, SharedExperts, takes
from .ranks import Communicator
from .step import Step

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MoELayer:
    """One Mixture-of-Experts layer. Several threads may call it at once; only repack(),
    start_move(), commit_move() and rebind() change it, and none may call it meanwhile.

    Made by from_checkpoint() or from_tensors(). Scratch memory is kept from call to call.
    """

    def __init__(self, handle: _core.Layer) -> None:
        self._handle = handle
        self.info = cast(LayerInfo, handle.info())
        """num_experts, num_zero_experts, topk, hidden, intermediate, dtype, scheme, device, ..."""
        same = self.info["output_dtype"] == self.info["dtype"]
        self._output_dtype: Optional[str] = None if same else self.info["output_dtype"]

    @classmethod
    @takes(LayerOptions)
    def from_checkpoint(
        cls,
        checkpoint: Union[Checkpoint, Path],
        layer: Optional[int] = None,
        *,
        experts_only: bool = False,
        **options: Unpack[LayerOptions],
    ) -> "MoELayer":
        """A layer of a checkpoint, packed from the file.

        Args:
            checkpoint: an open one, or its folder or file.
            layer: its number; default: the first with experts.
            experts_only: without router and shared experts; only forward_routed() works.
            **options: see LayerOptions.

        Raises:
            OSError: for a file at fault.
            NotImplementedError: where no implementation fits.
            RuntimeError: with a communicator of several ranks, on all of them; it names the rank.
        """

        def prepare() -> _core.PreparedLayer:
            opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
            settings = {**_settings.of_layer(options), "experts_only": experts_only}
            return _core.load_layer(opened._handle, layer, settings)

        return cls._make(options.get("communicator"), prepare)

    @classmethod
    @takes(LayerOptions)
    def from_tensors(
        cls,
        w13: Array,
        w2: Array,
        *,
        topk: int,
        num_experts: Optional[int] = None,
        router_weight: Optional[Array] = None,
        router_bias: Optional[Array] = None,
        e_score_correction_bias: Optional[Array] = None,
        scoring_func: Optional[str] = None,
        renormalize: bool = False,
        renormalize_epsilon: Optional[float] = None,
        num_expert_group: Optional[int] = None,
        topk_group: Optional[int] = None,
        routed_scaling_factor: Optional[float] = None,
        apply_router_weight_on_input: bool = False,
        num_zero_experts: int = 0,
        sparsemixer_jitter: Optional[float] = None,
        latent_down: Optional[Array] = None,
        latent_up: Optional[Array] = None,
        expert_map: Optional[Array] = None,
        intermediate: Optional[int] = None,
        shared: Optional[SharedExperts] = None,
        weights: Optional[ExpertSettings] = None,
        **options: Unpack[LayerOptions],
    ) -> "MoELayer":
        """A layer from the caller's tensors, which are not needed afterwards.

        Args:
            w13: (E, 2 * intermediate, hidden).
            w2: (E, hidden, intermediate).
            topk: experts of a token.
            num_experts: of all ranks; default: E.
            router_weight: (num_experts, hidden); without it only forward_routed() works.
            router_bias: (num_experts).
            e_score_correction_bias: (num_experts) float32.
            scoring_func: see route().
            renormalize: see route().
            renormalize_epsilon: see route().
            num_expert_group: see route().
            topk_group: see route().
            routed_scaling_factor: see route().
            apply_router_weight_on_input: see fused_experts().
            num_zero_experts: experts that return their input; the router's tensors have rows for
                them, behind those of the others.
            sparsemixer_jitter: see route().
            latent_down: (latent, hidden), before the routed experts, whose tensors then have
                `latent` where others have hidden.
            latent_up: (hidden, latent), behind them.
            expert_map: (num_experts) int32, global -> local expert or -1.
            intermediate: of the whole layer; must be given with tp_size > 1, where w13 and w2 are
                whole or this rank's slice, and the bias of w2 counts on tp_rank 0 alone.
            shared: of shared experts, {"w13": (1, ...), "w2": ..., "gate": (1, hidden), ...}.
            weights: what belongs to w13 and w2, with the names of fused_experts():
                {"scheme": ..., "w1_scale": ..., ...}.
            **options: see LayerOptions.

        Raises:
            ValueError: for tensors that do not fit each other.
            TypeError: for unknown names.
        """
        router = {
            "topk": topk,
            "num_experts": num_experts,
            "router_weight": router_weight,
            "router_bias": router_bias,
            "e_score_correction_bias": e_score_correction_bias,
            "scoring_func": scoring_func,
            "renormalize": renormalize,
            "renormalize_epsilon": renormalize_epsilon,
            "num_expert_group": num_expert_group,
            "topk_group": topk_group,
            "routed_scaling_factor": routed_scaling_factor,
            "apply_router_weight_on_input": apply_router_weight_on_input,
            "num_zero_experts": num_zero_experts,
            "sparsemixer_jitter": sparsemixer_jitter,
            "latent_down": latent_down,
            "latent_up": latent_up,
            "expert_map": expert_map,
            "intermediate": intermediate,
        }

        def prepare() -> _core.PreparedLayer:
            settings = {
                **_settings.of_layer(options),
                **_settings.of_router(router),
                **_settings.of_experts(weights),
            }
            shared_experts = _settings.of_shared(shared)
            return _core.create_layer(array(w13), array(w2), settings, shared_experts)

        return cls._make(options.get("communicator"), prepare)

    @classmethod
    def _make(cls, communicator: Any, prepare: Callable[[], _core.PreparedLayer]) -> "MoELayer":
        """What fails in prepare() on one rank is an error of all."""
        ranks = isinstance(communicator, Communicator)
        return cls((communicator.together(prepare) if ranks else prepare()).make())

    def __call__(
        self,
        hidden_states: Array,
        *,
        out: Optional[Array] = None,
        topk_weights: Optional[Array] = None,
        topk_ids: Optional[Array] = None,
        router_logits: Optional[Array] = None,
        expert_load: Optional[Array] = None,
        accumulate: bool = False,
        stream: Optional[int] = None,
        workspace: Optional[Array] = None,
        max_tokens: int = 0,
        dropped_rows: Optional[Array] = None,
        fixed_sizes: bool = False,
        expert_map: Optional[Array] = None,
        lane: int = 0,
    ) -> Array:
        """The layer's output, (num_tokens, hidden), of the kind of hidden_states.

        On CUDA the call only enqueues. Arrays for what the router found are filled where they are
        given; columns and elements of zero experts come last.

        Args:
            hidden_states: (num_tokens, hidden) of the layer's dtype, on its device.
            out: array to write to.
            topk_weights: (num_tokens, topk) float32, filled.
            topk_ids: (num_tokens, topk) int32, filled.
            router_logits: (num_tokens, num_experts) float32, filled.
            expert_load: (num_experts) int32, filled.
            accumulate: add to out.
            stream: as for fused_experts().
            workspace: scratch memory, workspace_bytes(num_tokens) of uint8, 64-byte aligned;
                default: of PyTorch's allocator for its CUDA tensors, else the layer's own.
            max_tokens: with a communicator, the most tokens of any rank in this call, the same on
                all; default: max_tokens_per_rank.
            dropped_rows: (1) int32, filled with how many rows of these tokens found no room on the
                ranks that they went to; see the option drop_rows.
            fixed_sizes: send max_tokens rows to each rank and count nothing, the same on all ranks;
                a call that a CUDA graph records does so in any case.
            expert_map: (num_experts) int32, in place of the layer's in this call; see repack().
                Only of a layer that was made with one and without a communicator.
            lane: below the option lanes, the same on all ranks. Calls of one lane follow each other;
                those of several may be in flight at the same time, each on a stream and in a
                workspace of its own.

        Raises:
            ValueError: names the argument at fault.
        """
        out, *options = self._call(
            hidden_states, out, accumulate, stream, workspace, max_tokens, dropped_rows,
            fixed_sizes, expert_load, expert_map, lane,
        )  # fmt: skip
        self._handle.forward(
            array(hidden_states),
            array(topk_weights),
            array(topk_ids),
            array(router_logits),
            *options,
        )
        return out

    def forward_routed(
        self,
        hidden_states: Array,
        topk_weights: Array,
        topk_ids: Array,
        *,
        out: Optional[Array] = None,
        accumulate: bool = False,
        stream: Optional[int] = None,
        workspace: Optional[Array] = None,
        max_tokens: int = 0,
        dropped_rows: Optional[Array] = None,
        fixed_sizes: bool = False,
        expert_load: Optional[Array] = None,
        expert_map: Optional[Array] = None,
        lane: int = 0,
    ) -> Array:
        """The same with the caller's routing. The other arguments are as in a call of the layer.

        Args:
            hidden_states: (num_tokens, hidden) of the layer's dtype, on its device.
            topk_weights: (num_tokens, topk) float32.
            topk_ids: (num_tokens, topk) int32; global ids, -1 selects nothing.

        Raises:
            ValueError: for other ids (on CUDA they select nothing).
        """
        out, *options = self._call(
            hidden_states, out, accumulate, stream, workspace, max_tokens, dropped_rows,
            fixed_sizes, expert_load, expert_map, lane,
        )  # fmt: skip
        self._handle.forward_routed(
            array(hidden_states),
            array(topk_weights),
            array(topk_ids),
            *options,
        )
        return out

    def begin(
        self,
        hidden_states: Array,
        topk_weights: Optional[Array] = None,
        topk_ids: Optional[Array] = None,
        *,
        out: Optional[Array] = None,
        accumulate: bool = False,
        stream: Optional[int] = None,
        workspace: Optional[Array] = None,
        max_tokens: int = 0,
        dropped_rows: Optional[Array] = None,
        fixed_sizes: bool = False,
        expert_load: Optional[Array] = None,
        expert_map: Optional[Array] = None,
        lane: int = 0,
    ) -> Step:
        """Starts a call: routes, or takes the caller's routing, and sends rows. Its compute() runs
        the experts, its finish() returns the output; between them there is time for other work.
        All ranks take the parts of their steps in one order. A step that is deleted before
        finish() ends the communicator. The arguments are as in a call of the layer.
        """
        out, *options = self._call(
            hidden_states, out, accumulate, stream, workspace, max_tokens, dropped_rows,
            fixed_sizes, expert_load, expert_map, lane,
        )  # fmt: skip
        step = self._handle.begin(
            array(hidden_states),
            array(topk_weights),
            array(topk_ids),
            *options,
        )
        return Step(step, out)

    def _call(
        self,
        hidden_states: Array,
        out: Optional[Array],
        accumulate: bool,
        stream: Optional[int],
        workspace: Optional[Array],
        max_tokens: int,
        dropped_rows: Optional[Array],
        fixed_sizes: bool,
        expert_load: Optional[Array],
        expert_map: Optional[Array],
        lane: int,
    ) -> List[Any]:
        """The output, a new one if `out` is None; then what the extension takes last in each call."""
        if out is None:
            out = output_like(hidden_states, self._output_dtype)
        return [
            out,
            array(out),
            accumulate,
            stream_of(hidden_states, stream),
            scratch_of(hidden_states, stream) if workspace is None else lambda nbytes: workspace,
            max_tokens,
            array(dropped_rows),
            fixed_sizes,
            array(expert_load),
            array(expert_map),
            lane,
        ]

    @property
    def placement(self) -> Optional[str]:
        """Which rank has which experts, as JSON; None unless ranks share them."""
        return self._handle.placement()

    def start_move(self, placement: str, over: Optional[Communicator] = None) -> None:
        """Brings the experts that arrive here to where `placement` wants them; calls go on as
        before until commit_move(). All ranks call it, between two calls of the layer.

        Args:
            placement: JSON, as balance() makes it; each rank keeps its number of experts.
            over: another communicator of the same ranks, which nobody else uses meanwhile. Then a
                thread of its own may call this while others call the layer.

        Raises:
            RuntimeError: on all ranks, of which nothing has changed.
        """
        self._handle.start_move(placement, None if over is None else over._handle)

    def commit_move(self) -> None:
        """From now on experts are where start_move() wanted them. It is not collective, so all ranks
        call it between the same two calls of the layer; in the next one a rank that did not is an
        error that names it.
        """
        self._handle.commit_move()

    def rebind(
        self,
        communicator: Communicator,
        placement: str,
        *,
        checkpoint: Union[Checkpoint, Path, None] = None,
        layer: int = 0,
        lost: Optional[Callable[[int], Dict[str, Any]]] = None,
    ) -> None:
        """After a rank has failed: goes on with the ranks that are left, which all call it.

        Args:
            communicator: a new one, of those ranks.
            placement: JSON, of all experts on them, any number on each.
            checkpoint: where experts that no rank has any more come from.
            layer: of the checkpoint.
            lost: instead of a checkpoint, returns the weights of an expert alone: {"w13": (1, ...),
                "w2": (1, ...), "scheme": ..., "w1_scale": ..., ...}, as from_tensors() has them.

        Raises:
            RuntimeError: on all ranks, if an expert is nowhere, for one; the layer is as before.
        """
        if checkpoint is not None and lost is not None:
            raise invalid("lost", "lost cannot be used with checkpoint")
        if checkpoint is None or isinstance(checkpoint, Checkpoint):
            opened = checkpoint
        else:
            opened = Checkpoint(checkpoint)
        self._handle.rebind(
            communicator._handle,
            placement,
            None if opened is None else opened._handle,
            layer,
            _settings.source_of_lost(lost),
        )
        self.info = cast(LayerInfo, self._handle.info())

    def workspace_bytes(self, num_tokens: int, fixed_sizes: bool = False) -> int:
        """Scratch memory that a call with so many tokens needs; across ranks max_tokens."""
        return self._handle.workspace_bytes(num_tokens, fixed_sizes)

    def shared_bytes(self, num_tokens: int) -> int:
        """Memory that a call takes beside its workspace, where ranks are processes of one host that
        share memory; else 0.

        Args:
            num_tokens: of the rank with the most.
        """
        return self._handle.shared_bytes(num_tokens)

    @property
    def plan_line(self) -> str:
        """What runs, as "cpu+no_ep mxfp4_w4a16 bf16 isa=avx512_bf16 threads=2"."""
        return self._handle.plan_line()

    def save_packed(self, path: Path) -> None:
        """Keeps the packed routed experts in a file, for the option `packed_weights`.

        Raises:
            OSError: where it cannot be written.
        """
        self._handle.save_packed(os.fspath(path))

    def repack(
        self, expert: int, w13: Array, w2: Array, weights: Optional[ExpertSettings] = None
    ) -> None:
        """Replaces a routed expert in place: new values in training, or another expert in a cache,
        of which the argument `expert_map` of a call then says where it lies. No call may run
        meanwhile.

        Args:
            expert: its place, 0 to num_local_experts - 1.
            w13: (1, 2 * intermediate, hidden).
            w2: (1, hidden, intermediate).
            weights: see from_tensors().

        Raises:
            ValueError: for tensors that do not fit, and where the layer's weights lie in a mapped
                file (option packed_read).
            NotImplementedError: where the implementation cannot.
        """
        self._handle.repack(expert, array(w13), array(w2), _settings.of_experts(weights))

    @property
    def plan_json(self) -> str:
        """The same as JSON that the option `plan` takes."""
        return self._handle.plan_json()

    @property
    def table(self) -> str:
        """Every implementation, and why it was not chosen."""
        return self._handle.table()

    def __repr__(self) -> str:
        return f"fusedmoe.MoELayer({self.plan_line})"

    def __deepcopy__(self, memo: Dict[int, Any]) -> "MoELayer":
        return self  # weights of a layer are shared, not copied
