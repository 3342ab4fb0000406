"""Faults of speculative decoding that users of such operators reported: N13, N14, N15."""

import math

import pytest
import torch

from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import clone
from kda_kernels.testing.compare import assert_same_bits, assert_untouched

FUSED, SPECULATIVE = CONTRACTS[1:]
ROW_INPUTS = ("raw_gate", "raw_beta", "output_gate")


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def test_n13_a_row_that_accepted_nothing_never_reads_its_neighbours_slot(run, call):
    start = call(SPECULATIVE, T=4, N=2, R=8, S=12, H=2)
    start["state_indices"] = int32(3, 4, 5, 6, 7, 8, 9, 10).view(2, 4)
    start["num_accepted_tokens"] = int32(2, 0)
    outcomes = []
    for fill in (0.0, 1e30, math.nan):
        values = clone(start)
        values["state"][6] = fill
        outcomes.append((run(SPECULATIVE, values), values))
    clamped = clone(start)
    clamped["num_accepted_tokens"] = int32(2, 1)
    outcomes.append((run(SPECULATIVE, clamped), clamped))
    alone = clone(start)
    alone["state_indices"][1] = -1
    first, values = outcomes[0]
    assert_same_bits(run(SPECULATIVE, alone)[0, :4], first[0, :4], "row 0")
    for output, other in outcomes[1:]:
        assert_same_bits(output, first, "outputs")
        assert_same_bits(other["state"], values["state"], "state")
        assert_same_bits(other["conv_state"], values["conv_state"], "windows")


@pytest.mark.parametrize("window", ["SD", "DS"])
def test_n14_rounds_of_drafts_equal_sequential_decode_of_what_was_accepted(run, call, window):
    rounds = (1, 3, 2, 3)
    values = call(SPECULATIVE, T=3, N=1, R=3, S=9, H=2, window=window)
    values["state_indices"] = int32(2, 5, 7).view(1, 3)
    sequential = {a.name: clone(values)[a.name] for a in FUSED.arguments}
    sequential["state_indices"] = int32(2)
    short = values["conv_state"][..., :3]
    sequential["conv_state"] = short.mT.contiguous().mT if window == "SD" else short.contiguous()
    generator = torch.Generator().manual_seed(3)
    after = {}  # the sequential pools after 0, 1, 2 and 3 tokens of the previous round
    after[1] = clone(sequential)
    for accepted in rounds:
        for name in ("x", *ROW_INPUTS):
            values[name] = torch.randn(values[name].shape, generator=generator).bfloat16()
        values["num_accepted_tokens"] = int32(accepted)
        before = clone(values)
        output = run(SPECULATIVE, values)
        step = after[accepted]
        slots = (2, 5, 7)
        after = {}
        for t in range(3):
            step["x"] = values["x"][t : t + 1]
            for name in ROW_INPUTS:
                step[name] = values[name][:, t : t + 1]
            expected = run(FUSED, step)
            torch.testing.assert_close(output[:, t : t + 1], expected, rtol=0.01, atol=1e-5)
            torch.testing.assert_close(
                values["state"][slots[t]], step["state"][2], rtol=1e-5, atol=1e-6
            )
            after[t + 1] = clone(step)
        assert_same_bits(values["conv_state"][2][:, 2:], step["conv_state"][2], "history")
        assert_untouched(values["state"], before["state"], [2, 5, 7], "state")
        assert_untouched(values["conv_state"], before["conv_state"], [2], "the window is idx[n, 0]")


def test_n15_padded_rows_and_empty_sequences_do_not_advance_any_state(run, call):
    values = call(SPECULATIVE, T=3, N=3, R=6, S=11, H=2)
    values["state_indices"] = torch.arange(2, 11).view(3, 3)
    values["num_accepted_tokens"] = int32(1, 2, 1)
    values["query_start_loc"] = int32(0, 3, 3, 4)
    values["x"][4:] = math.nan
    for name in ROW_INPUTS:
        values[name][0, 4:] = math.nan
    before = clone(values)
    output = run(SPECULATIVE, values)
    assert_same_bits(output[0, 4:], torch.zeros_like(output[0, 4:]), "trailing rows")
    assert_untouched(values["state"], before["state"], [2, 3, 4, 8], "state")
    assert_untouched(values["conv_state"], before["conv_state"], [2, 8], "conv_state")
    # Row 3 belongs to slot 8: alone it gives the same.
    alone = clone(before)
    alone["x"] = before["x"][3:4]
    for name in ROW_INPUTS:
        alone[name] = before[name][:, 3:4]
    alone["state_indices"] = torch.tensor([[8, 9, 10]])
    alone["num_accepted_tokens"], alone["query_start_loc"] = int32(1), int32(0, 1)
    assert_same_bits(run(SPECULATIVE, alone)[0, 0], output[0, 3], "row 3")
    assert_same_bits(alone["state"][8], values["state"][8], "slot 8")


def test_n15_an_empty_sequence_does_not_shift_the_others_when_t_is_one(run, call):
    for by_row in (None, torch.tensor([2, 8])):
        values = call(SPECULATIVE, T=1, N=3, R=2, S=10, H=2)
        values["query_start_loc"] = int32(0, 1, 1, 2)
        values["state_indices"] = torch.tensor([[2], [5], [8]])
        values["t1_state_indices"] = by_row
        fused = {a.name: clone(values)[a.name] for a in FUSED.arguments}
        fused["state_indices"] = torch.tensor([2, 8])
        before = clone(values)
        assert_same_bits(run(SPECULATIVE, values), run(FUSED, fused), "output")
        for name in ("state", "conv_state"):
            assert_untouched(values[name], before[name], [2, 8], name)
            assert_same_bits(values[name], fused[name], name)
