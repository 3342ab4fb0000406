"""One pass over value rows of a state in layout vk: each row's keys lie side by side.

Lives here: how the lanes of a warp share value rows, and the pass in its parts: read, sums over
keys, update, write. A warp owns its rows whole, so the pass has no barrier. Not here: where decay,
k and q come from, and what becomes of the output (<op>/cute.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, cute, select_

from kda_kernels._cute import device
from kda_kernels._cute.call import VECTOR_BYTES
from kda_kernels.contract.spec import HEAD_DIM


@dataclass(frozen=True)
class Cut:
    """How a warp's lanes share ``tile`` value rows; all numbers are fixed when traced.

    Attributes:
        width: bits of a state's element.
        tile: value rows of a warp.
    """

    width: int
    tile: int

    @property
    def vector(self) -> int:
        """Keys that a lane holds of each of its rows: 16 bytes."""
        return VECTOR_BYTES * 8 // self.width

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return HEAD_DIM // self.vector

    @property
    def together(self) -> int:
        """Rows that a warp reads at once, one for each group of lanes."""
        return 32 // self.lanes

    @property
    def held(self) -> int:
        """Rows of which a lane holds its keys."""
        return self.tile // self.together

    @property
    def kept(self) -> int:
        """Rows that a lane finishes, once their sums are shared out."""
        return max(1, 2 * self.held // self.lanes)

    @property
    def steps(self) -> int:
        """Exchanges that halve the sums."""
        return (2 * self.held // self.kept).bit_length() - 1

    @property
    def spread(self) -> int:
        """Binary logarithm of the lanes that hold the same sum afterwards."""
        return self.lanes.bit_length() - 1 - self.steps

    def finished(self, key: Int32, group: Int32) -> Int32:
        """Return the first of the rows that a lane finishes; the next is ``together`` away."""
        share = (key >> self.spread) % (self.held // self.kept)
        return share * (self.kept * self.together) + group

    def finishes(self, key: Int32) -> Any:  # noqa: ANN401 - a traced truth value
        """Tell whether a lane is the one to write what it finishes."""
        return (key < self.lanes // 2) & ((key & ((1 << self.spread) - 1)) == 0)


def view(base: cute.Pointer, cut: Cut) -> cute.Tensor:
    """See the 128x128 state at ``base`` as (vector, value row, lane)."""
    layout = cute.make_layout((cut.vector, HEAD_DIM, cut.lanes), stride=(1, HEAD_DIM, cut.vector))
    return cute.make_tensor(base, layout)


def load(S: cute.Tensor, first: Int32, key: Int32, cut: Cut) -> cute.Tensor:
    """Read a lane's part of the rows ``first``, ``first + together``, ... into registers."""
    tile = cute.make_rmem_tensor(cute.make_layout((cut.vector, cut.held)), S.element_type)
    for i in range(cut.held):
        cute.autovec_copy(S[None, first + i * cut.together, key], tile[None, i])
    return tile


def of_lane(row: cute.Tensor, key: Int32, cut: Cut) -> cute.Tensor:
    """Return a lane's keys of a row of numbers in shared memory."""
    registers = cute.make_rmem_tensor((cut.vector,), Float32)
    by_lane = cute.make_tensor(row.iterator, cute.make_layout((cut.vector, cut.lanes)))
    cute.autovec_copy(by_lane[None, key], registers)
    return registers


def store(tile: cute.Tensor, S: cute.Tensor, first: Int32, key: Int32, cut: Cut) -> None:
    """Write rows that ``load`` read to the same rows of S, rounded to its type."""
    for i in range(cut.held):
        rounded = device.converted(tile[None, i], S.element_type)
        cute.autovec_copy(rounded, S[None, first + i * cut.together, key])


def sums(
    tile: cute.Tensor,
    d: cute.Tensor,
    k: cute.Tensor,
    q: cute.Tensor,
    key: Int32,
    cut: Cut,
    *,
    keep: bool = False,
) -> tuple[cute.Tensor, cute.Tensor]:
    """Return S'k and S'q of the rows that a lane finishes, with S' the decayed state.

    The sums over keys of all rows are reduced together, which leaves one row's pair of sums in
    each group of lanes. ``keep`` leaves S' in ``tile``, which then has to be float32.
    """
    held, kept, lanes = cut.held, cut.kept, cut.lanes
    both = cute.make_rmem_tensor((2 * held,), Float32)
    for i in range(held):
        sk, sq = Float32(0.0), Float32(0.0)
        old = device.unpacked(tile[None, i])
        for j in range(cut.vector):
            decayed = old[j] * d[j]
            if keep:
                tile[j, i] = decayed
            sk += decayed * k[j]
            sq += decayed * q[j]
        both[i] = sk
        both[held + i] = sq
    device.halving_sum(both, 2 * held, key, lanes // 2, cut.steps)
    of_k = cute.make_rmem_tensor((kept,), Float32)
    of_q = cute.make_rmem_tensor((kept,), Float32)
    upper = key >= lanes // 2
    for i in range(kept):
        total = both[i]
        for j in range(cut.spread):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << (cut.spread - 1 - j))
        other = cute.arch.shuffle_sync_bfly(total, offset=lanes // 2)
        of_k[i] = select_(upper, other, total)
        of_q[i] = select_(upper, total, other)
    return of_k, of_q


def update(
    tile: cute.Tensor,
    d: cute.Tensor | None,
    k: cute.Tensor,
    bu: cute.Tensor,
    group: Int32,
    cut: Cut,
) -> None:
    """Turn the state into S' + bu k^T in place; ``bu`` belongs to the rows a lane finishes.

    Without ``d`` it is S' already.
    """
    for i in range(cut.held):
        old = device.unpacked(tile[None, i], again=True)
        source = group * cut.lanes + ((i // cut.kept) << cut.spread)
        bu_row = cute.arch.shuffle_sync(bu[i % cut.kept], source)
        for j in range(cut.vector):
            decayed = old[j] if d is None else old[j] * d[j]
            tile[j, i] = tile.element_type(decayed + bu_row * k[j])
