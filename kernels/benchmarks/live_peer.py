"""flash-linear-attention's decode step, timed beside ours in the same run where it is installed.

Lives here: whether it is there, and its step on our inputs. Not here: figures of other runs
(peers.py) and how it is timed (gpu_timing.py).

``fused_recurrent_kda`` takes q, k and v after the convolution as tensors of their own, keeps states
as [K, V] and writes the new states, float32 whatever the old ones are, to memory that it allocates.
So what it does is packed_decode in layout kv without a pool. Its time is that of all kernels that a
call launches.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import provenance
from decode_calls import HEAD_DIM, Cell, Values, public_call

TOLERANCE = 0.02
"""Largest difference of outputs and states, relative to their norm: both are rounded to bf16."""

Call = Callable[[], Tensor]
Pairs = Iterable[tuple[Tensor, Tensor]]


def name() -> str | None:
    """Return its name and version, None where it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    found = provenance.version("flash-linear-attention") or provenance.version("fla-core")
    return f"flash-linear-attention {found} fused_recurrent_kda"


def call(cell: Cell, values: Values) -> Call | None:
    """Return one call of its step that computes what packed_decode does, else None with a word.

    Args:
        cell: of packed_decode in layout kv; None for others.
        values: the arguments of our call; the first ``rows`` slots of the pool are its states.
    """
    if cell.operator != "packed_decode" or cell.layout != "kv" or name() is None:
        return None
    return if_right(
        f"{name()}",
        lambda: _step(cell, values),
        lambda output: [(output.flatten(), _ours(cell, values).flatten())],
    )


def if_right(
    label: str, make: Callable[[], Call], compared: Callable[[Tensor], Pairs]
) -> Call | None:
    """Return a call of its that computes what ours does, else None with a word.

    Args:
        label: what the word calls it.
        make: makes the call.
        compared: returns for the call's output what has to agree, theirs and ours.
    """
    try:
        call = make()
        differences = [relative_difference(*pair) for pair in compared(call())]
    except Exception as error:  # another version's arguments, a missing dependency, its compiler
        print(f"# {label}: {type(error).__name__}: {error}")
        return None
    if not all(difference <= TOLERANCE for difference in differences):
        told = ", ".join(f"{difference:.2g}" for difference in differences)
        print(f"# {label}: relative difference {told}: another result than ours, not timed")
        return None
    return call


def _step(cell: Cell, values: Values) -> Call:
    """Return the call; tensors are laid out before, so that it copies none."""
    function: Callable[..., Any] = importlib.import_module("fla.ops.kda").fused_recurrent_kda
    heads = (cell.rows, 1, cell.heads, HEAD_DIM)
    q, k, v = (part.reshape(heads).contiguous() for part in values["mixed_qkv"].chunk(3, -1))
    arguments = options(values, heads) | {
        "initial_state": values["state"][: cell.rows],
        "output_final_state": True,
    }

    def step() -> Tensor:
        output: Tensor = function(q, k, v, **arguments)[0]
        return output

    return step


def _ours(cell: Cell, values: Values) -> Tensor:
    """Return our output on the same states, the first of a pool of our own."""
    pool = values["state"].clone()
    slots = torch.arange(cell.rows, dtype=torch.int32, device=pool.device)
    return public_call(cell, values | {"state": pool, "state_indices": slots})[0]()


def options(values: Values, heads: tuple[int, ...]) -> dict[str, Any]:
    """Return what its recurrence takes beside q, k, v and states: it makes gates and beta itself.

    Args:
        values: the arguments of our call.
        heads: (sequences, tokens, H, 128).
    """
    return {
        "g": values["raw_gate"].reshape(heads),
        "beta": values["raw_beta"].reshape(heads[:3]),
        "A_log": values["A_log"],
        "dt_bias": values["dt_bias"],
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": values["lower_bound"],
    }


def relative_difference(theirs: Tensor, ours: Tensor) -> float:
    """Return the norm of the difference over that of ours."""
    return float((theirs.float() - ours.float()).norm() / ours.float().norm())
