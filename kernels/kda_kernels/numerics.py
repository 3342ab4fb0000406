"""Precision rules of all operators and how far a kernel may be from float64, each with its reason.

Lives here: constants of the mathematics and the error budget. Not here: the comparison itself
(testing/compare.py) and the mathematics (reference.py of each operator).
"""

from __future__ import annotations

L2_EPS = 1e-6
"""Added to the sum of squares of q and k, inside the root: the value every public implementation
of KDA uses (Kimi-Linear, flash-linear-attention, FlashInfer)."""

SOFTPLUS_THRESHOLD = 20.0
"""softplus(a) = a above this, as torch.nn.functional.softplus; the neglected log1p(exp(-a)) is
below 2.1e-9, under half a unit in the last place of a float32 at 20."""

BUDGET_FACTOR = 3.0
"""A kernel's error against float64 may be this many times the float32 reference's own error.

Both sum 128 products; a kernel sums them in another order and uses its own exp (at most 2 units in
the last place), so its error is of the same size but not the same. Measured over 864 random calls
(three operators, H 1 and 6; AMD Zen 3, AVX2): at most 1.3 times the reference's root mean square
and 2.5 times its maximum, the latter for float32 outputs. Where a convolution lies on a rounding
tie, no factor holds: testing/ties.py steps off such inputs first."""

BUDGET_FLOOR = 4.0
"""Units in the last place of the output's type that are granted whatever the reference's error is:
where the reference happens to round to the exact result its own error is zero."""
