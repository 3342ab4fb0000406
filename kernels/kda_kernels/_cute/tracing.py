"""What every operator's kernels are traced with: types, tensors without sizes, the grid.

Lives here: stand-ins for arguments. Not here: compiling (compile.py) and device code (device.py).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_tensor

MAX_GRID_Y = 65535
TYPES = {
    "float32": Float32,
    "bfloat16": BFloat16,
    "float16": Float16,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}


def any_tensor(dtype: str | None, rank: int) -> Any:  # noqa: ANN401
    """Return a tensor of a type and rank, None where the variant has none.

    Shapes and strides are all dynamic and unrelated, so that no legal call fails a check of the
    compiled function: what the kernel relies on, the contract has checked.
    """
    if dtype is None:
        return None
    shape = tuple(cute.sym_int32() for _ in range(rank))
    stride = tuple(cute.sym_int64() for _ in range(rank))
    return make_fake_tensor(TYPES[dtype], shape, stride, assumed_align=TYPES[dtype].width // 8)


def grid(blocks: Int32, rows: Int32) -> list[Any]:
    """Return the grid of ``blocks`` for each row: rows run over y, and over z where y ends."""
    return [blocks, cutlass.min(rows, MAX_GRID_Y), (rows + MAX_GRID_Y - 1) // MAX_GRID_Y]
