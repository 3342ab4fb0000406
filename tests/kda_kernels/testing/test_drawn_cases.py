"""The inputs that tests and benchmarks draw: legal, reproducible, laid out as named."""

import itertools
import math

import pytest
import torch

from kda_kernels.contract.check import validate
from kda_kernels.contract.spec import Layout
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, clone, dimensions, draw, exact, output_of, traffic
from kda_kernels.testing.compare import assert_same_bits
from kda_kernels.testing.liveness import Footprint, footprint, live_slot
from kda_kernels.testing.ties import step_off_ties

SIZES = {"B": 3, "R": 6, "N": 2, "T": 3, "H": 2, "S": 9, "L": 4}


def test_every_drawn_call_is_legal_whatever_its_layout(operator):
    layouts = itertools.product(("SD", "DS"), ("tap-major", "channel-major"))
    gaps = itertools.product((0, 1, 2), (0, 1), (0, 8))
    for (window, taps), (spelling, odd, slots) in itertools.product(layouts, gaps):
        case = Case(
            sizes=SIZES,
            window=window,
            taps=taps,
            spelling=spelling,
            row_padding=3 * odd,
            row_offset=odd,
            slot_padding=slots,
            absent=frozenset(),
        )
        values = draw(operator, case)
        validate(operator, values, output_of(operator, values))
        assert dimensions(operator, values) == {symbol: SIZES[symbol] for symbol in operator.dims}
        if slots:
            assert values["state"].stride(0) == 2 * 128 * 128 + slots


def test_equal_seeds_draw_equal_calls_and_others_do_not(operator):
    one, same, other = (draw(operator, Case(sizes=SIZES, seed=seed)) for seed in (1, 1, 2))
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert_same_bits(value, same[name], name)
    assert not torch.equal(one["state"], other["state"])


def test_a_copy_has_the_same_strides_offset_and_padding_in_memory_of_its_own(operator):
    values = draw(operator, Case(sizes=SIZES, row_padding=5, row_offset=1, slot_padding=8))
    copy = clone(values)
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            assert copy[name].stride() == value.stride()
            assert copy[name].storage_offset() == value.storage_offset()
            assert copy[name].untyped_storage().nbytes() == value.untyped_storage().nbytes()
            assert copy[name].data_ptr() != value.data_ptr()
            assert_same_bits(copy[name], value, name)


def test_the_exact_result_leaves_the_call_as_it_was(operator):
    values = draw(operator, Case(sizes=SIZES, state_dtype=torch.bfloat16))
    before = clone(values)
    output, state = exact(operator, values)
    assert output.dtype is torch.float64 and state.dtype is torch.float64
    for name in ("state", "conv_state"):
        if name in values:
            assert_same_bits(values[name], before[name], name)


def test_padding_is_nan_so_that_reading_it_shows(operator):
    values = draw(operator, Case(sizes=SIZES, row_padding=2, row_offset=1, slot_padding=8))
    for argument in operator.tensors:
        if argument.layout in (Layout.ROWS, Layout.READ_ROWS, Layout.SLOTS, Layout.WINDOW):
            value = values[argument.name]
            size = value.untyped_storage().nbytes() // value.element_size()
            whole = value.as_strided((size,), (1,), 0)
            assert int(torch.isnan(whole).sum()) == size - value.numel() > 0


def test_the_traffic_of_a_decode_step_counts_the_state_twice():
    packed = draw(CONTRACTS[0], Case(sizes=SIZES))
    state = 2 * 3 * 2 * 128 * 128 * 4
    rows = 3 * (3 * 256 + 256 + 2 + 256) * 2  # q, k, v, gate, beta and the output in bf16
    parameters = (2 + 256) * 4  # A_log and dt_bias
    assert traffic(CONTRACTS[0], packed) == state + rows + parameters + 3 * 4


def test_a_slot_is_live_by_the_rule_of_the_contract():
    for index, first_slot, slot in [
        (0, 0, 0),
        (0, 1, None),
        (-1, 0, None),
        (-1, None, 4),
        (-5, None, 0),
        (-6, None, None),
        (4, 1, 4),
        (5, 0, None),
        (2**40, 0, None),
        (-(2**63), None, None),
    ]:
        assert live_slot(index, 5, first_slot) == slot


def test_the_footprint_of_a_ragged_call_is_that_of_its_live_sequences():
    values = draw(CONTRACTS[2], Case(sizes=SIZES | {"N": 4, "R": 7, "S": 20}))
    table = [[2, 3, 4], [5, 6, 7], [0, 9, 10], [11, 0, 13]]
    values["state_indices"] = torch.tensor(table)
    values["query_start_loc"] = torch.tensor([0, 2, 2, 3, 6], dtype=torch.int32)
    values["num_accepted_tokens"] = torch.tensor([3, 1, 1, 0], dtype=torch.int32)
    assert footprint(CONTRACTS[2], values) == Footprint(
        read_rows=[0, 1, 3, 4, 5],
        live_rows=[0, 1, 3, 5],
        state_slots=[2, 3, 11, 13],
        window_slots=[2, 11],
        source_slots=[4, 11],
    )


@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float16])
def test_stepping_off_ties_moves_a_convolution_that_lies_on_one(activation):
    contract = CONTRACTS[1]
    sizes = SIZES | {"B": 1, "H": 1, "L": 3}
    values = draw(contract, Case(sizes=sizes, activation=activation))
    step_off_ties(contract, values)
    calm = clone(values)
    step_off_ties(contract, values)
    assert_same_bits(values["x"], calm["x"], "nothing moves twice")
    # silu is the identity far out: 32 + half a unit lies on a tie.
    half = 2.0 ** (5 - (8 if activation is torch.bfloat16 else 11))
    values["weight"][0, :, 7] = torch.tensor([0.0, 0.0, half, 1.0])
    slot = int(values["state_indices"][0])
    values["conv_state"][slot, 7] = 1.0
    values["x"][0, 7] = 32.0
    step_off_ties(contract, values)
    moved = (values["x"] != calm["x"]).nonzero()[:, 1].tolist()
    assert moved == [7] and float(values["x"][0, 7]) != 32.0


def test_inputs_that_cannot_leave_their_tie_are_reported():
    contract = CONTRACTS[1]
    values = draw(contract, Case(sizes=SIZES | {"B": 1, "H": 1, "L": 3}))
    values["weight"].zero_()
    values["weight"][:, 2] = 32.0 + 2.0**-3
    values["conv_state"].fill_(1.0)
    assert math.isclose(float(values["weight"][0, 2, 0]), 32.125)
    with pytest.raises(RuntimeError, match="elements of x stay on ties"):
        step_off_ties(contract, values)
