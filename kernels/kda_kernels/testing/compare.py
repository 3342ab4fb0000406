"""Comparisons that fail with a sentence: error budgets against float64, and raw bits.

Lives here: how far is too far (numerics.py holds the numbers) and what untouched means. Not here:
inputs (cases.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_kernels.numerics import BUDGET_FACTOR, BUDGET_FLOOR

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """Return the raw bits as integers, so that NaN payloads and signs of zero count."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Raise AssertionError unless two tensors are equal bit for bit."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: {actual.dtype}{list(actual.shape)} against "
            f"{expected.dtype}{list(expected.shape)}"
        )
    different = (bits(actual) != bits(expected)).nonzero()
    if len(different):
        where = tuple(different[0].tolist())
        raise AssertionError(
            f"{what}: {len(different)} of {actual.numel()} elements differ, first at {where}: "
            f"{actual[where].item()} against {expected[where].item()}"
        )


def assert_untouched(pool: Tensor, before: Tensor, slots: list[int], what: str) -> None:
    """Raise AssertionError unless every slot outside ``slots`` kept its bits."""
    others = [slot for slot in range(pool.shape[0]) if slot not in slots]
    assert_same_bits(pool[others], before[others], f"{what}, slots outside {slots}")


def assert_storage_untouched(pool: Tensor, before: Tensor, what: str) -> None:
    """Raise AssertionError unless everything around a pool's elements kept its bits.

    Both tensors are views of storages of their own with equal strides; the view's own elements are
    masked out, so guards before, after and between slots are compared.
    """
    whole, old = _storage(pool), _storage(before)
    mask = torch.ones(whole.numel(), dtype=torch.bool)
    mask.as_strided(pool.shape, pool.stride(), pool.storage_offset()).fill_(False)
    assert_same_bits(whole[mask], old[mask], f"{what}, padding and guards")


def _storage(tensor: Tensor) -> Tensor:
    """Return a tensor's whole storage in its dtype."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), 0, (size,), (1,))


def error(actual: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the error's root mean square and its maximum, relative to the exact RMS."""
    wide = exact.to(torch.float64)
    difference = actual.to(torch.float64) - wide
    unit = wide.square().mean().sqrt().clamp_min(1e-300)
    rms = difference.square().mean().sqrt() / unit
    return float(rms), float(difference.abs().max() / unit)


def assert_within_budget(actual: Tensor, reference: Tensor, exact: Tensor, what: str) -> None:
    """Raise AssertionError unless ``actual`` is about as near to float64 as the reference is.

    Args:
        actual: the kernel's result.
        reference: the float32 reference's result, in the same type.
        exact: the float64 result, not rounded.
        what: named in the error.
    """
    if not bool(torch.isfinite(exact).all()):
        raise AssertionError(f"{what}: the exact result is not finite, so nothing is measured")
    ulp = torch.finfo(actual.dtype).eps / 2
    for kind, mine, theirs in zip(
        ("rms", "maximum"), error(actual, exact), error(reference, exact), strict=True
    ):
        budget = BUDGET_FACTOR * theirs + BUDGET_FLOOR * ulp
        if not mine <= budget:
            raise AssertionError(
                f"{what}: {kind} error {mine:.3g} exceeds {budget:.3g} "
                f"({BUDGET_FACTOR} x the reference's {theirs:.3g})"
            )
