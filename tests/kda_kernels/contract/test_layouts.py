"""Each word for a layout as a predicate on sizes and strides."""

import pytest
import torch

from kda_kernels.contract.layout import compact, lies_as, misalignment, strides_match
from kda_kernels.contract.spec import Layout, parse_shape

WINDOW = parse_shape("S, 3*H*D, L")
STATE = parse_shape("S, H, D, D")
ROWS = parse_shape("B, 3*H*D")
GATES = parse_shape("1, B, H, D")


def view(shape, strides, dtype=torch.bfloat16):
    """A tensor of these sizes and strides without memory of its own."""
    return torch.empty(0, dtype=dtype, device="meta").as_strided(shape, strides)


def test_compact_strides_are_those_of_a_contiguous_tensor():
    for shape in ((), (3,), (2, 3, 4), (1, 5, 1, 2)):
        assert compact(shape) == torch.empty(shape).stride()


def test_an_axis_of_one_element_has_any_stride():
    assert strides_match(view((1, 4), (99, 1)), (4, 1))
    assert not strides_match(view((2, 4), (99, 1)), (4, 1))


@pytest.mark.parametrize(
    ("shape", "strides", "legal"),
    [
        ((4, 384, 5), (1920, 1, 384), True),  # SD
        ((4, 384, 5), (1920, 5, 1), True),  # DS
        ((4, 384, 5), (1928, 1, 384), True),  # SD, padded
        ((4, 384, 5), (1924, 5, 1), True),  # DS, padded
        ((4, 384, 5), (1919, 1, 384), False),  # slots overlap
        ((4, 384, 5), (1919, 5, 1), False),
        ((4, 384, 5), (0, 1, 384), False),  # expanded
        ((1, 384, 5), (0, 1, 384), True),  # one slot has no stride
        ((4, 384, 5), (2000, 1, 400), False),  # gaps between columns
        ((4, 384, 5), (2400, 6, 1), False),  # gaps between channels
        ((4, 384, 5), (3840, 2, 768), False),  # gaps between elements
        ((4, 384, 384), (147456, 1, 384), True),  # L = C: strides decide
        ((4, 384, 384), (147456, 384, 1), True),
        ((4, 384, 384), (147456, 1, 1), False),
        ((4, 384, 768), (294912, 1, 384), True),  # L a multiple of C
        ((4, 384, 768), (294912, 768, 1), True),
        ((4, 384, 768), (294912, 384, 1), False),
        ((0, 384, 5), (0, 5, 1), True),
    ],
)
def test_a_window_is_sd_or_ds_and_strides_decide(shape, strides, legal):
    assert lies_as(Layout.WINDOW, view(shape, strides), WINDOW) is legal


@pytest.mark.parametrize(
    ("shape", "strides", "legal"),
    [
        ((5, 2, 128, 128), (32768, 16384, 128, 1), True),
        ((5, 2, 128, 128), (40000, 16384, 128, 1), True),
        ((5, 2, 128, 128), (32767, 16384, 128, 1), False),
        ((5, 2, 128, 128), (32768, 16384, 1, 128), False),  # a transposed view is no layout
        ((5, 2, 128, 128), (36864, 18432, 144, 1), False),
        ((5, 1, 128, 128), (16384, 7, 128, 1), True),  # one head
        ((1, 2, 128, 128), (1, 16384, 128, 1), True),  # one slot
        ((5, 2, 128, 128), (0, 16384, 128, 1), False),
    ],
)
def test_state_slots_are_compact_and_apart(shape, strides, legal):
    assert lies_as(Layout.SLOTS, view(shape, strides), STATE) is legal


def test_packed_rows_may_not_overlap_and_rows_of_gates_may():
    for strides, rows, gates in (
        ((384, 1), True, True),
        ((385, 1), True, True),
        ((383, 1), False, True),
        ((0, 1), False, True),
        ((768, 2), False, False),
    ):
        assert lies_as(Layout.ROWS, view((3, 384), strides), ROWS) is rows
        wide = view((1, 3, 3, 128), (5, strides[0], 128 * strides[1], strides[1]))
        assert lies_as(Layout.READ_ROWS, wide, GATES) is gates
    assert lies_as(Layout.ROWS, view((1, 384), (0, 1)), ROWS)


def test_taps_are_tap_major_or_channel_major():
    taps = parse_shape("3, 4, H*D")
    assert lies_as(Layout.TAPS, view((3, 4, 256), (1024, 256, 1)), taps)
    assert lies_as(Layout.TAPS, view((3, 4, 256), (1024, 1, 4)), taps)
    for strides in ((1024, 256, 2), (1025, 256, 1), (1024, 1, 5), (256, 768, 1)):
        assert not lies_as(Layout.TAPS, view((3, 4, 256), strides), taps)


def test_pools_say_how_they_break_their_alignment():
    state = torch.zeros(4 * 16400)
    assert not misalignment(
        Layout.SLOTS, state.as_strided((4, 1, 128, 128), (16388, 16384, 128, 1))
    )
    odd = state.as_strided((4, 1, 128, 128), (16386, 16384, 128, 1))
    assert misalignment(Layout.SLOTS, odd) == "a slot stride of 16386 elements of 4 bytes"
    one = state.as_strided((1, 1, 128, 128), (16386, 16384, 128, 1))
    assert not misalignment(Layout.SLOTS, one)
    late = state.as_strided((1, 1, 128, 128), (16384, 16384, 128, 1), 1)
    assert misalignment(Layout.SLOTS, late) == "a pool that starts 4 bytes past a multiple of 16"
    window = torch.zeros(8000, dtype=torch.bfloat16)
    assert not misalignment(Layout.WINDOW, window.as_strided((4, 384, 4), (1540, 4, 1), 4))
    odd = window.as_strided((4, 384, 4), (1538, 4, 1))
    assert misalignment(Layout.WINDOW, odd) == "a slot stride of 1538 elements of 2 bytes"
