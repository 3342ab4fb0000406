"""Faults of index arithmetic that users of such operators reported: N11, N12."""

import pytest
import torch

from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import clone
from kda_kernels.testing.compare import assert_same_bits, assert_untouched

FAR = 2**30 + 64  # elements between slots: slot 2 starts past 2**31
ROW_INPUTS = ("mixed_qkv", "x", "raw_gate", "raw_beta", "output_gate")


def spread(tensor, axis, step):
    """The same numbers with ``step`` elements between two indices of ``axis``.

    The memory in between is reserved, never written: 4 GiB of addresses, a few pages of memory.
    """
    size = (tensor.shape[axis] - 1) * step + tensor[0].numel() + 64
    base = torch.empty(size, dtype=tensor.dtype)
    strides = list(tensor.stride())
    strides[axis] = step
    far = base.as_strided(tensor.shape, strides)
    far.copy_(tensor)
    return far


def small(call, operator, **changes):
    values = call(operator, B=1, N=1, T=1, R=1, H=1, L=3, S=3, **changes)
    values["state_indices"].fill_(2)
    return values


@pytest.mark.parametrize("pool", ["state", "conv_state"])
def test_n11_slots_past_two_to_the_thirty_one_are_reached(operator, run, call, pool):
    if pool == "conv_state" and operator is CONTRACTS[0]:
        layouts = ()
    else:
        layouts = ("SD", "DS") if pool == "conv_state" else ("SD",)
    for window in layouts:
        values = small(call, operator, state_dtype=torch.bfloat16, window=window)
        expected = clone(values)
        values[pool] = spread(values[pool], 0, FAR)
        assert values[pool].stride(0) * 2 == 2147483776
        assert_same_bits(run(operator, values), run(operator, expected), "output")
        for name in ("state", "conv_state"):
            if name in values:
                assert_same_bits(values[name], expected[name], name)
        start = clone(small(call, operator, state_dtype=torch.bfloat16, window=window))
        assert_untouched(values[pool], start[pool], [2], pool)
        del values, expected


def test_n11_rows_past_two_to_the_thirty_one_are_reached(operator, run, call):
    for name in ROW_INPUTS:
        values = call(operator, B=3, N=3, T=1, R=3, H=1, L=3, S=5)
        if name not in values:
            continue
        expected = clone(values)
        axis = int(operator.tensor(name).extents[0][0].text == "1")
        far = spread(values[name].squeeze(0) if axis else values[name], 0, FAR)
        values[name] = far.unsqueeze(0) if axis else far
        assert values[name].stride(axis) == FAR
        assert_same_bits(run(operator, values), run(operator, expected), name)
        assert_same_bits(values["state"], expected["state"], "state")
        del values, far


def test_n12_a_column_of_a_block_table_is_read_at_its_stride(operator, run, call):
    values = call(operator, B=3, N=3, T=1, R=3, H=1, L=3, S=10)
    table = torch.tensor([[3, 9, 9], [5, 9, 9], [2, 9, 9]], dtype=torch.int32)
    column = table[:, 0] if operator is not CONTRACTS[2] else table[:, :1]
    assert column.stride(0) == 3
    expected = clone(values)
    expected["state_indices"], before = column.contiguous(), clone(values)
    values["state_indices"] = column
    assert_same_bits(run(operator, values), run(operator, expected), "output")
    for name in ("state", "conv_state"):
        if name in values:
            assert_same_bits(values[name], expected[name], name)
            assert_untouched(values[name], before[name], [3, 5, 2], name)


def test_n12_int64_indices_are_not_read_as_pairs_of_int32(operator, run, call):
    values = call(operator, B=2, N=2, T=1, R=2, H=1, L=3, S=10, first_slot=0)
    indices = torch.tensor([3, 5]).view_as(values["state_indices"])
    expected, before = clone(values), clone(values)
    values["state_indices"], expected["state_indices"] = indices, indices.int()
    assert_same_bits(run(operator, values), run(operator, expected), "output")
    for name in ("state", "conv_state"):
        if name in values:
            assert_same_bits(values[name], expected[name], name)
            assert_untouched(values[name], before[name], [3, 5], name)


def test_n12_sixteen_bit_indices_are_a_type_error(operator, runners, call):
    for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool):
        values = call(operator)
        values["state_indices"] = values["state_indices"].to(dtype)
        with pytest.raises(TypeError, match="state_indices must be int32 or int64, got"):
            runners["operator"](operator, values)
