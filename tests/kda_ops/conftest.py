"""The public functions by operator and small legal calls of each, as fixtures.

A test that takes ``operator`` states its property for every operator. ``function`` is the
operator's public function and ``call`` draws its arguments by name.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kda_ops
from kda_kernels.contract.spec import Operator
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, draw

SIZES = {"B": 3, "R": 6, "N": 2, "T": 3, "H": 2, "S": 7, "L": 3}

Values = dict[str, Any]


@pytest.fixture(params=CONTRACTS, ids=lambda contract: contract.name, scope="session")
def operator(request: pytest.FixtureRequest) -> Operator:
    """The contract of each operator in turn."""
    return request.param


@pytest.fixture(scope="session")
def function(operator: Operator) -> Callable[..., Tensor]:
    """The operator's public function."""
    return getattr(kda_ops, operator.public_name)


@pytest.fixture(scope="session")
def call(operator: Operator) -> Callable[..., Values]:
    """Draw a legal call; keywords are fields of Case, ``sizes`` only those that differ."""

    def make(sizes: dict[str, int] | None = None, **fields: Any) -> Values:
        values = draw(operator, Case({**SIZES, **(sizes or {})}, **fields))
        values.pop("output_dtype", None)
        return values

    return make


@pytest.fixture(scope="session")
def overload(operator: Operator) -> Callable[[str], torch._ops.OpOverload]:
    """Return an overload of the operator by its name, ``default`` or ``out``."""
    return lambda name: getattr(getattr(torch.ops.kda, operator.name), name)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each device in turn; convolutions in float32 are that and no TF32 meanwhile."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield request.param


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    """Decoding runs without gradients; tests of grad mode switch it on themselves."""
    with torch.no_grad():
        yield
