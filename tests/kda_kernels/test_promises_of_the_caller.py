"""What the caller promises about values, checked only under KDA_CHECK=1."""

import pytest
import torch

from kda_kernels import promises
from kda_kernels.errors import ContractError
from kda_kernels.plan import CONTRACTS, Launcher, reference
from kda_kernels.testing.cases import clone
from kda_kernels.testing.compare import assert_same_bits

SPECULATIVE = CONTRACTS[2]


def check(operator, values):
    promises.check(operator, tuple(values[a.name] for a in operator.abi))


def allocate(operator, values):
    return Launcher(operator).allocate(**{a.name: values[a.name] for a in operator.arguments})


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def test_a_live_destination_that_appears_twice_is_named(operator, call):
    values = call(operator)
    check(operator, values)
    values["state_indices"].view(-1)[0] = values["state_indices"].view(-1)[-1]
    slot = int(values["state_indices"].view(-1)[0])
    with pytest.raises(
        ContractError, match=f"distinct where live, got slot {slot} twice"
    ) as caught:
        check(operator, values)
    assert caught.value.argument == "state_indices"


def test_null_indices_may_repeat(operator, call):
    values = call(operator, first_slot=1)
    for null in (-1, 0, 9, 2**31 - 1):
        values["state_indices"].fill_(null)
        check(operator, values)


def test_an_index_from_the_end_is_the_slot_it_names(operator, call):
    values = call(operator, first_slot=None)
    flat = values["state_indices"].view(-1)
    flat[0], flat[-1] = -1, 8
    with pytest.raises(ContractError, match="slot 8 twice"):
        check(operator, values)
    values["first_slot"] = 0
    check(operator, values)


def test_calls_without_indices_have_distinct_rows(call):
    for contract in CONTRACTS[:2]:
        check(contract, call(contract) | {"state_indices": None})


def test_bounds_that_decrease_or_do_not_start_at_zero_are_named(call):
    values = call(SPECULATIVE)
    for bounds in ((0, 4, 3), (1, 3, 6), (-1, 3, 6)):
        values["query_start_loc"] = int32(*bounds)
        with pytest.raises(ContractError, match="query_start_loc must be non-decreasing from 0"):
            check(SPECULATIVE, values)


def test_columns_past_a_sequences_length_are_no_destinations(call):
    values = call(SPECULATIVE, T=3, N=3, R=9, S=12)
    values["query_start_loc"] = int32(0, 1, 1, 3)
    values["state_indices"] = int32(1, 7, 7, 1, 7, 7, 2, 3, 7).view(3, 3)
    check(SPECULATIVE, values)
    values["query_start_loc"] = int32(0, 2, 2, 5)
    with pytest.raises(ContractError, match="slot 7 twice"):
        check(SPECULATIVE, values)
    values["state_indices"][0, 0] = 0  # a null sequence writes nothing
    check(SPECULATIVE, values)


def test_row_indices_are_checked_in_place_of_the_table_when_t_is_one(call):
    values = call(SPECULATIVE, T=1, N=3, R=3, S=6)
    values["state_indices"].fill_(2)
    values["t1_state_indices"] = int32(1, 2, 3)
    check(SPECULATIVE, values)
    values["t1_state_indices"] = int32(1, 3, 3)
    with pytest.raises(ContractError, match="t1_state_indices must be distinct"):
        check(SPECULATIVE, values)
    values["query_start_loc"] = int32(0, 1, 2, 2)  # row 2 is nobody's
    check(SPECULATIVE, values)


def test_the_check_runs_before_the_kernel_and_only_when_asked_for(operator, call, monkeypatch):
    values = call(operator)
    values["state_indices"].fill_(3)
    if operator is SPECULATIVE:
        values["num_accepted_tokens"].fill_(1)
    before = clone(values)
    monkeypatch.setenv("KDA_CHECK", "1")
    with pytest.raises(ContractError, match="slot 3 twice"):
        allocate(operator, values)
    for name in ("state", "conv_state"):
        if name in values:
            assert_same_bits(values[name], before[name], name)
    monkeypatch.setenv("KDA_CHECK", "0")
    allocate(operator, values)
    assert not torch.equal(values["state"], before["state"])


def test_a_checked_call_gives_the_result_of_an_unchecked_one(operator, call, monkeypatch):
    values = call(operator)
    same = clone(values)
    expected = allocate(operator, same)
    monkeypatch.setenv("KDA_CHECK", "1")
    assert_same_bits(allocate(operator, values), expected, "output")
    assert_same_bits(values["state"], same["state"], "state")


def test_the_reference_checks_nothing_and_needs_no_environment(operator, call, monkeypatch):
    monkeypatch.setenv("KDA_CHECK", "1")
    values = call(operator, B=0, R=0, N=0)
    output = torch.empty(0, 1, 2, 128) if operator is CONTRACTS[0] else torch.empty(1, 0, 2, 128)
    reference(operator.name)(*[values[a.name] for a in operator.abi], output)
