"""From a call of packed_fused_decode on a GPU to its variant, and to the arguments it takes.

Lives here: what is fixed when a kernel is compiled, read off a validated call, and the function
that receives the contract's arguments. Not here: the kernel (cute.py, which imports CUTLASS and is
therefore imported only when a variant is compiled) and the schedules (config.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kda_kernels._cute import call
from kda_kernels.contract.example import Kinds, example
from kda_kernels.errors import UnsupportedError
from kda_kernels.fused_decode import config as fused_config
from kda_kernels.fused_decode import launch as fused_launch
from kda_kernels.packed_fused_decode.config import (
    MOST_TOKENS,
    SCHEDULES,
    WITHOUT_CLUSTERS,
    room,
)
from kda_kernels.packed_fused_decode.contract import CONTRACT
from kda_kernels.schedule import Table, choose, every

SOURCES = (
    "packed_fused_decode/cute.py",
    "packed_fused_decode/config.py",
    "packed_fused_decode/launch.py",
    "fused_decode/config.py",
    "fused_decode/launch.py",
)
"""What the compiled code depends on beside the shared files, relative to the package."""
TENSORS = (
    *("x", "weight", "conv_state", "raw_gate", "raw_beta", "A_log", "dt_bias", "state"),
    *("state_indices", "output_gate", "norm_weight", "query_start_loc", "num_accepted_tokens"),
    *("t1_state_indices", "conv_bias", "output"),
)
"""The tensors that a compiled function takes, in its order."""
IN_MATRIX = (1, 2, 4)
"""Numbers of tokens that are compiled ahead of time."""


@dataclass(frozen=True)
class Variant(fused_launch.Variant):
    """What one compiled function is fixed to; sequences and their lengths are dynamic too.

    Attributes:
        room: tokens of a sequence that there is shared memory for; 1: no sequence has more.
        columns: columns of a window in layout DS, which moves whole; 0 for SD, of which three
            columns are read wherever they are.
    """

    room: int

    @property
    def by_row(self) -> bool:
        """Every packed row is a sequence of its own, and t1_state_indices has its slot."""
        return self.types["t1_state_indices"] is not None


def variant_of(
    values: Mapping[str, Any], output: torch.dtype, processors: int, *, overlap: bool = True
) -> Variant:
    """Return the variant that serves a call of at least one row.

    Args:
        values: the contract's arguments by name.
        output: type of the output.
        processors: streaming multiprocessors of the device.
        overlap: whether launches can overlap on the device, which then has clusters too.

    Raises:
        UnsupportedError: a sequence may have more than 16 tokens.
    """
    state, layout, window = values["state"], values["state_layout"], values["conv_state"]
    (sequences, tokens), heads = values["state_indices"].shape, state.shape[1]
    if tokens > MOST_TOKENS:
        rule = f"[N, T] with T of at most {MOST_TOKENS} tokens on cuda"
        raise UnsupportedError(CONTRACT.name, "state_indices", rule, f"T = {tokens}")
    tensors = {name: values.get(name) for name in TENSORS}
    if tokens > 1:
        tensors["t1_state_indices"] = None
    shared = fused_launch.shared_fields(tensors, values, output, overlap)
    rows = values["x"].shape[0] if tokens == 1 else max(sequences, 1)
    cuts = table(tokens, clusters=overlap)
    return Variant(
        schedule=choose(cuts, layout, state.element_size(), rows, heads, processors),
        wraps=values["first_slot"] is None,
        columns=window.shape[2] if tokens == 1 or shared["by_channel"] else 0,
        room=room(tokens),
        **shared,
    )


def table(tokens: int, *, clusters: bool) -> Table:
    """Return the schedules for so many tokens a sequence, with or without clusters of blocks.

    One token a sequence is cut as fused_decode cuts as many rows, so that it has its very bits.
    """
    if tokens == 1:
        return fused_config.table(clusters=clusters)
    return SCHEDULES if clusters else WITHOUT_CLUSTERS


def matrix(*, overlap: bool = True) -> tuple[Variant, ...]:
    """Return the default variants: those of fused_decode, for one, two and four tokens.

    Windows in layout SD need none of their own for two tokens. One token is fused_decode's work, so
    of those there are fewer: windows SD, the lower-bound gate.

    Args:
        overlap: as in :func:`variant_of`.
    """
    found: list[Variant] = []
    states, bounds, windows = (torch.float32, torch.bfloat16), (-5.0, None), ("SD", "DS")
    axes = itertools.product(IN_MATRIX, ("vk", "kv"), states, bounds, windows)
    for tokens, layout, state, bound, window in axes:
        if tokens == 1 and (bound is None or window == "DS"):
            continue
        scalars = {"state_layout": layout, "lower_bound": bound}
        kinds = Kinds(state=state, window=window)
        values = example(CONTRACT, {"T": tokens}, kinds, scalars)
        one = variant_of(values, torch.bfloat16, processors=1, overlap=overlap)
        cuts = every(table(tokens, clusters=overlap), layout, state.itemsize)
        found += [replace(one, schedule=cut) for cut in cuts]
    return tuple(dict.fromkeys(found))


def adapter(function: Callable[..., None], values: Mapping[str, Any]) -> Callable[..., None]:
    """Wrap a compiled function to take the contract's arguments of one signature.

    Scalars are part of a signature, so they are worked out here, once.
    """
    scale, lower_bound, first_slot = call.scalars(values)
    norm_eps = float(values["norm_eps"])
    flat = values["A_log"].dim() > 0
    one_token = values["state_indices"].shape[1] == 1

    def packed_fused_decode(
        x: Tensor,
        weight: Tensor,
        conv_state: Tensor,
        raw_gate: Tensor,
        raw_beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        state_indices: Tensor,
        state: Tensor,
        output_gate: Tensor,
        norm_weight: Tensor,
        query_start_loc: Tensor,
        num_accepted_tokens: Tensor,
        _lower_bound: float | None,
        _norm_eps: float,
        t1_state_indices: Tensor | None,
        conv_bias: Tensor | None,
        _scale: float | None,
        _first_slot: int | None,
        _state_layout: str,
        output: Tensor,
    ) -> None:
        a_log = A_log if flat else call.at_least_one_axis(A_log)
        head = (x, weight, conv_state, raw_gate, raw_beta, a_log, dt_bias, state, state_indices)
        ragged = (query_start_loc, num_accepted_tokens, t1_state_indices if one_token else None)
        tail = (conv_bias, output, scale, lower_bound, norm_eps, first_slot)
        function(*head, output_gate, norm_weight, *ragged, *tail)

    return packed_fused_decode


def trace(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    """Return what the compiler compiles for a variant (imports CUTLASS)."""
    from kda_kernels.packed_fused_decode import cute  # noqa: PLC0415 - needs CUTLASS

    return cute.trace(variant)
