"""How fused_decode's CUDA kernel cuts its work.

Lives here: the table of schedules. Not here: the choice (schedule.py).
"""

from __future__ import annotations

import math

from kda_kernels.schedule import Schedule, Table

# What was the fastest, or within 3% of it, on an H200 (132 processors, rows 1 to 512, 12, 32 and 64
# heads). Preparing the token before the state is read shortens the way of few states; of many bf16
# states the blocks on a processor count for more. docs/tuning.md has the figures.
SCHEDULES: Table = {
    ("vk", 4): (
        (10, Schedule(8, 16, 2, 25, 4, token_first=True)),
        (math.inf, Schedule(16, 8, 2, 25, 4, token_first=True)),
    ),
    ("vk", 2): (
        (2.5, Schedule(8, 16, 2, 25, 8, token_first=True)),
        (3.5, Schedule(8, 16, 3, 25, 4, token_first=True)),
        (5, Schedule(8, 16, 2, 25, 8, token_first=True)),
        (math.inf, Schedule(8, 16, 3, 25, 4, token_first=True)),
    ),
    ("kv", 4): ((math.inf, Schedule(8, 128, 2, 25, token_first=True)),),
    ("kv", 2): (
        (1.2, Schedule(8, 128, 2, 25, token_first=True)),
        (math.inf, Schedule(4, 128, 3, 25)),
    ),
}
