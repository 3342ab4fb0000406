"""Faults of padding and of reused slots that users of such operators reported: N04, N05, N06."""

import math

import pytest
import torch

from kda_kernels.testing.cases import clone
from kda_kernels.testing.compare import (
    assert_same_bits,
    assert_storage_untouched,
    assert_untouched,
)

ROW_INPUTS = ("mixed_qkv", "x", "raw_gate", "raw_beta", "output_gate")


def pools(values):
    return {name: values[name] for name in ("state", "conv_state") if name in values}


def batch(call, operator, slots, tokens=1, **changes):
    """A call whose i-th row or sequence has the i-th slot, the sequence's further slots after it.

    ``slots`` are slot numbers; with several tokens, sequence slot s uses 8s, 8s + 1, ... .
    """
    count = len(slots)
    size = 8 if tokens == 1 else 64
    sizes = {"B": count, "N": count, "T": tokens, "R": count * tokens, "S": size, "H": 1, "L": 3}
    values = call(operator, **sizes, slot_padding=8, **changes)
    if "query_start_loc" in values:
        table = [
            [s if t == 0 else (8 * s + t if s > 0 else s) for t in range(tokens)] for s in slots
        ]
        values["state_indices"] = torch.tensor(table)
        values["num_accepted_tokens"].fill_(1)
    else:
        values["state_indices"] = torch.tensor(slots)
    return values


def lengths(operator):
    return (1, 3) if operator.name == "packed_fused_decode" else (1,)


def row_axis(operator, name):
    return int(operator.tensor(name).extents[0][0].text == "1")


def rows_of(output):
    return output.transpose(0, 1) if output.shape[0] == 1 else output


@pytest.mark.parametrize("null", [-1, 8, 2**31 - 1])
def test_n04_skipped_rows_are_zero_and_live_rows_equal_the_run_without_them(
    operator, run, call, null
):
    for tokens in lengths(operator):
        values = batch(call, operator, [3, null, null, 5], tokens)
        if tokens > 1:
            values["state_indices"][1:3] = null if null != 8 else 64
        before = clone(values)
        few = clone(values)
        rows = [r for s in (0, 3) for r in range(s * tokens, (s + 1) * tokens)]
        skipped = range(tokens, 3 * tokens)
        for name in ROW_INPUTS:
            if name in values:
                axis = row_axis(operator, name)
                few[name] = values[name].index_select(axis, torch.tensor(rows))
                for row in skipped:
                    values[name].select(axis, row).fill_(math.nan)
        few["state_indices"] = values["state_indices"][[0, 3]]
        if "query_start_loc" in few:
            few["query_start_loc"] = torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32)
            few["num_accepted_tokens"] = torch.ones(2, dtype=torch.int32)
        output = rows_of(run(operator, values))
        nothing = output[list(skipped)]
        assert_same_bits(nothing, torch.zeros_like(nothing), "skipped rows are +0")
        assert_same_bits(output[rows], rows_of(run(operator, few)), "live rows")
        listed = few["state_indices"].flatten().tolist()
        for name, pool in pools(values).items():
            assert_same_bits(pool, few[name], name)
            assert_untouched(pool, before[name], listed, name)
            assert_storage_untouched(pool, before[name], name)


@pytest.mark.parametrize("first_slot", [0, 1, None])
def test_n05_convolution_and_recurrence_skip_the_same_rows(operator, run, call, first_slot):
    for tokens in lengths(operator):
        values = batch(call, operator, [2, 0, -1, 4], tokens, first_slot=first_slot)
        last = values["state"].shape[0] - 1
        for pool in pools(values).values():
            pool[0], pool[last] = math.nan, -7.5
        before = clone(values)
        output = rows_of(run(operator, values))
        table = values["state_indices"].view(4, -1)
        live = {0: [0, 1, 3], 1: [0, 3], None: [0, 1, 2, 3]}[first_slot]
        slots = sorted({int(s) % (last + 1) for s in table[live].flatten()})
        assert (0 in slots) == (first_slot != 1) and (last in slots) == (first_slot is None)
        windows = sorted({int(s) % (last + 1) for s in table[live, 0]})
        assert_untouched(values["state"], before["state"], slots, "state")
        if "conv_state" in values:
            assert_untouched(values["conv_state"], before["conv_state"], windows, "conv_state")
            for slot in windows:
                assert not torch.equal(values["conv_state"][slot], before["conv_state"][slot])
        for row in set(range(4)) - set(live):
            nothing = output[row * tokens : (row + 1) * tokens]
            assert_same_bits(nothing, torch.zeros_like(nothing), f"row {row}")


def test_n05_no_layer_of_the_call_rewrites_the_indices(operator, run, call):
    values = batch(call, operator, [2, 0, -1, 2**31 - 1])
    indices = values["state_indices"].clone()
    run(operator, values)
    assert torch.equal(values["state_indices"], indices)


@pytest.mark.parametrize("window", ["SD", "DS"])
def test_n06_a_slot_that_was_zeroed_holds_nothing_of_its_former_request(
    operator, run, call, window
):
    for tokens in lengths(operator):
        values = call(
            operator, B=1, N=1, T=tokens, R=tokens, S=8, H=1, L=3, slot_padding=24, window=window
        )
        slots = torch.full_like(values["state_indices"], 4)
        if tokens > 1:
            slots[0, 1:] = torch.tensor([6, 7])
        values["state_indices"] = slots
        if "num_accepted_tokens" in values:
            values["num_accepted_tokens"].fill_(1)
        fresh = clone(values)
        values["state"][4] = math.nan
        if "conv_state" in values:
            values["conv_state"][4] = 1e38
        before = clone(values)
        for name, pool in pools(values).items():
            pool[4].zero_()  # the reset: zero the slot of every pool
            fresh[name].zero_()
            assert_untouched(pool, before[name], [4], name)
            assert_storage_untouched(pool, before[name], name)
        for _ in range(3):
            assert_same_bits(run(operator, values), run(operator, fresh), "outputs")
        for name, pool in pools(values).items():
            assert torch.isfinite(pool[4]).all()
            assert_same_bits(pool[4], fresh[name][4], name)
            assert_untouched(pool, before[name], [4, 6, 7], name)
