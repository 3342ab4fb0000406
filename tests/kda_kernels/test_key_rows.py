"""How a block shares a state of layout kv: every key row is one lane group's."""

import importlib
import itertools

import pytest

pytest.importorskip("cutlass.cute", reason="needs CuTe DSL (nvidia-cutlass-dsl)")

from kda_kernels._cute import key_rows
from kda_kernels.schedule import every

OPERATORS = ("packed_decode", "fused_decode", "packed_fused_decode")


def cuts():
    for name, itemsize in itertools.product(OPERATORS, (2, 4)):
        config = importlib.import_module(f"kda_kernels.{name}.config")
        for schedule in every(config.SCHEDULES, "kv", itemsize):
            if name == "packed_fused_decode":
                cut = key_rows.cut_of_tokens(schedule)
            else:
                cut = key_rows.cut_of_one_token(8 * itemsize, schedule)
            yield pytest.param(cut, id=f"{name}-{cut.width}-{cut.warps}-{cut.columns}")


@pytest.mark.parametrize("cut", cuts())
def test_lanes_of_a_block_hold_every_key_row_and_column_once(cut):
    held = [
        (cut.first(warp, group) + cut.behind_first(i), column)
        for warp in range(cut.warps)
        for lane in range(32)
        for group, column in [cut.place(lane)]
        for i in range(cut.held)
    ]
    assert sorted(held) == list(itertools.product(range(128), range(cut.lanes)))


@pytest.mark.parametrize("cut", cuts())
def test_a_run_of_factors_is_one_aligned_vector(cut):
    firsts = [cut.first(warp, group) for warp in range(cut.warps) for group in range(cut.together)]
    starts = [first + cut.behind_first(i) for first in firsts for i in range(0, cut.held, cut.run)]
    assert cut.held % cut.run == 0
    assert all(start % cut.run == 0 for start in starts)
