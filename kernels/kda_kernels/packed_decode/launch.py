"""From a call of packed_decode on a GPU to its variant, and to the arguments the variant takes.

Lives here: what is fixed when a kernel is compiled, read off a validated call, and the function
that receives the contract's arguments. Not here: the kernel (cute.py, which imports CUTLASS and is
therefore imported only when a variant is compiled) and the schedule's choice (config.py).
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
from kda_kernels.packed_decode.config import SCHEDULES
from kda_kernels.packed_decode.contract import CONTRACT
from kda_kernels.schedule import Schedule, choose, every

SOURCES = ("packed_decode/cute.py", "packed_decode/config.py", "packed_decode/launch.py")
"""What the compiled code depends on beside the shared files, relative to the package."""


@dataclass(frozen=True)
class Variant:
    """What one compiled function is fixed to; rows, slots, heads and strides are dynamic.

    Attributes:
        layout: ``"vk"`` or ``"kv"``.
        schedule: how the work is cut.
        softplus: the gate: softplus, or the lower-bound one.
        wraps: negative indices count from the end (first_slot None).
        overlaps: blocks start while the kernel before ends (programmatic dependent launch).
        aligned: lanes may read vectors of mixed_qkv, raw_gate and dt_bias.
        qkv, gate, beta, A_log, dt_bias, state, index, output: names of dtypes; index is None where
            there are no indices.
        ranks: dimensions of the tensors that have other than one.
    """

    layout: str
    schedule: Schedule
    softplus: bool
    wraps: bool
    overlaps: bool
    aligned: bool
    qkv: str
    gate: str
    beta: str
    A_log: str
    dt_bias: str
    state: str
    index: str | None
    output: str
    ranks: Mapping[str, int] = field(hash=False)

    @property
    def gate_axis(self) -> int:
        """The axis of raw_gate that counts rows."""
        return call.row_axis(self.ranks["gate"])

    @property
    def beta_axis(self) -> int:
        """The axis of raw_beta that counts rows; heads come next."""
        return 1 if self.ranks["beta"] == 3 else 0


def variant_of(
    values: Mapping[str, Any],
    output: torch.dtype,
    processors: int,
    *,
    overlap: bool = True,
) -> Variant:
    """Return the variant that serves a call of at least one row.

    Args:
        values: the contract's arguments by name.
        output: type of the output.
        processors: streaming multiprocessors of the device.
        overlap: whether launches can overlap on the device.
    """
    state, qkv, gate = values["state"], values["mixed_qkv"], values["raw_gate"]
    indices, layout = values["state_indices"], values["state_layout"]
    rows, heads = qkv.shape[0], state.shape[1]
    cut = choose(SCHEDULES, layout, state.element_size(), rows, heads, processors)
    tensors = {
        "qkv": qkv,
        "gate": gate,
        "beta": values["raw_beta"],
        "A_log": call.at_least_one_axis(values["A_log"]),
        "dt_bias": values["dt_bias"],
        "state": state,
        "index": indices,
    }
    return Variant(
        layout=layout,
        schedule=cut,
        softplus=values["lower_bound"] is None,
        wraps=indices is not None and values["first_slot"] is None,
        overlaps=call.overlaps(overlap),
        # Lanes of the other schedule read single elements of the rows anyway.
        aligned=layout == "vk"
        and call.are_aligned(((qkv, 0), (gate, call.row_axis(gate.dim()))), values["dt_bias"]),
        output=call.dtype_name(output),
        ranks=call.ranks(tensors) | {"output": 4},
        **call.dtypes(tensors),  # type: ignore[arg-type]
    )


def matrix(*, overlap: bool = True) -> tuple[Variant, ...]:
    """Return the default variants: a bundle holds them, tests compile them for every architecture.

    They are what serving engines call: bfloat16 rows that start at multiples of 16 bytes, float32
    parameters, int32 indices of which negative ones are padding; both state types, both state
    layouts, both gates, and every schedule that some number of rows, heads and processors leads to.
    Everything is read off example calls, so that a real call of the kind finds its variant.

    Args:
        overlap: as in :func:`variant_of`.
    """
    found: list[Variant] = []
    states, bounds = (torch.float32, torch.bfloat16), (-5.0, None)
    for layout, state, bound in itertools.product(("vk", "kv"), states, bounds):
        scalars = {"state_layout": layout, "lower_bound": bound}
        values = example(CONTRACT, kinds=Kinds(state=state), scalars=scalars)
        one = variant_of(values, torch.bfloat16, processors=1, overlap=overlap)
        found += [replace(one, schedule=cut) for cut in every(SCHEDULES, layout, state.itemsize)]
    return tuple(found)


def adapter(function: Callable[..., None], values: Mapping[str, Any]) -> Callable[..., None]:
    """Wrap a compiled function to take the contract's arguments of one signature.

    Scalars are part of a signature, so they are worked out here, once.
    """
    scale, lower_bound, first_slot = call.scalars(values)
    flat = values["A_log"].dim() > 0

    def packed_decode(
        mixed_qkv: Tensor,
        raw_gate: Tensor,
        raw_beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        state_indices: Tensor | None,
        _scale: float | None,
        _lower_bound: float | None,
        _first_slot: int | None,
        _state_layout: str,
        output: Tensor,
    ) -> None:
        a_log = A_log if flat else call.at_least_one_axis(A_log)
        head = (mixed_qkv, raw_gate, raw_beta, a_log, dt_bias, state, state_indices, output)
        function(*head, scale, lower_bound, first_slot)

    return packed_decode


def trace(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    """Return what the compiler compiles for a variant (imports CUTLASS)."""
    from kda_kernels.packed_decode import cute  # noqa: PLC0415 - needs CUTLASS

    return cute.trace(variant)
