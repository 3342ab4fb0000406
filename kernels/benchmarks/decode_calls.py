"""Calls of the decode operators that the benchmarks time, on any device: tensors, call, check.

Lives here: a Cell (one line of a table), its tensors, one call of the public function, and the
check that refuses to time a wrong kernel. Not here: how a call is timed (harness.py, gpu_timing.py)
and what is compared (bench_decode.py, cuda_decode.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kda_ops
from kda_kernels.contract.spec import Operator, Role, TensorArg
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, clone, draw, exact, output_of, run_reference, traffic
from kda_kernels.testing.compare import assert_same_bits, assert_within_budget
from kda_kernels.testing.ties import step_off_ties

Values = dict[str, Any]

HEAD_DIM = 128
STATE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
OPERATORS: dict[str, Operator] = {c.name: c for c in CONTRACTS if c.name != "packed_fused_decode"}
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "packed_decode": kda_ops.packed_kda_decode,
    "fused_decode": kda_ops.fused_kda_decode,
}


@dataclass(frozen=True)
class Cell:
    """One operator at one size.

    Attributes:
        operator: ``"packed_decode"`` or ``"fused_decode"``.
        layout: of the state, ``"vk"`` or ``"kv"``.
        state: ``"f32"`` or ``"bf16"``.
        heads, rows: H and B.
        window: of the convolution's pool, ``"SD"`` or ``"DS"``; empty where there is none.
    """

    operator: str
    layout: str
    state: str
    heads: int
    rows: int
    window: str = ""

    @property
    def contract(self) -> Operator:
        """The operator's contract."""
        return OPERATORS[self.operator]

    @property
    def state_bytes(self) -> int:
        """Bytes of the live states."""
        return self.rows * self.heads * HEAD_DIM * HEAD_DIM * STATE_DTYPES[self.state].itemsize


def values_of(cell: Cell, device: str, slots: int | None = None) -> Values:
    """Draw the arguments of one call with bf16 activations; slots are shuffled.

    Args:
        cell: what is called.
        device: where the tensors are; ``"meta"`` for shapes alone.
        slots: of the pools; by default one for each row and one that stays empty.
    """
    count = cell.rows + 1 if slots is None else slots
    sizes = {"B": cell.rows, "H": cell.heads, "S": count, "L": 3}
    case = Case(
        sizes=sizes,
        state_dtype=STATE_DTYPES[cell.state],
        window=cell.window or "SD",
        scalars={"state_layout": cell.layout},
    )
    return draw(cell.contract, case, device)


def moved_bytes(cell: Cell, values: Values) -> int:
    """Return the bytes that a call must read and write: states, window, activations, output."""
    return traffic(cell.contract, values)


def public_call(cell: Cell, values: Values) -> tuple[Callable[[], Tensor], Tensor]:
    """Return one call of the public function, and the output that it writes."""
    function, output = _FUNCTIONS[cell.operator], output_of(cell.contract, values)
    arguments = {argument.name: values[argument.name] for argument in cell.contract.arguments}
    return lambda: function(**arguments, output=output), output


def refuse_if_wrong(cell: Cell, values: Values, call: Callable[[], object], output: Tensor) -> None:
    """Run a call once and hold its first and last row against the reference.

    The budget is that of the tests: output and state about as near to float64 as the float32
    reference, the window equal bit for bit. ``values`` may change where a convolution would land on
    a rounding tie.

    Raises:
        SystemExit: the call is wrong, so there is nothing to measure.
    """
    contract, rows = cell.contract, sorted({0, cell.rows - 1})
    few = _some_rows(contract, values, rows)
    step_off_ties(contract, few)
    if "conv_state" in few:
        values["x"][rows] = few["x"].to(values["x"].device)
    planned = clone(few)
    wanted = run_reference(contract, planned)
    exact_output, exact_state = exact(contract, few)
    call()
    slots = values["state_indices"][rows].long()
    axis = [extent.symbol for extent in contract.output.extents].index("B")
    found = output.index_select(axis, torch.tensor(rows, device=output.device)).cpu()
    try:
        assert_within_budget(found, wanted, exact_output, "output")
        state = values["state"][slots].cpu()
        assert_within_budget(state, planned["state"], exact_state, "state")
        if "conv_state" in few:
            window = values["conv_state"][slots].cpu()
            assert_same_bits(window, planned["conv_state"], "conv_state")
    except AssertionError as wrong:
        raise SystemExit(f"{cell}: {wrong}; nothing to measure") from wrong


def _some_rows(contract: Operator, values: Values, rows: Sequence[int]) -> Values:
    """Copy some rows of a call and their slots to the CPU; row i uses slot i there."""
    slots = values["state_indices"][list(rows)].long()
    few: Values = {}
    for argument in contract.arguments:
        value = values[argument.name]
        if not isinstance(argument, TensorArg) or value is None:
            few[argument.name] = value
        elif argument.name == "state_indices":
            few[argument.name] = None
        elif argument.role is Role.UPDATE:
            few[argument.name] = value[slots].cpu()
        else:
            few[argument.name] = _select(argument, value, rows).cpu()
    return few


def _select(argument: TensorArg, tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return a tensor's rows, or all of it where it has no axis of rows."""
    shape = next(e for e in argument.extents if argument.any_shape or len(e) == tensor.dim())
    symbols = [extent.symbol for extent in shape]
    if "B" not in symbols:
        return tensor
    return tensor.index_select(symbols.index("B"), torch.tensor(rows, device=tensor.device))
