"""Thread blocks of a cluster that share a head: numbers sent into each other's shared memory.

Lives here: sending, and waiting until all has arrived. A receiver knows how many bytes will come
and waits for as many on a barrier of its own; nobody fences or waits for what else it has written.
Architectures before 9.0 have no clusters. Not here: who sends what to whom (<op>/cute.py).
"""

from typing import Any

import cutlass
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, cute
from cutlass.memory import SmemAllocator

from kda_kernels._cute import device

NUMBER_BYTES = 4
"""Of what is sent, by which barriers count."""
_ADDRESSES = (
    "{\n\t.reg .u32 there, bar;\n\tmapa.shared::cluster.u32 there, $0, $2;\n\t"
    "mapa.shared::cluster.u32 bar, $1, $2;\n\t"
    "st.async.shared::cluster.mbarrier::complete_tx::bytes"
)


def reserve(smem: SmemAllocator, count: int) -> cute.Tensor:
    """Reserve as many barriers, one for each thing that the block will be sent."""
    return smem.allocate_tensor(Int64, cute.make_layout(count), byte_alignment=8)


@cute.jit
def announce(barriers: cute.Tensor, expected: tuple[Any, ...], thread: Int32) -> None:
    """Announce how many bytes will be sent to the block; None: ``expect`` will say.

    Others can be sent to behind ``cute.arch.cluster_wait``.
    """
    if thread == 0:
        for n in cutlass.range_constexpr(len(expected)):
            cute.arch.mbarrier_init(barriers.iterator + n, 1)
        cute.arch.mbarrier_init_fence()
        for n in cutlass.range_constexpr(len(expected)):
            if const_expr(expected[n] is not None):
                cute.arch.mbarrier_arrive_and_expect_tx(barriers.iterator + n, expected[n])
    cute.arch.cluster_arrive_relaxed()


@cute.jit
def expect(barriers: cute.Tensor, number: Constexpr, count: Int32, thread: Int32) -> None:
    """Say how many bytes a barrier counts, some of which may have arrived already."""
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barriers.iterator + number, count)


def wait(barriers: cute.Tensor, number: int | Int32) -> None:
    """Wait until all has arrived that a barrier expects."""
    cute.arch.mbarrier_wait(barriers.iterator + number, 0)


def send(
    place: cute.Pointer, barrier: cute.Pointer, rank: Int32, values: tuple[Float32, ...]
) -> None:
    """Send one number, or four side by side, to a block of the cluster, oneself included.

    Args:
        place: where they go, as it lies in one's own shared memory; four at a multiple of 16 bytes.
        barrier: the receiver's that counts them, as it lies in one's own shared memory.
        rank: the receiver.
        values: one or four numbers.
    """
    count = len(values)
    listed = ", ".join(f"${3 + n}" for n in range(count))
    stored = f".f32 [there], {listed}" if count == 1 else f".v4.f32 [there], {{{listed}}}"
    device.assembly(
        f"{_ADDRESSES}{stored}, [bar];\n\t}}",
        "r,r,r" + ",f" * count,
        None,
        place.toint(),
        barrier.toint(),
        rank,
        *values,
    )
