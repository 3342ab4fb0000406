"""How fused_decode's CUDA kernel cuts its work.

Lives here: the tables of schedules. Not here: the choice (schedule.py).
"""

from __future__ import annotations

import math

from kda_kernels.schedule import Schedule, Table

WHOLE_HEADS: Table = {
    ("vk", 4): ((math.inf, Schedule(8, 16, 2, 25)),),
    ("vk", 2): ((math.inf, Schedule(4, 32, 3, 25)),),
    ("kv", 4): ((math.inf, Schedule(8, 128, 2, 25)),),
    ("kv", 2): ((math.inf, Schedule(4, 128, 3, 25)),),
}
"""Where blocks cannot share a head, because the architecture has no clusters."""

# What was the fastest, or within 3% of it, on an H200 (132 processors, rows 1 to 512, 12, 32 and 64
# heads). Sharing a head among blocks repeats the convolution of q and k in each of them, so only a
# few rows are worth it. docs/tuning.md has the figures.
SCHEDULES: Table = {
    ("vk", 4): ((0.3, Schedule(4, 8, 4, 25)), *WHOLE_HEADS["vk", 4]),
    ("vk", 2): (
        (0.2, Schedule(4, 8, 4, 25)),
        (1, Schedule(8, 16, 2, 25)),
        *WHOLE_HEADS["vk", 2],
    ),
    ("kv", 4): (
        (0.15, Schedule(4, 32, 4, 25)),
        (0.6, Schedule(4, 64, 4, 25)),
        *WHOLE_HEADS["kv", 4],
    ),
    ("kv", 2): ((0.15, Schedule(4, 32, 4, 25)), *WHOLE_HEADS["kv", 2]),
}
"""Hopper and newer."""
