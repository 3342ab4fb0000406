"""How packed_decode's CUDA kernel cuts its work: a schedule from rows, heads and processors.

Lives here: pure integers, tested without a GPU. Not here: anything of CUDA or torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HEAD_DIM = 128
VECTOR_BYTES = 16
"""One access to the state, the widest there is."""


@dataclass(frozen=True)
class Schedule:
    """How the 128x128 state of one row and head is cut.

    Attributes:
        warps: warps of a thread block.
        tile: layout vk: value rows of a warp, so a block holds ``warps * tile`` of 128 rows;
            layout kv: value columns of a block, whose warps share the 128 key rows.
        min_blocks: blocks that must fit on a processor together, which bounds the registers.
        carveout: percentage of the L1 cache that is kept as shared memory.
    """

    warps: int
    tile: int
    min_blocks: int
    carveout: int

    def splits(self, layout: str) -> int:
        """Return how many blocks share one row and head."""
        return HEAD_DIM // (self.tile if layout == "kv" else self.warps * self.tile)


# By layout and bytes of a state's element: up to how many states (rows * heads) per processor which
# schedule was the fastest, or within 3% of it, on an H200 (132 processors, rows 1 to 512, 12, 32
# and 64 heads). Few states are spread over many small blocks; then whole rounds of blocks matter;
# many states want loads in flight without repeating the token's own work too often.
# docs/tuning.md has the figures.
_SCHEDULES: dict[tuple[str, int], tuple[tuple[float, Schedule], ...]] = {
    ("vk", 4): (
        (0.5, Schedule(2, 4, 16, 10)),
        (1.75, Schedule(2, 8, 12, 10)),
        (2.5, Schedule(2, 16, 8, 10)),
        (5, Schedule(2, 8, 12, 10)),
        (math.inf, Schedule(1, 8, 24, 10)),
    ),
    ("vk", 2): (
        (0.2, Schedule(1, 4, 32, 10)),
        (1.2, Schedule(1, 8, 24, 10)),
        (2.5, Schedule(1, 16, 16, 10)),
        (3.5, Schedule(2, 32, 6, 10)),
        (5, Schedule(1, 16, 16, 10)),
        (24, Schedule(1, 32, 10, 10)),
        (math.inf, Schedule(1, 16, 20, 10)),
    ),
    ("kv", 4): (
        (1.75, Schedule(4, 32, 6, 25)),
        (2.5, Schedule(4, 64, 4, 25)),
        (5, Schedule(4, 32, 6, 25)),
        (math.inf, Schedule(4, 64, 5, 25)),
    ),
    ("kv", 2): (
        (1.75, Schedule(4, 64, 4, 25)),
        (math.inf, Schedule(4, 128, 4, 25)),
    ),
}


def schedule(rows: int, heads: int, processors: int, itemsize: int, layout: str) -> Schedule:
    """Choose the schedule of a call.

    Args:
        rows: rows of the call, 1 or more.
        heads: heads of the state, 1 or more.
        processors: streaming multiprocessors of the device.
        itemsize: bytes of one element of the state, 4 or 2.
        layout: ``"vk"`` or ``"kv"``.
    """
    load = rows * heads / processors
    candidates = _SCHEDULES[layout, itemsize]
    return next(choice for limit, choice in candidates if load < limit)


def schedules(itemsize: int, layout: str) -> tuple[Schedule, ...]:
    """Return every schedule that some call of a state type and layout gets, without repetition."""
    return tuple(dict.fromkeys(choice for _, choice in _SCHEDULES[layout, itemsize]))
