"""The convolution's window: what is history, what moves, and what stays, for every length."""

import pytest
import torch

from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import clone
from kda_kernels.testing.compare import assert_same_bits

FUSED, SPECULATIVE = CONTRACTS[1:]


@pytest.mark.parametrize("columns", [3, 4, 6])
@pytest.mark.parametrize("window", ["SD", "DS"])
def test_history_is_the_last_three_columns_and_the_window_moves_by_one(run, call, columns, window):
    values = call(FUSED, L=columns, window=window)
    before = clone(values)
    output = run(FUSED, values)
    slots = values["state_indices"].long()
    expected = torch.cat([before["conv_state"][slots][..., 1:], values["x"].unsqueeze(-1)], -1)
    assert_same_bits(values["conv_state"][slots], expected, "windows")
    # Columns before the last three are kept, and read by nothing.
    if columns > 3:
        others = clone(before)
        others["conv_state"][..., : columns - 3] = torch.nan
        assert_same_bits(run(FUSED, others), output, "output")
    # Each of the last three matters.
    for column in range(columns - 3, columns):
        others = clone(before)
        others["conv_state"][..., column] += 1
        assert not torch.equal(run(FUSED, others), output)


def test_a_longer_window_gives_the_bits_of_the_shortest(run, call):
    short = call(FUSED, L=3)
    for columns in (4, 6):
        long = call(FUSED, L=columns)
        long = clone(short) | {"conv_state": long["conv_state"]}
        long["conv_state"][..., -3:] = short["conv_state"]
        expected = clone(short)
        assert_same_bits(run(FUSED, long), run(FUSED, expected), "output")
        assert_same_bits(long["conv_state"][..., -3:], expected["conv_state"], "window")


def test_tap_three_multiplies_the_current_token_and_tap_zero_the_oldest(fused, run, call):
    # One tap at a time: the output follows the column that the tap names and no other.
    for tap in range(4):
        values = call(fused, T=1, N=3, R=3, L=3, H=1)
        values["weight"].zero_()
        values["weight"][:, tap] = 1
        others = clone(values)
        for column in range(3):
            if column != tap:
                others["conv_state"][..., column] = 7
        if tap != 3:
            others["x"] = torch.full_like(others["x"], 7)
        assert_same_bits(run(fused, others), run(fused, values), f"tap {tap}")


@pytest.mark.parametrize("window", ["SD", "DS"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_a_speculative_window_keeps_two_history_columns_and_all_new_tokens(
    run, call, tokens, window
):
    for accepted in range(1, tokens + 1):
        values = call(SPECULATIVE, N=2, T=tokens, R=2 * tokens, S=9, window=window)
        values["num_accepted_tokens"][:] = accepted
        before = clone(values)
        run(SPECULATIVE, values)
        for n in range(2):
            slot = int(values["state_indices"][n, 0])
            old, new = before["conv_state"][slot], values["conv_state"][slot]
            assert_same_bits(new[:, :2], old[:, accepted : accepted + 2], "history")
            rows = values["x"][n * tokens : (n + 1) * tokens]
            assert_same_bits(new[:, 2:], rows.T, "tokens")
            for other in values["state_indices"][n, 1:].tolist():
                assert_same_bits(
                    values["conv_state"][other], before["conv_state"][other], "other slots"
                )


def test_source_history_is_read_at_the_accepted_column_only(run, call):
    values = call(SPECULATIVE, T=3, N=2, R=6)
    for accepted in (1, 2, 3):
        some = clone(values)
        some["num_accepted_tokens"][:] = accepted
        others = clone(some)
        for column in {0, 1, 2, 3, 4} - set(range(accepted - 1, accepted + 2)):
            others["conv_state"][..., column] = torch.nan
        assert_same_bits(run(SPECULATIVE, others), run(SPECULATIVE, some), f"nat {accepted}")


def test_a_short_sequence_writes_only_the_columns_of_its_tokens(run, call):
    values = call(SPECULATIVE, T=4, N=2, R=8, S=9)
    values["query_start_loc"] = torch.tensor([0, 1, 3], dtype=torch.int32)
    values["num_accepted_tokens"] = torch.tensor([2, 4], dtype=torch.int32)
    before = clone(values)
    run(SPECULATIVE, values)
    for n, (start, length, accepted) in enumerate([(0, 1, 2), (1, 2, 4)]):
        slot = int(values["state_indices"][n, 0])
        old, new = before["conv_state"][slot], values["conv_state"][slot]
        assert_same_bits(new[:, :2], old[:, accepted : accepted + 2], "history")
        assert_same_bits(new[:, 2 : 2 + length], values["x"][start : start + length].T, "tokens")
        assert_same_bits(new[:, 2 + length :], old[:, 2 + length :], "columns of no token")
