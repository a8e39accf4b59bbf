"""Experts that move between ranks, and ranks that go on without one that has failed."""

import numpy as np
import pytest
from conftest import golden_dir
from rank_layers import EXPERTS, RANKS, TOKENS, layer, run_threads, tensors

import fusedmoe


def test_experts_move_and_a_survivor_goes_on():
    w13, w2, _, x = tensors()
    expected = layer()(x)
    communicators = fusedmoe.Communicator.threads(RANKS, timeout=60)
    over = fusedmoe.Communicator.threads(RANKS, timeout=60)
    (alone,) = fusedmoe.Communicator.threads(1)

    def run(rank):
        made = layer(
            communicator=communicators[rank], max_tokens_per_rank=TOKENS, combine="per_slot"
        )
        window = fusedmoe.LoadWindow(1, EXPERTS, 2)
        load = np.zeros(EXPERTS, np.int32)
        for _ in range(3):
            assert np.array_equal(made(x, expert_load=load), expected)
            window.add(0, load)
        assert window.loads() == [(2 * load).tolist()]
        loads = window.loads(communicators[rank])
        assert loads == [(4 * load).tolist()]
        (balanced,) = fusedmoe.balance(loads, RANKS, placements=[made.placement])
        made.start_move(balanced.placement)
        assert np.array_equal(made(x), expected)
        made.commit_move()
        assert made.placement == balanced.placement
        made.start_move(fusedmoe.round_robin_placement(EXPERTS, RANKS), over[rank])
        made.commit_move()
        assert np.array_equal(made(x), expected)
        with pytest.raises(ValueError, match="nothing to commit"):
            made.commit_move()
        if rank == 1:
            communicators[1].abort("gone")
            return
        placement = fusedmoe.linear_placement(EXPERTS, 1)
        with pytest.raises(RuntimeError, match="expert 1, which none of these ranks has"):
            made.rebind(alone, placement)
        asked = []

        def lost(expert):
            asked.append(expert)
            return {"w13": w13[expert : expert + 1], "w2": w2[expert : expert + 1]}

        made.rebind(alone, placement, lost=lost)
        assert asked == [1, 3] and made.info["num_local_experts"] == EXPERTS
        assert np.array_equal(made(x), expected)

    assert run_threads(run) == [None, None]


def test_a_survivor_reads_lost_experts_of_a_checkpoint():
    checkpoint = fusedmoe.Checkpoint(golden_dir() / "mixtral.safetensors")
    index = checkpoint.moe_layers[0]
    expected_of = fusedmoe.MoELayer.from_checkpoint(checkpoint, index, dtype="f32")
    communicators = fusedmoe.Communicator.threads(RANKS, timeout=60)
    (alone,) = fusedmoe.Communicator.threads(1)
    x = np.random.default_rng(3).standard_normal((TOKENS, checkpoint.info["hidden"]))
    x = x.astype(np.float32)

    def run(rank):
        made = fusedmoe.MoELayer.from_checkpoint(
            checkpoint,
            index,
            dtype="f32",
            communicator=communicators[rank],
            max_tokens_per_rank=TOKENS,
            combine="per_slot",
        )
        if rank == 0:
            return
        placement = fusedmoe.linear_placement(checkpoint.info["num_experts"], 1)
        with pytest.raises(ValueError, match="lost cannot be used with checkpoint"):
            made.rebind(alone, placement, checkpoint=checkpoint, lost=dict)
        made.rebind(alone, placement, checkpoint=checkpoint, layer=index)
        assert np.array_equal(made(x), expected_of(x))

    assert run_threads(run) == [None, None]
