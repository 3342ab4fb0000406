"""From a call of fused_decode on a GPU to its variant, and to the arguments the variant takes.

Lives here: what is fixed when a kernel is compiled, read off a validated call, and the function
that receives the contract's arguments. Not here: the kernel (cute.py, which imports CUTLASS and is
therefore imported only when a variant is compiled) and the schedules (config.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kda_kernels._cute import call
from kda_kernels.contract.example import Kinds, example
from kda_kernels.fused_decode.config import table
from kda_kernels.fused_decode.contract import CONTRACT
from kda_kernels.schedule import Schedule, choose, every

SOURCES = ("fused_decode/cute.py", "fused_decode/config.py", "fused_decode/launch.py")
"""What the compiled code depends on beside the shared files, relative to the package."""
TENSORS = (
    *("x", "weight", "conv_state", "raw_gate", "raw_beta", "A_log", "dt_bias", "state"),
    *("state_indices", "output_gate", "norm_weight", "conv_bias", "output"),
)
"""The tensors that a compiled function takes, in its order."""


@dataclass(frozen=True)
class Variant:
    """What one compiled function is fixed to; rows, slots, heads and strides are dynamic.

    Attributes:
        layout: ``"vk"`` or ``"kv"``.
        schedule: how the work is cut.
        softplus: the gate: softplus, or the lower-bound one.
        wraps: negative indices count from the end (first_slot None).
        overlaps: blocks start while the kernel before ends (programmatic dependent launch).
        aligned: lanes may read vectors of rows and parameters.
        columns: columns of a window.
        by_channel: windows are DS; otherwise SD.
        taps_last: weight is channel-major; otherwise tap-major.
        types: names of the tensors' dtypes, None where the call has no such tensor.
        ranks: how many axes the tensors have.
    """

    layout: str
    schedule: Schedule
    softplus: bool
    wraps: bool
    overlaps: bool
    aligned: bool
    columns: int
    by_channel: bool
    taps_last: bool
    types: Mapping[str, str | None] = field(hash=False)
    ranks: Mapping[str, int] = field(hash=False)

    @property
    def blocks(self) -> int:
        """Thread blocks that share a head, in a cluster."""
        return self.schedule.splits(self.layout)

    def row_axis(self, name: str) -> int:
        """Return the axis of raw_gate or output_gate that counts rows."""
        return call.row_axis(self.ranks[name])

    @property
    def beta_axis(self) -> int:
        """The axis of raw_beta that counts rows; heads come next."""
        return 1 if self.ranks["raw_beta"] == 3 else 0


def variant_of(
    values: Mapping[str, Any], output: torch.dtype, processors: int, *, overlap: bool = True
) -> Variant:
    """Return the variant that serves a call of at least one row.

    Args:
        values: the contract's arguments by name.
        output: type of the output.
        processors: streaming multiprocessors of the device.
        overlap: whether launches can overlap on the device, which then has clusters too.
    """
    state, x, layout = values["state"], values["x"], values["state_layout"]
    return Variant(
        schedule=choose(
            table(clusters=overlap),
            *(layout, state.element_size(), x.shape[0], state.shape[1], processors),
        ),
        wraps=values["state_indices"] is not None and values["first_slot"] is None,
        columns=values["conv_state"].shape[2],
        **shared_fields({name: values.get(name) for name in TENSORS}, values, output, overlap),
    )


def shared_fields(
    tensors: Mapping[str, Tensor | None],
    values: Mapping[str, Any],
    output: torch.dtype,
    overlap: bool,
) -> dict[str, Any]:
    """Return the fields that are read off a call of either fused operator alike.

    Args:
        tensors: those that the compiled function takes, by name, absent ones as None.
        values: the contract's arguments by name.
        output: type of the output.
        overlap: whether launches can overlap on the device.
    """
    x, gate, weight = values["x"], values["raw_gate"], values["weight"]
    given = {**tensors, "A_log": call.at_least_one_axis(values["A_log"])}
    flat = (weight, values["dt_bias"], values["conv_bias"])
    return {
        "layout": values["state_layout"],
        "softplus": values["lower_bound"] is None,
        "overlaps": call.overlaps(overlap),
        "aligned": call.are_aligned(((x, 0), (gate, call.row_axis(gate.dim()))), *flat),
        "by_channel": values["conv_state"].stride(1) != 1,
        "taps_last": weight.stride(2) != 1,
        "types": call.dtypes(given) | {"output": call.dtype_name(output)},
        "ranks": call.ranks(given) | {"output": 4},
    }


def matrix(*, overlap: bool = True) -> tuple[Variant, ...]:
    """Return the default variants: a bundle holds them, tests compile them for every architecture.

    They are what serving engines call: bfloat16 rows that start at multiples of 16 bytes, windows
    of three columns in either layout, tap-major float32 weights without a bias, int32 indices; both
    state types, both state layouts, both gates, and every schedule.

    Args:
        overlap: as in :func:`variant_of`.
    """
    found: list[Variant] = []
    states, bounds, windows = (torch.float32, torch.bfloat16), (-5.0, None), ("SD", "DS")
    for layout, state, bound, window in itertools.product(("vk", "kv"), states, bounds, windows):
        scalars = {"state_layout": layout, "lower_bound": bound}
        values = example(CONTRACT, kinds=Kinds(state=state, window=window), scalars=scalars)
        one = variant_of(values, torch.bfloat16, processors=1, overlap=overlap)
        cuts = every(table(clusters=overlap), layout, state.itemsize)
        found += [replace(one, schedule=cut) for cut in cuts]
    return tuple(found)


def adapter(function: Callable[..., None], values: Mapping[str, Any]) -> Callable[..., None]:
    """Wrap a compiled function to take the contract's arguments of one signature.

    Scalars are part of a signature, so they are worked out here, once.
    """
    scale, lower_bound, first_slot = call.scalars(values)
    norm_eps = float(values["norm_eps"])
    flat = values["A_log"].dim() > 0

    def fused_decode(
        x: Tensor,
        weight: Tensor,
        conv_state: Tensor,
        raw_gate: Tensor,
        raw_beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        state_indices: Tensor | None,
        state: Tensor,
        output_gate: Tensor,
        norm_weight: Tensor,
        _lower_bound: float | None,
        _norm_eps: float,
        conv_bias: Tensor | None,
        _scale: float | None,
        _first_slot: int | None,
        _state_layout: str,
        output: Tensor,
    ) -> None:
        a_log = A_log if flat else call.at_least_one_axis(A_log)
        head = (x, weight, conv_state, raw_gate, raw_beta, a_log, dt_bias, state, state_indices)
        tail = (output_gate, norm_weight, conv_bias, output)
        function(*head, *tail, scale, lower_bound, norm_eps, first_slot)

    return fused_decode


def trace(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    """Return what the compiler compiles for a variant (imports CUTLASS)."""
    from kda_kernels.fused_decode import cute  # noqa: PLC0415 - needs CUTLASS

    return cute.trace(variant)
