"""Writes tests/data/eplb-maps.txt: digests of the maps that DeepSeek's EPLB gives for random loads.

    python eplb_maps.py FOLDER_OF_EPLB_PY > ../data/eplb-maps.txt

github.com/deepseek-ai/EPLB, with torch. A line for each 100 tables of loads of one shape: experts,
copies, ranks, hosts and groups, the digest of the maps, and in hexadecimal which tables are not in
it: there EPLB puts two copies of an expert on one rank, which balance() never does.
tests/unit/eplb_test.cpp draws the same loads. No two are equal for any numbers of copies, as each is
840 times a prime, and sums are exact in EPLB's float32: so ties and roundings decide nothing.
"""

import sys

import torch

sys.path.insert(0, sys.argv[1])
import eplb  # noqa: E402

SHAPES = [
    (16, 8, 8, 1, 1), (48, 0, 8, 2, 6), (60, 4, 8, 1, 1), (64, 0, 8, 1, 1), (64, 8, 8, 1, 1),
    (96, 0, 12, 3, 6), (128, 16, 16, 2, 16), (256, 0, 64, 8, 8), (256, 32, 32, 1, 1),
    (256, 32, 32, 4, 8),
]  # fmt: skip
LINES, TABLES, MASK = 13, 100, 2**64 - 1
PRIMES = [n for n in range(11, 2048) if all(n % d for d in range(2, int(n**0.5) + 1))]
state = 1


def below(limit):
    global state
    state = (state * 6364136223846793005 + 1442695040888963407) & MASK
    return (state >> 33) % limit


def draw(experts):
    free, loads = [True] * len(PRIMES), []
    for _ in range(experts):
        i = below(len(PRIMES))
        i = i * i // len(PRIMES)  # more small ones
        while not free[i]:
            i = (i + 1) % len(PRIMES)
        free[i] = False
        loads.append(840 * PRIMES[i])
    return loads


for shape in SHAPES:
    experts, copies, ranks, hosts, groups = shape
    for _ in range(LINES):
        loads = torch.tensor([draw(experts) for _ in range(TABLES)])
        maps = eplb.rebalance_experts(loads, experts + copies, groups, hosts, ranks)[0].tolist()
        digest, left_out, places = 0xCBF29CE484222325, 0, (experts + copies) // ranks
        for table, of_table in enumerate(maps):
            held = [of_table[p : p + places] for p in range(0, len(of_table), places)]
            if any(len(set(rank)) < places for rank in held):
                left_out |= 1 << table
                continue
            for expert in of_table:
                digest = ((digest ^ expert) * 0x100000001B3) & MASK
        print(*shape, f"{digest:016x} {left_out:x}")
