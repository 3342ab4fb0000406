"""How packed_fused_decode's CUDA kernel cuts its work.

Lives here: the tables of schedules, and how many tokens of a sequence there is room for. Not here:
the choice (schedule.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

from kda_kernels.fused_decode import config as fused_config
from kda_kernels.schedule import Schedule, Table

MOST_TOKENS = 16
"""Of a sequence: what all of them need lies in shared memory together."""
LEAST_ROOM = 4
"""Tokens that there is room for where a sequence may have more than one."""

# What was the fastest on an H200 (132 processors, T of 2, 4 and 8) of what needs no local memory.
# The state stays in registers as float32 whatever its pool's type. Blocks of a cluster share the
# heads of few sequences. docs/tuning.md has the figures.
SCHEDULES: Table = {
    ("vk", 4): (
        (0.3, Schedule(8, 4, 2, 25, 4)),
        (1, Schedule(8, 8, 2, 25, 4)),
        (math.inf, Schedule(4, 16, 4, 25, 2)),
    ),
    ("vk", 2): (
        (0.3, Schedule(8, 4, 2, 25, 4)),
        (1, Schedule(8, 8, 2, 25, 4)),
        (math.inf, Schedule(8, 16, 2, 25, 4)),
    ),
    ("kv", 4): (
        (0.3, Schedule(8, 32, 2, 25)),
        (1, Schedule(8, 128, 1, 25)),
        (math.inf, Schedule(4, 64, 3, 25)),
    ),
    ("kv", 2): ((0.3, Schedule(8, 32, 2, 25)), (math.inf, Schedule(8, 128, 1, 25))),
}

# One token a sequence is cut as fused_decode cuts as many rows, so that it has its very bits. In
# layout kv finding the sequence takes the registers that a block more a processor would need.
ONE_TOKEN: Table = {
    (layout, itemsize): tuple(
        (limit, replace(cut, min_blocks=cut.min_blocks - (layout == "kv")))
        for limit, cut in choices
    )
    for (layout, itemsize), choices in fused_config.SCHEDULES.items()
}

# Where there are no clusters a block has a head to itself; these never ran.
WITHOUT_CLUSTERS: Table = {
    (layout, itemsize): ((math.inf, schedule),)
    for layout, schedule in (
        ("vk", Schedule(8, 16, 1, 25, 4)),
        ("kv", Schedule(8, 128, 1, 25)),
    )
    for itemsize in (4, 2)
}


def room(tokens: int) -> int:
    """Return how many tokens of a sequence there is shared memory for: 1, or a power of two."""
    return 1 if tokens == 1 else max(LEAST_ROOM, 1 << (tokens - 1).bit_length())
