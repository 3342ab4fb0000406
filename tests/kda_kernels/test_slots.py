"""One slot rule everywhere: which rows are live, and that null rows touch nothing.

The rule itself is worked out in kda_kernels.testing.liveness, number by number.
"""

import math

import pytest
import torch

from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import clone, exact, run_reference
from kda_kernels.testing.compare import (
    assert_same_bits,
    assert_storage_untouched,
    assert_untouched,
    assert_within_budget,
)
from kda_kernels.testing.liveness import footprint
from kda_kernels.testing.ties import step_off_ties

INT32 = (-1, 0, -(2**31), 2**31 - 1)
INT64 = (*INT32, 2**40, -(2**40), 2**31, 2**32 + 2, -(2**63), 2**63 - 1)


def rows_of(output):
    """Output rows on axis 0, for [B, 1, H, D] and [1, B, H, D] alike."""
    return output.transpose(0, 1) if output.shape[0] == 1 else output


def set_indices(values, indices, dtype):
    """Give row i (or every token of sequence i) the i-th index."""
    table = torch.tensor(indices, dtype=dtype)
    if "query_start_loc" in values:
        values["state_indices"] = table.unsqueeze(1).expand(-1, 1).contiguous()
        values["num_accepted_tokens"] = torch.ones(len(indices), dtype=torch.int32)
        values["query_start_loc"] = torch.arange(len(indices) + 1, dtype=torch.int32)
    else:
        values["state_indices"] = table


def pools(values):
    return {name: values[name] for name in ("state", "conv_state") if name in values}


def draw_rows(call, operator, indices, dtype, **changes):
    """A call with one row per index and T = 1 where the operator has sequences."""
    count = len(indices)
    slots = changes.pop("S", 6)
    sizes = {"B": count, "R": count, "N": count, "T": 1, "S": max(slots, count + 3)}
    values = call(operator, **sizes, H=1, L=3, slot_padding=8, **changes)
    for name in pools(values):
        pool = values[name]
        values[name] = pool.as_strided((slots, *pool.shape[1:]), pool.stride())
    set_indices(values, indices, dtype)
    return values


@pytest.mark.parametrize("first_slot", [0, 1, 2, None])
def test_a_row_is_live_exactly_when_its_index_names_a_slot(operator, run, call, first_slot):
    slots = 6
    for dtype, strange in ((torch.int32, INT32), (torch.int64, INT64)):
        indices = [*strange, slots, slots + 1, -slots - 1, 1, 3, 5, 2]
        if first_slot is None:  # every index names its own slot, from the end or from the start
            indices = [-1 if i == 5 else i for i in indices if i not in (0, -1)] + [-slots]
        values = draw_rows(call, operator, indices, dtype, S=slots, first_slot=first_slot)
        before = clone(values)
        found = footprint(operator, values)
        assert set(found.state_slots) == set(range(first_slot or 0, slots)) - {4}
        for row in set(range(len(indices))) - set(found.live_rows):
            rows_of(values[operator.tensors[0].name])[row] = math.nan
        expected = clone(values)
        wanted = run_reference(operator, expected)
        output = run(operator, values)
        for row, index in enumerate(indices):
            got, want = rows_of(output)[row], rows_of(wanted)[row]
            assert bool(got.any()) == (row in found.live_rows), f"index {index}"
            torch.testing.assert_close(got, want, rtol=0.02, atol=1e-3)
        for name, pool in pools(values).items():
            assert_untouched(pool, before[name], found.state_slots, name)
            assert_storage_untouched(pool, before[name], name)
            for slot in found.state_slots:
                assert not torch.equal(pool[slot], before[name][slot])


def test_first_slot_none_reads_negative_indices_as_torch_does(operator, run, call):
    values = draw_rows(call, operator, [-1, 0, -6], torch.int64, first_slot=None)
    same = clone(values)
    set_indices(same, [5, 0, 0], torch.int64)
    set_indices(values, [-1, 7, -6], torch.int64)
    set_indices(same, [5, 7, 0], torch.int64)
    assert_same_bits(run(operator, values), run(operator, same), "outputs")
    for name, pool in pools(values).items():
        assert_same_bits(pool, same[name], name)


def test_null_rows_are_exactly_plus_zero_whatever_their_inputs_hold(operator, run, call):
    for state_dtype in (torch.float32, torch.bfloat16):
        for activation in (torch.bfloat16, torch.float32):
            values = draw_rows(
                call,
                operator,
                [2, -1, 4, 99],
                torch.int32,
                state_dtype=state_dtype,
                activation=activation,
                first_slot=0,
            )
            clean = clone(values)
            for name in ("mixed_qkv", "x", "raw_beta", "raw_gate", "output_gate"):
                if name in values:
                    axis = operator.tensor(name).extents[0][0].text == "1"
                    for row, bad in ((1, math.nan), (3, -math.inf)):
                        values[name].select(int(axis), row).fill_(bad)
            output, expected = rows_of(run(operator, values)), rows_of(run(operator, clean))
            assert_same_bits(output, expected, "outputs")
            assert_same_bits(output[[1, 3]], torch.zeros_like(output[[1, 3]]), "null rows")


def test_no_pool_byte_is_read_for_a_null_row(operator, run, call):
    values = draw_rows(call, operator, [-1, 3, 6], torch.int32, first_slot=0)
    for name, pool in pools(values).items():
        keep = clone(values)[name][3]
        pool.fill_(math.nan)
        pool[3] = keep
        values[name] = pool
    output = rows_of(run(operator, values))
    assert torch.isfinite(output).all()
    assert torch.isfinite(values["state"][3]).all()


def test_without_indices_row_i_uses_slot_i_and_first_slot_is_not_consulted(run, call):
    for operator in CONTRACTS[:2]:
        for first_slot in (0, 1, 5, None):
            values = call(operator, B=3, S=4, first_slot=first_slot)
            same = clone(values)
            values["state_indices"] = None
            same["state_indices"], same["first_slot"] = torch.arange(3), 0
            assert_same_bits(run(operator, values), run(operator, same), "outputs")
            for name, pool in pools(values).items():
                assert_same_bits(pool, same[name], name)


def test_live_rows_do_not_depend_on_null_rows_beside_them(operator, run, call):
    values = draw_rows(call, operator, [4, -1, 2, 2**31 - 1], torch.int32, first_slot=0)
    few = {
        name: value.index_select(
            int(operator.tensor(name).extents[0][0].text == "1"), torch.tensor([0, 2])
        )
        if name in ("mixed_qkv", "x", "raw_gate", "raw_beta", "output_gate")
        else value
        for name, value in clone(values).items()
    }
    set_indices(few, [4, 2], torch.int32)
    assert_same_bits(rows_of(run(operator, values))[[0, 2]], rows_of(run(operator, few)), "rows")
    for name, pool in pools(values).items():
        assert_same_bits(pool, few[name], name)


def test_calls_without_rows_or_sequences_are_legal_and_touch_nothing(operator, run, call):
    empty = [{"B": 0, "R": 0, "N": 0}]
    if "query_start_loc" in {a.name for a in operator.tensors}:
        empty = [{"R": 0, "N": 0}, {"R": 0, "N": 2}, {"R": 3, "N": 0}, {"R": 0, "N": 0, "T": 1}]
    for sizes in empty:
        values = call(operator, **sizes)
        before = clone(values)
        output = run(operator, values)
        assert_same_bits(output, torch.zeros_like(output), "output")
        for name, pool in pools(values).items():
            assert_same_bits(pool, before[name], name)


def test_an_empty_pool_makes_every_row_null(operator, run, call):
    values = call(operator, S=9)
    for name, pool in pools(values).items():
        values[name] = pool[:0]
    values["first_slot"] = 0
    output = run(operator, values)
    assert_same_bits(output, torch.zeros_like(output), "output")


def test_indices_of_any_stride_and_width_name_the_same_slots(operator, run, call):
    plain = call(operator)
    expected = clone(plain)
    output = run(operator, expected)
    for dtype in (torch.int32, torch.int64):
        for spread in ("gaps", "reversed axes", "offset"):
            values = clone(plain)
            indices = values["state_indices"].to(dtype)
            shape = indices.shape
            if spread == "gaps":
                wide = torch.full((*shape, 3), 8, dtype=dtype)
                wide[..., 0] = indices
                values["state_indices"] = wide[..., 0]
            elif spread == "reversed axes":
                values["state_indices"] = (
                    indices.mT.contiguous().mT
                    if indices.dim() == 2
                    else (indices.unsqueeze(1).repeat(1, 2)[:, 1])
                )
            else:
                wide = torch.cat([torch.tensor([7], dtype=dtype), indices.flatten()])
                values["state_indices"] = wide[1:].view(shape)
            assert_same_bits(run(operator, values), output, f"{spread}, {dtype}")
            for name, pool in pools(values).items():
                assert_same_bits(pool, expected[name], f"{name}, {spread}, {dtype}")


def test_bf16_and_float32_pools_are_within_budget_with_null_rows_among_live_ones(
    operator, run, call
):
    for state_dtype in (torch.float32, torch.bfloat16):
        values = draw_rows(
            call, operator, [3, -1, 5], torch.int64, state_dtype=state_dtype, first_slot=0
        )
        step_off_ties(operator, values)
        truth, like = exact(operator, values), clone(values)
        reference = run_reference(operator, like)
        output = run(operator, values)
        assert_within_budget(output, reference, truth[0], "output")
        assert_within_budget(values["state"], like["state"], truth[1], "state")
