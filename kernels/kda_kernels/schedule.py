"""How a kernel's work is cut, and the choice from a table: pure integers, tested without a GPU.

Lives here: what a schedule is and how one is chosen. Not here: the tables, which are an operator's
own (<op>/config.py), and anything of CUDA or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kda_kernels.contract.spec import HEAD_DIM

REGISTERS = 65536
"""Of a processor, on every architecture."""


@dataclass(frozen=True)
class Schedule:
    """How the 128x128 state of one row and head is cut.

    Attributes:
        warps: warps of a thread block.
        tile: layout vk: value rows of a warp, so a block holds ``warps * tile`` of 128 rows;
            layout kv: value columns of a block, whose warps share the 128 key rows.
        min_blocks: blocks that must fit on a processor together, which bounds the registers.
        carveout: percentage of the L1 cache that is kept as shared memory.
        batch: layout vk: rows of a warp that are finished together, the whole tile where it is 0.
        token_first: the warps that prepare the token ask for it before they ask for their part of
            the state, and not while that is on its way.
        makers: warps beside the others that make tokens and hold no state, 0 where there are none.
    """

    warps: int
    tile: int
    min_blocks: int
    carveout: int
    batch: int = 0
    token_first: bool = False
    makers: int = 0

    @property
    def registers(self) -> int:
        """Registers that a thread may have."""
        return min(255, REGISTERS // (self.threads * self.min_blocks))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.warps + self.makers)

    def maker(self, part: int) -> int:
        """Return which warp makes a part of a token; the last maker also makes what is left."""
        return self.warps + min(part, self.makers - 1) if self.makers else part % self.warps

    def splits(self, layout: str) -> int:
        """Return how many blocks share one row and head."""
        return HEAD_DIM // (self.tile if layout == "kv" else self.warps * self.tile)


Table = Mapping[tuple[str, int], tuple[tuple[float, Schedule], ...]]
"""By layout and bytes of a state's element: up to how many states (rows * heads) per processor
which schedule is taken; the last limit is infinite."""


def without_clusters(table: Table) -> Table:
    """Return a table without the schedules that take several blocks to a head."""
    return {
        (layout, itemsize): tuple(row for row in rows if row[1].splits(layout) == 1)
        for (layout, itemsize), rows in table.items()
    }


def choose(
    table: Table, layout: str, itemsize: int, rows: int, heads: int, processors: int
) -> Schedule:
    """Choose the schedule of a call.

    Args:
        table: the operator's.
        layout: ``"vk"`` or ``"kv"``.
        itemsize: bytes of one element of the state, 4 or 2.
        rows: rows of the call, 1 or more.
        heads: heads of the state, 1 or more.
        processors: streaming multiprocessors of the device.
    """
    load = rows * heads / processors
    return next(choice for limit, choice in table[layout, itemsize] if load < limit)


def every(table: Table, layout: str, itemsize: int) -> tuple[Schedule, ...]:
    """Return every schedule that some call of a layout and state type gets, without repetition."""
    return tuple(dict.fromkeys(choice for _, choice in table[layout, itemsize]))
