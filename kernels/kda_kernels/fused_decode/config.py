"""How fused_decode's CUDA kernel cuts its work.

Lives here: the tables of schedules. Not here: the choice (schedule.py).
"""

from __future__ import annotations

import math

from kda_kernels.schedule import Schedule, Table, without_clusters

# What was the fastest, or within 3% of it, on an H200 (132 processors, rows 1 to 512, 4 to 64
# heads). The fewer states, the more blocks of a cluster share one, and warps of their own make the
# token. In between the warps that make it read their part of the state afterwards, which shortens
# the way of the window; of many bf16 states the blocks on a processor count for more.
# docs/tuning.md has the figures.
SCHEDULES: Table = {
    ("vk", 4): (
        (0.45, Schedule(4, 4, 4, 25, 4, makers=4)),
        (14, Schedule(8, 16, 2, 25, 4, token_first=True)),
        (math.inf, Schedule(16, 8, 2, 25, 4, token_first=True)),
    ),
    ("vk", 2): (
        (0.6, Schedule(4, 16, 1, 25, 8, makers=4)),
        (2.01, Schedule(8, 16, 2, 25, 4, token_first=True)),
        (3.01, Schedule(8, 16, 3, 25, 2, token_first=True)),
        (4.01, Schedule(8, 16, 2, 25, 4, token_first=True)),
        (math.inf, Schedule(8, 16, 3, 25, 2, token_first=True)),
    ),
    ("kv", 4): (
        (0.2, Schedule(4, 32, 1, 25, makers=4)),
        (1.2, Schedule(4, 64, 2, 25, makers=4)),
        (math.inf, Schedule(8, 128, 2, 25, token_first=True)),
    ),
    ("kv", 2): (
        (0.2, Schedule(4, 32, 1, 25, makers=4)),
        (2.01, Schedule(4, 128, 2, 25, makers=4)),
        (math.inf, Schedule(4, 128, 4, 25, token_first=True)),
    ),
}
WITHOUT_CLUSTERS = without_clusters(SCHEDULES)
"""Where blocks cannot send numbers to each other; these never ran."""


def table(*, clusters: bool) -> Table:
    """Return the schedules for a device, which has clusters of blocks or not."""
    return SCHEDULES if clusters else WITHOUT_CLUSTERS
