"""The comparisons: they fail when they should, and say where."""

import math

import pytest
import torch

from kda_kernels.numerics import BUDGET_FACTOR, BUDGET_FLOOR
from kda_kernels.testing.compare import (
    assert_same_bits,
    assert_storage_untouched,
    assert_untouched,
    assert_within_budget,
    error,
)


def test_equal_bits_are_equal_even_where_numbers_are_not():
    nan = torch.tensor([math.nan, 0.0])
    assert_same_bits(nan, nan.clone(), "nan")
    with pytest.raises(AssertionError, match="zero: 1 of 1 elements differ"):
        assert_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]), "zero")
    payload = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    with pytest.raises(AssertionError, match="payload"):
        assert_same_bits(payload[:1], payload[1:], "payload")


def test_the_first_difference_is_named():
    one = torch.zeros(2, 3)
    other = one.clone()
    other[1, 2] = 5
    with pytest.raises(AssertionError, match=r"x: 1 of 6 .* first at \(1, 2\): 0.0 against 5.0"):
        assert_same_bits(one, other, "x")


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_other_shapes_and_types_are_no_equal_bits(other):
    with pytest.raises(AssertionError, match="against"):
        assert_same_bits(torch.zeros(2), other, "x")


def test_slots_outside_the_list_must_keep_their_bits():
    before = torch.randn(4, 3)
    pool = before.clone()
    pool[2] = 0
    assert_untouched(pool, before, [2], "pool")
    with pytest.raises(AssertionError, match=r"pool, slots outside \[1\]"):
        assert_untouched(pool, before, [1], "pool")


def test_padding_before_between_and_after_slots_must_keep_its_bits():
    whole = torch.randn(32)
    for at, seen in ((0, True), (2, False), (5, True), (6, True), (9, False), (31, True)):
        other = whole.clone()
        other[at] = 99
        views = [base.as_strided((3, 4), (7, 1), 1) for base in (other, whole)]
        if seen:
            with pytest.raises(AssertionError, match="padding and guards"):
                assert_storage_untouched(*views, "pool")
        else:
            assert_storage_untouched(*views, "pool")


def test_errors_are_relative_to_the_exact_root_mean_square():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    rms, largest = error(exact + torch.tensor([0.0, 0.5]), exact)
    unit = math.sqrt(12.5)
    assert math.isclose(rms, math.sqrt(0.125) / unit) and math.isclose(largest, 0.5 / unit)


def test_the_budget_is_a_factor_of_the_references_error_and_a_floor():
    exact = torch.ones(100, dtype=torch.float64)
    ulp = torch.finfo(torch.float32).eps / 2
    reference = (exact + 100 * ulp).float()
    limit = BUDGET_FACTOR * 100 + BUDGET_FLOOR
    assert_within_budget((exact + 0.98 * limit * ulp).float(), reference, exact, "x")
    with pytest.raises(AssertionError, match=r"x: rms error .* exceeds"):
        assert_within_budget((exact + 1.05 * limit * ulp).float(), reference, exact, "x")
    one_far = exact.clone()
    one_far[3] += 1.05 * limit * ulp
    with pytest.raises(AssertionError, match=r"x: maximum error .* exceeds"):
        assert_within_budget(one_far.float(), reference, exact, "x")


def test_what_is_not_finite_is_outside_every_budget():
    exact = torch.ones(4, dtype=torch.float64)
    bad = torch.tensor([1.0, 1.0, math.nan, 1.0])
    with pytest.raises(AssertionError, match="x: rms error nan exceeds"):
        assert_within_budget(bad, exact.float(), exact, "x")
    with pytest.raises(AssertionError, match="nothing is measured"):
        assert_within_budget(exact.float(), exact.float(), exact * math.inf, "x")
