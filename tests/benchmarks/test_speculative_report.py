"""bench_speculative.py without a GPU: what is checked before it is timed, and its table."""

import functools

import pytest

import bench_speculative
import kda_ops
import tables

CELL = bench_speculative.Cell("f32", "kv", "DS", heads=2, sequences=3, tokens=2)


def test_a_cell_is_held_against_the_reference_before_it_is_timed():
    values = bench_speculative.values_of(CELL, "cpu")
    call = functools.partial(kda_ops.packed_fused_kda_decode, **values)
    bench_speculative.refuse_if_wrong(CELL, values, call)
    with pytest.raises(SystemExit, match=r"output.*nothing to measure"):
        bench_speculative.refuse_if_wrong(CELL, values, lambda: call() + 1)


def test_the_table_has_a_column_for_every_number_of_tokens_and_says_how_many_steps_it_costs():
    lines = [
        {"state": "bf16", "layout": "vk", "heads": 12, "sequences": 8, "tokens": tokens}
        | {"us": us, "share": 0.5, "one_token_us": 4.0, "steps": us / 4}
        | {"over_triton": peer, "over_triton_one_state": peer and peer / 2}
        for tokens, us, peer in ((2, 6.0, None), (4, 10.0, 3.0))
    ]
    head, _, row = tables.speculative_table({"lines": lines})
    assert head == "| state | layout | H | sequences | one step | T = 2 | T = 4 |"
    assert row.endswith("| 4.0 | 6.0 (0.50) 1.5 steps | 10.0 (0.50) 2.5 steps, 3.0 / 1.5× |")
