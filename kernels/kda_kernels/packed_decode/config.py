"""How packed_decode's CUDA kernel cuts its work: a schedule from rows, heads and processors.

Lives here: pure integers, tested without a GPU. Not here: anything of CUDA or torch.
"""

from __future__ import annotations

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


def schedule(rows: int, heads: int, processors: int, itemsize: int, layout: str) -> Schedule:
    """Choose the schedule of a call.

    Args:
        rows: rows of the call, 1 or more.
        heads: heads of the state, 1 or more.
        processors: streaming multiprocessors of the device.
        itemsize: bytes of one element of the state, 4 or 2.
        layout: ``"vk"`` or ``"kv"``.
    """
    few = rows * heads < 4 * processors
    if layout == "kv":
        return Schedule(8, 32, 4, 25) if few else Schedule(8, 128, 2, 25)
    if itemsize == 2:
        return Schedule(1, 16, 20, 10)
    return Schedule(1, 16, 16, 10) if few else Schedule(8, 16, 2, 10)
