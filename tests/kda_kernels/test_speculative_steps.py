"""packed_fused_decode over ragged sequences: sources, checkpoints, null tokens, clamped values."""

import math

import pytest
import torch

from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import clone, exact, run_reference
from kda_kernels.testing.compare import assert_same_bits, assert_untouched, assert_within_budget
from kda_kernels.testing.ties import step_off_ties

FUSED, SPECULATIVE = CONTRACTS[1:]


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def assert_equal_calls(run, one, other, what, rows=slice(None)):
    first, second = run(SPECULATIVE, one), run(SPECULATIVE, other)
    assert_same_bits(first[0, rows], second[0, rows], f"output, {what}")
    for name in ("state", "conv_state"):
        assert_same_bits(one[name], other[name], f"{name}, {what}")
    return first


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_one_token_a_sequence_equals_fused_decode_bit_for_bit(run, call, lower_bound, state_dtype):
    for state_layout in ("vk", "kv"):
        for activation in (torch.bfloat16, torch.float16, torch.float32):
            packed = call(
                SPECULATIVE,
                T=1,
                N=4,
                R=4,
                H=3,
                S=8,
                state_dtype=state_dtype,
                activation=activation,
                lower_bound=lower_bound,
                state_layout=state_layout,
                absent=frozenset({"t1_state_indices"}),
            )
            packed["state_indices"][2] = -1
            by_row = clone(packed)
            by_row["t1_state_indices"] = packed["state_indices"][:, 0].long()
            by_row["state_indices"] = torch.zeros_like(packed["state_indices"])  # not consulted
            fused = {a.name: clone(packed)[a.name] for a in FUSED.arguments}
            fused["state_indices"] = packed["state_indices"][:, 0]
            output = run(FUSED, fused)
            for values, what in ((packed, "by sequence"), (by_row, "by row")):
                assert_same_bits(run(SPECULATIVE, values), output, what)
                for name in ("state", "conv_state"):
                    assert_same_bits(values[name], fused[name], f"{name}, {what}")


def test_row_indices_are_ignored_when_a_sequence_may_have_more_tokens(run, call):
    plain = call(SPECULATIVE)
    values = clone(plain)
    values["t1_state_indices"] = torch.full((6,), 8)
    assert_equal_calls(run, plain, values, "T = 3")


def test_row_indices_count_only_rows_in_use(run, call):
    values = call(SPECULATIVE, T=1, N=2, R=4, S=6, first_slot=0)
    values["query_start_loc"] = int32(0, 1, 2)
    values["t1_state_indices"] = int32(3, 1, 4, 5)
    before = clone(values)
    output = run(SPECULATIVE, values)
    assert_same_bits(output[0, 2:], torch.zeros_like(output[0, 2:]), "rows of nobody")
    for name in ("state", "conv_state"):
        assert_untouched(values[name], before[name], [3, 1], name)
        assert not torch.equal(values[name][3], before[name][3])


def test_numbers_of_accepted_tokens_are_clamped_to_one_and_t(run, call):
    plain = call(SPECULATIVE)
    for low, high in ((0, 4), (-3, 8), (-(2**31), 2**31 - 1)):
        values, clamped = clone(plain), clone(plain)
        values["num_accepted_tokens"] = int32(low, high)
        clamped["num_accepted_tokens"] = int32(1, 3)
        assert_equal_calls(run, values, clamped, f"{low}, {high}")


def test_the_source_is_the_slot_of_the_last_accepted_token_and_no_other_is_read(run, call):
    plain = call(SPECULATIVE)
    for accepted in (1, 2, 3):
        values = clone(plain)
        values["num_accepted_tokens"][:] = accepted
        poisoned = clone(values)
        poisoned["state"].fill_(math.nan)
        for n in range(2):
            slot = int(values["state_indices"][n, accepted - 1])
            poisoned["state"][slot] = values["state"][slot]
        output = run(SPECULATIVE, values)
        assert_same_bits(run(SPECULATIVE, poisoned), output, f"accepted {accepted}")
        listed = values["state_indices"].flatten().long()
        assert_same_bits(poisoned["state"][listed], values["state"][listed], "checkpoints")


def test_a_source_may_be_one_of_the_sequences_own_destinations(run, call):
    # Whatever the source's place in the row, the result is that of a source elsewhere.
    for tokens in (1, 2, 4):
        plain = call(SPECULATIVE, T=tokens, N=1, R=tokens, S=8)
        line = plain["state_indices"][0].tolist()
        for accepted in range(1, tokens + 1):
            values = clone(plain)
            values["num_accepted_tokens"][:] = accepted
            before = values["state"][line[accepted - 1]].clone()
            elsewhere = clone(values)
            spare = next(s for s in range(1, 8) if s not in line)
            elsewhere["state"][spare] = before
            elsewhere["state_indices"][0, accepted - 1] = spare
            if accepted == 1:  # column 0 names the window too
                elsewhere["conv_state"][spare] = values["conv_state"][line[0]]
            output = run(SPECULATIVE, values)
            assert_same_bits(run(SPECULATIVE, elsewhere), output, f"{tokens}, {accepted}")


def test_every_token_leaves_the_checkpoint_that_a_shorter_call_would_end_with(run, call):
    for state_dtype in (torch.float32, torch.bfloat16):
        full = call(SPECULATIVE, T=4, N=1, R=4, S=7, state_dtype=state_dtype)
        start = clone(full)
        output = run(SPECULATIVE, full)
        for length in range(1, 4):
            part = clone(start)
            part["query_start_loc"] = int32(0, length)
            some = run(SPECULATIVE, part)
            assert_same_bits(some[0, :length], output[0, :length], "output")
            slots = part["state_indices"][0].tolist()
            for slot in slots[:length]:
                assert_same_bits(part["state"][slot], full["state"][slot], "checkpoint")
            assert_untouched(part["state"], start["state"], slots[:length], "state")


def test_sequences_do_not_depend_on_each_other(run, call):
    both = call(SPECULATIVE, T=3, N=3, R=9, S=11)
    both["query_start_loc"] = int32(0, 3, 4, 6)
    start = clone(both)
    output = run(SPECULATIVE, both)
    for n, (first, last) in enumerate([(0, 3), (3, 4), (4, 6)]):
        alone = clone(start)
        for other in {0, 1, 2} - {n}:
            alone["state_indices"][other] = -1
        some = run(SPECULATIVE, alone)
        assert_same_bits(some[0, first:last], output[0, first:last], f"sequence {n}")


def test_a_token_without_a_slot_gives_zero_and_the_recurrence_goes_on_through_it(run, call):
    plain = call(SPECULATIVE, T=3, N=1, R=3)
    plain["num_accepted_tokens"][:] = 1
    values = clone(plain)
    values["state_indices"][0, 1] = -1
    before = clone(values)
    output, expected = run(SPECULATIVE, values), run(SPECULATIVE, plain)
    assert_same_bits(output[0, [0, 2]], expected[0, [0, 2]], "tokens with a slot")
    assert_same_bits(output[0, 1], torch.zeros_like(output[0, 1]), "the token without")
    assert_same_bits(values["conv_state"], plain["conv_state"], "window")
    slots = [int(plain["state_indices"][0, t]) for t in (0, 2)]
    assert_same_bits(values["state"][slots], plain["state"][slots], "checkpoints")
    assert_untouched(values["state"], before["state"], slots, "state")


@pytest.mark.parametrize("column", ["window", "source"])
def test_a_sequence_without_a_window_or_a_source_is_null_as_a_whole(run, call, column):
    values = call(SPECULATIVE, T=3, N=2, R=6, first_slot=1)
    values["num_accepted_tokens"] = int32(2, 2)
    values["state_indices"][0, 0 if column == "window" else 1] = 0
    values["x"][:3] = math.nan
    before = clone(values)
    output = run(SPECULATIVE, values)
    assert_same_bits(output[0, :3], torch.zeros_like(output[0, :3]), "rows")
    assert output[0, 3:].all(-1).any()
    live = values["state_indices"][1].tolist()
    assert_untouched(values["state"], before["state"], live, "state")
    assert_untouched(values["conv_state"], before["conv_state"], live[:1], "conv_state")


def test_rows_past_the_longest_length_and_past_the_last_bound_are_null(run, call):
    values = call(SPECULATIVE, T=2, N=2, R=8, S=9)
    cut = clone(values)
    values["query_start_loc"] = int32(0, 4, 6)  # four rows, of which a sequence may use two
    for row in (2, 3, 6, 7):
        values["x"][row] = math.nan
        for name in ("raw_gate", "raw_beta", "output_gate"):
            values[name][0, row] = math.nan
    output = run(SPECULATIVE, values)
    assert_same_bits(output[0, [2, 3, 6, 7]], torch.zeros_like(output[0, :4]), "null rows")
    cut["query_start_loc"] = int32(0, 2, 4)
    for name in ("raw_gate", "raw_beta", "output_gate"):
        cut[name][0, 2:4] = cut[name][0, 4:6].clone()
    cut["x"][2:4] = cut["x"][4:6].clone()
    assert_same_bits(run(SPECULATIVE, cut)[0, :4], output[0, [0, 1, 4, 5]], "live rows")
    for name in ("state", "conv_state"):
        assert_same_bits(values[name], cut[name], name)


def test_bounds_outside_the_packed_rows_are_clamped_and_reach_no_memory(run, call):
    plain = call(SPECULATIVE, T=3, N=2, R=5)
    plain["query_start_loc"] = int32(0, 3, 5)
    values = clone(plain)
    for bounds in ((0, 3, 2**31 - 1), (-7, 3, 100)):
        values = clone(plain) | {"query_start_loc": int32(*bounds)}
        assert_equal_calls(run, values, clone(plain), f"{bounds}")
    nothing = clone(plain) | {"query_start_loc": int32(-(2**31), -5, -1)}
    output = run(SPECULATIVE, nothing)
    assert_same_bits(output, torch.zeros_like(output), "output")
    assert_same_bits(nothing["state"], plain["state"], "state")


def test_rows_before_the_first_sequence_are_null_too(run, call):
    # A caller promises to start at 0; whoever does not gets zeros, and the rest is right.
    for tokens in (1, 3):
        values = call(SPECULATIVE, T=tokens, N=2, R=2 * tokens + 2, S=9)
        values["t1_state_indices"] = None
        values["query_start_loc"] = int32(2, 2 + tokens, 2 + 2 * tokens)
        cut = clone(values) | {"query_start_loc": int32(0, tokens, 2 * tokens)}
        for name in ("x", "raw_gate", "raw_beta", "output_gate"):
            axis = 1 if values[name].shape[0] == 1 else 0
            cut[name] = values[name].narrow(axis, 2, 2 * tokens)
        output = run(SPECULATIVE, values)
        assert_same_bits(output[0, :2], torch.zeros_like(output[0, :2]), "null rows")
        assert_same_bits(output[0, 2:], run(SPECULATIVE, cut)[0], "live rows")
        for name in ("state", "conv_state"):
            assert_same_bits(values[name], cut[name], name)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_both_gates_and_both_pools_serve_every_number_of_tokens(run, call, tokens):
    for lower_bound in (-5.0, None):
        for state_dtype in (torch.float32, torch.bfloat16):
            values = call(
                SPECULATIVE,
                T=tokens,
                N=2,
                R=2 * tokens,
                S=9,
                H=1,
                lower_bound=lower_bound,
                state_dtype=state_dtype,
            )
            step_off_ties(SPECULATIVE, values)
            truth, like = exact(SPECULATIVE, values), clone(values)
            reference = run_reference(SPECULATIVE, like)
            what = f"T = {tokens}, {lower_bound}, {state_dtype}"
            assert_within_budget(run(SPECULATIVE, values), reference, truth[0], what)
            assert_within_budget(values["state"], like["state"], truth[1], what)


def test_all_tokens_at_once_equal_one_token_at_a_time(run, call):
    for tokens in (2, 3, 4):
        for lower_bound in (-5.0, None):
            full = call(SPECULATIVE, T=tokens, N=1, R=tokens, S=8, lower_bound=lower_bound)
            full["num_accepted_tokens"][:] = 1
            step = {a.name: clone(full)[a.name] for a in FUSED.arguments}
            first = full["state_indices"][0, :1]
            step["state_indices"] = first
            step["conv_state"] = step["conv_state"][..., :3].mT.contiguous().mT
            rows = []
            for t in range(tokens):
                one = dict(step)
                one["x"] = step["x"][t : t + 1]
                for name in ("raw_gate", "raw_beta", "output_gate"):
                    one[name] = step[name][:, t : t + 1]
                rows.append(run(FUSED, one))
            output = run(SPECULATIVE, full)
            torch.testing.assert_close(output, torch.cat(rows, 1), rtol=0.01, atol=1e-4)
            last = int(full["state_indices"][0, -1])
            torch.testing.assert_close(
                full["state"][last], step["state"][int(first)], rtol=1e-5, atol=1e-6
            )
