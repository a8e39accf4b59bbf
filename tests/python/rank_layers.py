"""A small layer on ranks, for tests."""

import threading

import numpy as np

import fusedmoe

RANKS, TOKENS, HIDDEN, EXPERTS = 2, 6, 32, 4


def tensors():
    random = np.random.default_rng(1)
    w13 = random.standard_normal((EXPERTS, 32, HIDDEN)).astype(np.float32)
    w2 = random.standard_normal((EXPERTS, HIDDEN, 16)).astype(np.float32)
    gate = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
    x = random.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    return w13, w2, gate, x


def layer(**options):
    w13, w2, gate, _ = tensors()
    return fusedmoe.MoELayer.from_tensors(
        w13, w2, topk=2, router_weight=gate, dtype="f32", **options
    )


def part_of(rank):
    """Rank 0 has two thirds of the tokens."""
    return slice(0, 4) if rank == 0 else slice(4, TOKENS)


def forward(communicator, **options):
    made = layer(
        communicator=communicator,
        max_tokens_per_rank=TOKENS,
        combine="per_slot",
        num_threads=1,
        **options,
    )
    x = tensors()[3][part_of(communicator.rank)]
    return made(x, max_tokens=4)


def run_threads(function):
    results = [None] * RANKS

    def run(rank):
        try:
            results[rank] = function(rank)
        except Exception as error:  # seen by the caller
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
