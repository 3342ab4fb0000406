"""How packed_decode's CUDA kernel cuts its work.

Lives here: the table of schedules. Not here: the choice (schedule.py).
"""

from __future__ import annotations

import math

from kda_kernels.schedule import Schedule, Table

# What was the fastest, or within 3% of it, on an H200 (132 processors, rows 1 to 512, 4 to 64
# heads). Few states are spread over many small blocks; then whole rounds of blocks matter; many
# states want loads in flight without repeating the token's own work too often. A token of layout vk
# is asked for together with its slot, but for tiles that leave no registers to keep it in.
# docs/tuning.md has the figures.
SCHEDULES: Table = {
    ("vk", 4): (
        (0.8, Schedule(4, 4, 8, 10, token_first=True)),
        (1.75, Schedule(2, 8, 12, 10, token_first=True)),
        (2.5, Schedule(2, 16, 8, 10, token_first=True)),
        (5, Schedule(2, 4, 16, 10, token_first=True)),
        (math.inf, Schedule(1, 8, 24, 10, token_first=True)),
    ),
    ("vk", 2): (
        (1, Schedule(4, 4, 8, 10, token_first=True)),
        (2.01, Schedule(1, 16, 16, 10, token_first=True)),
        (2.51, Schedule(1, 16, 20, 10, token_first=True)),
        (3.5, Schedule(1, 32, 10, 10)),
        (5, Schedule(1, 16, 16, 10, token_first=True)),
        (24, Schedule(1, 32, 10, 10)),
        (math.inf, Schedule(1, 16, 20, 10, token_first=True)),
    ),
    ("kv", 4): (
        (1.75, Schedule(4, 32, 6, 25)),
        (2.5, Schedule(4, 64, 4, 25)),
        (5, Schedule(4, 32, 6, 25)),
        (math.inf, Schedule(4, 64, 5, 25)),
    ),
    ("kv", 2): (
        (0.6, Schedule(4, 32, 4, 25)),
        (1.75, Schedule(4, 64, 4, 25)),
        (math.inf, Schedule(4, 128, 4, 25)),
    ),
}
