"""Warps that make tokens while others hold the state: how the warps of a block wait for each other.

Lives here: the barriers of a block that has such warps. A warp that only tells goes on at once.
Where no warps make tokens alone, the block waits together. Not here: what is made (one_token.py,
sequence.py), and blocks that wait for other blocks (cluster.py).
"""

from cutlass import Constexpr, cute

TOKENS_MADE, SUMS_MADE, WINDOW_ASKED = 1, 2, 3
"""The barriers. The last lets the window's reads go before those of the state."""
PARTS = 3
"""Of a token's convolution: q, k and v, each with a warp of its own that asks for its window."""


def everyone(v: Constexpr) -> int:
    """Return how many warps a block has."""
    return v.schedule.threads // 32


def tell(barrier: int, warps: int, v: Constexpr) -> None:
    """Tell whoever waits at a barrier of so many warps that this one's part is done."""
    if v.schedule.makers:
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=32 * warps)


def wait(barrier: int, warps: int, v: Constexpr) -> None:
    """Wait at a barrier of so many warps, those that tell among them; or for the whole block."""
    if v.schedule.makers:
        cute.arch.barrier(barrier_id=barrier, number_of_threads=32 * warps)
    else:
        cute.arch.sync_threads()


def tell_window_asked(v: Constexpr) -> None:
    """Let the others ask for the state; what is read behind it keeps it in its place."""
    tell(WINDOW_ASKED, v.schedule.warps + PARTS, v)


def wait_for_window_asked(v: Constexpr) -> None:
    """Wait until the window has been asked for, where others do that."""
    if v.schedule.makers:
        wait(WINDOW_ASKED, v.schedule.warps + PARTS, v)
