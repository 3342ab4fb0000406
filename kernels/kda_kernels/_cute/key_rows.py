"""One pass over columns of a state in layout kv: each key's values lie side by side.

Lives here: how a block shares value columns and its warps key rows, and the pass in its parts. The
sums run along the strided axis: over a lane's own rows in registers, over the lanes of a warp that
hold other rows of the same columns by shuffles, over the warps in shared memory behind a barrier.
Not here: where decay, k and q come from, and what becomes of the output (<op>/cute.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from kda_kernels._cute import device
from kda_kernels._cute.call import VECTOR_BYTES
from kda_kernels.contract.spec import HEAD_DIM
from kda_kernels.schedule import Schedule


@dataclass(frozen=True)
class Cut:
    """How a block of ``warps`` shares ``columns`` value columns; all numbers are fixed.

    Attributes:
        width: bits of a state's element.
        warps: warps of a block; each has 128 / warps key rows.
        columns: value columns of a block.
        run: key rows of a lane that follow each other, whose factors are read together.
    """

    width: int
    warps: int
    columns: int
    run: int

    @property
    def vector(self) -> int:
        """Columns that a lane holds of each of its rows: 16 bytes."""
        return VECTOR_BYTES * 8 // self.width

    @property
    def lanes(self) -> int:
        """Lanes that share a key row."""
        return self.columns // self.vector

    @property
    def together(self) -> int:
        """Groups of lanes of a warp, each with key rows of its own."""
        return 32 // self.lanes

    @property
    def keys(self) -> int:
        """Key rows of a warp."""
        return HEAD_DIM // self.warps

    @property
    def held(self) -> int:
        """Key rows of which a lane holds its columns."""
        return self.keys // self.together

    def place(self, lane: Int32) -> tuple[Int32, Int32]:
        """Return a lane's group and, as vectors, its column of the block's."""
        return lane // self.lanes, lane % self.lanes

    def first(self, warp: Int32, group: Int32) -> Int32:
        """Return the first key row of a group of lanes."""
        return warp * self.keys + group * self.run

    def behind_first(self, i: int) -> int:
        """Return how far a lane's row ``i`` lies behind its first: groups take runs in turn."""
        return i // self.run * self.run * self.together + i % self.run

    @property
    def share(self) -> int:
        """Sums that a lane holds after the shuffles, of 2 * vector."""
        return 2 * self.vector // self.together


def cut_of_one_token(width: int, schedule: Schedule) -> Cut:
    """Return how a block shares a state of elements of ``width`` bits for one token.

    With float32 the rows that a warp reads at once follow each other.
    """
    return Cut(width, schedule.warps, schedule.tile, run=1 if width == Float32.width else 2)


def cut_of_tokens(schedule: Schedule) -> Cut:
    """Return how a block shares a state that goes through several tokens as float32."""
    return Cut(Float32.width, schedule.warps, schedule.tile, run=2)


def start(base: cute.Pointer, first: Int32, column: Int32, cut: Cut) -> cute.Pointer:
    """Return where a lane's part of the 128x128 state at ``base`` starts.

    It is the lane's columns, the vector number ``column``, of its key rows, the first of which is
    ``first``. The rest of an address is a constant then.
    """
    alignment = cut.vector * base.dtype.width // 8
    at = Int64(first * HEAD_DIM + column * cut.vector)
    return device.opaque(device.pointer(base, at, alignment), alignment)


def _rows(place: cute.Pointer, cut: Cut) -> cute.Tensor:
    turn = cut.run * cut.together * HEAD_DIM
    layout = cute.make_layout(
        (cut.vector, (cut.run, cut.held // cut.run)), stride=(1, (HEAD_DIM, turn))
    )
    return cute.make_tensor(place, layout)


def load(place: cute.Pointer, cut: Cut) -> cute.Tensor:
    """Read a lane's part that starts at ``place``."""
    tile = cute.make_rmem_tensor(cute.make_layout((cut.vector, cut.held)), place.dtype)
    rows = _rows(place, cut)
    for i in range(cut.held):
        cute.autovec_copy(rows[None, i], tile[None, i])
    return tile


def store(tile: cute.Tensor, place: cute.Pointer, cut: Cut) -> None:
    """Write a lane's part to ``place``, rounded to the type that is there."""
    rows = _rows(place, cut)
    for i in range(cut.held):
        cute.autovec_copy(device.converted(tile[None, i], place.dtype), rows[None, i])


def partial_sums(smem: SmemAllocator, cut: Cut) -> cute.Pointer:
    """Reserve shared memory for every warp's sums."""
    size = cute.make_layout(size_of_partial_sums(cut))
    return smem.allocate_tensor(Float32, size, byte_alignment=16).iterator


def size_of_partial_sums(cut: Cut) -> int:
    """Return how many numbers all warps' sums are."""
    return 2 * cut.columns * cut.warps


def _factors(
    base: cute.Pointer, names: tuple[int, ...], first: Int32, i: int, cut: Cut, several_tokens: bool
) -> list[cute.Tensor]:
    """Read factors of a lane's run of key rows that starts with its row ``i``.

    ``names`` are of decay, k and q, 0 to 2.
    """
    if several_tokens and i:
        # Keeps the compiler from reading the factors of all runs ahead, for which registers are too
        # few beside a state that goes through several tokens; the warp has nothing to wait for.
        cute.arch.sync_warp()
    runs = cute.make_tensor(
        base, cute.make_layout((cut.run, HEAD_DIM // cut.run, 3), stride=(1, cut.run, HEAD_DIM))
    )
    read = []
    for name in names:
        read.append(cute.make_rmem_tensor((cut.run,), Float32))
        cute.autovec_copy(runs[None, (first + cut.behind_first(i)) // cut.run, name], read[-1])
    return read


def put_sums(
    tile: cute.Tensor,
    factors: cute.Pointer,
    first: Int32,
    place: tuple[Int32, Int32, Int32, Int32],
    partial: cute.Pointer,
    cut: Cut,
    *,
    keep: bool = False,
) -> None:
    """Leave a warp's part of S'k and S'q of its columns in shared memory.

    Args:
        tile: the lane's state.
        factors: [3, 128] in shared memory: decay, k and q of each key.
        first: the lane's first key row.
        place: lane, its group, its column within the block, and its warp.
        partial: of ``partial_sums``; a barrier makes it complete.
        cut: how the work is shared.
        keep: leave the decayed state S' in ``tile``, which then has to be float32.
    """
    lane, group, column, warp = place
    vector, columns, together, share = cut.vector, cut.columns, cut.together, cut.share
    chunk = min(share, vector)
    per_sum = vector // chunk
    parts = cute.make_tensor(
        partial,
        cute.make_layout(
            (chunk, per_sum, 2, cut.lanes, cut.warps),
            stride=(1, chunk, columns, vector, 2 * columns),
        ),
    )
    both = cute.make_rmem_tensor((2 * vector,), Float32)
    for j in range(2 * vector):
        both[j] = Float32(0.0)
    for i in range(cut.held):
        n = i % cut.run
        if n == 0:
            decays, keys, queries = _factors(factors, (0, 1, 2), first, i, cut, keep)
        old = device.unpacked(tile[None, i])
        for j in range(vector):
            decayed = old[j] * decays[n]
            if keep:
                tile[j, i] = decayed
            both[j] += decayed * keys[n]
            both[vector + j] += decayed * queries[n]
    device.halving_sum(both, 2 * vector, lane, 16, together.bit_length() - 1)
    part = cute.make_rmem_tensor((chunk, share // chunk), Float32)
    for j in range(share):
        part[j] = both[j]
    for c in range(share // chunk):
        n = group * (share // chunk) + c
        cute.autovec_copy(part[None, c], parts[None, n % per_sum, n // per_sum, column, warp])


def get_sums(partial: cute.Pointer, which: int, column: Int32, cut: Cut) -> cute.Tensor:
    """Return S'k (``which`` 0) or S'q (1) of a lane's columns, summed over the warps."""
    vector, columns = cut.vector, cut.columns
    whole = cute.make_tensor(
        partial,
        cute.make_layout(
            (vector, 2, cut.lanes, cut.warps), stride=(1, columns, vector, 2 * columns)
        ),
    )
    sums = cute.make_rmem_tensor((vector,), Float32)
    for j in range(vector):
        sums[j] = Float32(0.0)
    got = cute.make_rmem_tensor((vector,), Float32)
    for w in range(cut.warps):
        cute.autovec_copy(whole[None, which, column, w], got)
        for j in range(vector):
            sums[j] += got[j]
    return sums


def update(
    tile: cute.Tensor,
    factors: cute.Pointer,
    first: Int32,
    bu: cute.Tensor,
    cut: Cut,
    *,
    decayed: bool = False,
) -> None:
    """Turn the state, or S' where it is ``decayed`` already, into S' + k bu^T in place."""
    for i in range(cut.held):
        n = i % cut.run
        if n == 0:
            names = (1,) if decayed else (1, 0)
            keys, *decays = _factors(factors, names, first, i, cut, decayed)
        old = device.unpacked(tile[None, i], again=True)
        for j in range(cut.vector):
            kept = old[j] if decayed else old[j] * decays[0][n]
            tile[j, i] = tile.element_type(kept + bu[j] * keys[n])
