"""How fused_decode's CUDA kernel cuts its work.

Lives here: the tables of schedules. Not here: the choice (schedule.py).
"""

from __future__ import annotations

import math

from kda_kernels.schedule import Schedule, Table

WHOLE_HEADS: Table = {
    ("vk", 4): ((math.inf, Schedule(8, 16, 2, 25)),),
    ("vk", 2): ((math.inf, Schedule(8, 16, 2, 25)),),
    ("kv", 4): ((math.inf, Schedule(8, 128, 2, 25)),),
    ("kv", 2): ((math.inf, Schedule(8, 128, 2, 25)),),
}
"""Where blocks cannot share a head, because the architecture has no clusters."""

SCHEDULES: Table = WHOLE_HEADS
