"""Faults of shapes and bounds that users of such operators reported: N28, N29 (operators)."""

import math

import pytest
import torch

from kda_kernels.errors import ContractError
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import clone, exact, run_reference, strided
from kda_kernels.testing.compare import (
    assert_same_bits,
    assert_storage_untouched,
    assert_within_budget,
)
from kda_kernels.testing.ties import step_off_ties

PACKED = CONTRACTS[0]


@pytest.mark.parametrize("heads", [1, 3, 6, 8, 12, 16, 24, 32, 48, 64, 96])
def test_n28_every_head_count_is_computed_and_none_is_dropped(operator, runners, call, heads):
    values = call(operator, B=1, N=1, T=1, R=1, S=2, L=3, H=heads, state_dtype=torch.bfloat16)
    step_off_ties(operator, values)
    (output, state), like = exact(operator, values), clone(values)
    reference = run_reference(operator, like)
    got = runners["operator"](operator, values)
    assert_within_budget(got, reference, output, "output")
    assert_within_budget(values["state"], like["state"], state, "state")
    assert got.view(heads, 128).abs().sum(1).min() > 0


def test_n28_other_head_widths_and_convolution_widths_are_refused_by_name(operator, runners, call):
    narrow = call(operator, H=2)
    narrow["state"] = torch.zeros(9, 4, 64, 64)
    before = clone(narrow)
    with pytest.raises(ContractError) as caught:
        runners["operator"](operator, narrow)
    assert caught.value.operator == operator.name
    for name in ("state", "conv_state"):
        if name in narrow:
            assert_same_bits(narrow[name], before[name], name)
    if operator is not PACKED:
        three = call(operator)
        three["weight"] = torch.zeros(3, 3, 256)
        with pytest.raises(ContractError, match=r"weight must be \[3, 4, H\*D\] = \[3, 4, 256\]"):
            runners["operator"](operator, three)


def test_n29_pools_of_different_slot_counts_are_refused(fused, runners, call):
    for state_slots, window_slots in ((5, 4), (4, 5)):
        values = call(fused, B=2, N=1, T=2, R=2, S=5)
        values["state"] = values["state"][:state_slots].clone()
        values["conv_state"] = values["conv_state"][:window_slots]
        before = clone(values)
        with pytest.raises(ContractError, match="conv_state must be") as caught:
            runners["operator"](fused, values)
        assert f"S = {state_slots} from state" in str(caught.value)
        for name in ("state", "conv_state"):
            assert_same_bits(values[name], before[name], name)


def test_n29_indices_beyond_the_pool_touch_no_slot_around_the_view(operator, run, call):
    for index in (4, 5, 2**31 - 1, -1, -(2**31)):
        values = call(operator, B=1, N=1, T=1, R=1, H=1, L=3, S=8, first_slot=0)
        for name in ("state", "conv_state"):
            if name in values:
                values[name] = values[name][2:6]  # four slots with guard slots on both sides
        values["state_indices"].fill_(index)
        before = clone(values)
        output = run(operator, values)
        assert_same_bits(output, torch.zeros_like(output), f"output, {index}")
        for name in ("state", "conv_state"):
            if name in values:
                assert_same_bits(values[name], before[name], f"{name}, {index}")
                assert_storage_untouched(values[name], before[name], f"{name}, {index}")


def test_n29_rows_that_overlap_are_refused(operator, runners, call):
    values = call(operator)
    name = operator.tensors[0].name
    wide = values[name].shape[1]
    flat = torch.zeros(8 * wide, dtype=torch.bfloat16)
    values[name] = flat.as_strided(values[name].shape, (wide - 1, 1))
    before = clone(values)
    with pytest.raises(ContractError, match=f"{name} must be rows at any stride that does not"):
        runners["operator"](operator, values)
    assert_same_bits(values["state"], before["state"], "state")


def test_n29_pools_with_stride_zero_are_refused(operator, runners, call):
    for name in ("state", "conv_state"):
        values = call(operator)
        if name not in values:
            continue
        values[name] = values[name][:1].expand(values[name].shape)
        with pytest.raises(ContractError, match=f"{name} must be slots at any stride"):
            runners["operator"](operator, values)


def test_n29_tensors_of_another_device_are_refused(operator, runners, call):
    for argument in operator.tensors[1:]:
        values = call(operator)
        if values[argument.name] is None:
            continue
        before = values["state"].clone()
        values[argument.name] = values[argument.name].to("meta")
        with pytest.raises(ContractError, match=f"{argument.name} must be on cpu, got meta"):
            runners["operator"](operator, values)
        if argument.name != "state":
            assert torch.equal(values["state"], before)


def test_n29_a_pool_that_begins_off_its_alignment_is_refused(operator, runners, call):
    for name in ("state", "conv_state"):
        values = call(operator, state_dtype=torch.bfloat16)
        if name not in values:
            continue
        values[name] = strided(values[name].contiguous(), 0, 8, 1)
        before = clone(values)
        with pytest.raises(ContractError, match=f"{name} must be .* bytes past a multiple of"):
            runners["operator"](operator, values)
        assert_same_bits(values[name], before[name], name)
        assert math.isnan(float(before[name].as_strided((1,), (1,), 0)))
