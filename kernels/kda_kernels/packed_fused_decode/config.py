"""How packed_fused_decode's CUDA kernel cuts its work.

Lives here: the tables of schedules, and how many tokens of a sequence there is room for. Not here:
the choice (schedule.py).
"""

from __future__ import annotations

import math

from kda_kernels.schedule import Schedule, Table

MOST_TOKENS = 16
"""Of a sequence: what all of them need lies in shared memory together."""
LEAST_ROOM = 4
"""Tokens that there is room for where a sequence may have more than one."""

# So many blocks on a processor: whichever leaves less of the last wave of blocks empty.
VK_TWO, VK_THREE = (
    Schedule(8, 16, 2, 25, 16, token_first=True),
    Schedule(4, 32, 3, 25, 32, token_first=True),
)
KV_TWO, KV_THREE = (
    Schedule(8, 128, 2, 25, token_first=True),
    Schedule(4, 128, 3, 25, token_first=True),
)
HALF_KV_THREE, HALF_KV_FOUR = (
    Schedule(4, 64, 3, 25, token_first=True),
    Schedule(4, 64, 4, 25, token_first=True),
)

# What was the fastest on an H200 (132 processors, T of 2, 4 and 8) of what needs no local memory.
# The state stays in registers as float32 whatever its pool's type. Blocks of a cluster share the
# heads of few sequences, and always those of float32 states; the fewest have warps of their own to
# make the tokens. docs/tuning.md has the figures.
SCHEDULES: Table = {
    ("vk", 4): (
        (0.1, Schedule(4, 4, 1, 25, 4, makers=6)),
        (0.2, Schedule(4, 8, 1, 25, 8, makers=6)),
        (0.6, Schedule(8, 8, 1, 25, 8, makers=6)),
        (2.01, Schedule(8, 8, 2, 25, 8, token_first=True)),
        (math.inf, Schedule(8, 8, 3, 25, 8, token_first=True)),
    ),
    ("vk", 2): (
        (0.1, Schedule(4, 4, 1, 25, 4, makers=6)),
        (0.2, Schedule(4, 8, 1, 25, 8, makers=6)),
        (0.6, Schedule(8, 8, 1, 25, 8, makers=6)),
        (2.01, VK_TWO),
        (3.01, VK_THREE),
        (8.01, VK_TWO),
        (9.01, VK_THREE),
        (11.01, VK_TWO),
        (12.01, VK_THREE),
        (math.inf, VK_TWO),
    ),
    ("kv", 4): (
        (0.1, Schedule(4, 16, 1, 25, makers=6)),
        (0.2, Schedule(4, 32, 1, 25, makers=6)),
        (0.6, Schedule(4, 64, 1, 25, makers=6)),
        (2.01, HALF_KV_FOUR),
        (3.01, HALF_KV_THREE),
        (4.01, HALF_KV_FOUR),
        (4.51, HALF_KV_THREE),
        (7.01, HALF_KV_FOUR),
        (7.51, HALF_KV_THREE),
        (8.01, HALF_KV_FOUR),
        (9.01, HALF_KV_THREE),
        (math.inf, HALF_KV_FOUR),
    ),
    ("kv", 2): (
        (0.1, Schedule(4, 16, 1, 25, makers=6)),
        (0.2, Schedule(4, 32, 1, 25, makers=6)),
        (0.6, Schedule(4, 64, 1, 25, makers=6)),
        (2.01, KV_TWO),
        (3.01, KV_THREE),
        (4.01, KV_TWO),
        (6.01, KV_THREE),
        (8.01, KV_TWO),
        (9.01, KV_THREE),
        (10.01, KV_TWO),
        (math.inf, KV_THREE),
    ),
}

# Where there are no clusters a block has a head to itself; these never ran.
WITHOUT_CLUSTERS: Table = {
    (layout, itemsize): ((math.inf, schedule),)
    for layout, schedule in (
        ("vk", Schedule(8, 16, 1, 25, 4, token_first=True)),
        ("kv", Schedule(8, 128, 1, 25, token_first=True)),
    )
    for itemsize in (4, 2)
}


def room(tokens: int) -> int:
    """Return how many tokens of a sequence there is shared memory for: 1, or a power of two."""
    return 1 if tokens == 1 else max(LEAST_ROOM, 1 << (tokens - 1).bit_length())
