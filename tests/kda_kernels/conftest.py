"""The three operators and the four ways of running them, as fixtures.

A test that takes ``operator`` and ``run`` states its property for every operator, on the
reference, on the compiled CPU kernel, through the registered torch operator and on a GPU.
"""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kda_ops
from kda_kernels._cute.target import target_of
from kda_kernels.contract.spec import Operator
from kda_kernels.errors import OperatorError
from kda_kernels.plan import CONTRACTS, cpu_kernel, launcher, reference
from kda_kernels.testing.cases import Case, draw, output_of
from kda_kernels.testing.device import run_there
from kda_kernels.testing.violations import violations

SIZES = {"B": 3, "R": 6, "N": 2, "T": 3, "H": 2, "S": 9, "L": 4}

Values = dict[str, Any]


def _by_reference(operator: Operator, values: Values, output: Tensor) -> None:
    reference(operator.name)(*[values[a.name] for a in operator.abi], output)


def _by_kernel(operator: Operator, values: Values, output: Tensor) -> None:
    cpu_kernel(operator.name)(*[values[a.name] for a in operator.abi], output)


def _by_operator(operator: Operator, values: Values, output: Tensor) -> None:
    positional = [values[a.name] for a in operator.abi if not a.keyword]
    keywords = {a.name: values[a.name] for a in operator.abi if a.keyword}
    getattr(torch.ops.kda, operator.name).out(*positional, **keywords, output=output)


def _by_gpu(operator: Operator, values: Values, output: Tensor) -> None:
    run_there("cuda", operator, values, output)


def _runner(name: str) -> Callable[..., Tensor]:
    def run(operator: Operator, values: Values, dtype: torch.dtype | None = None) -> Tensor:
        output = output_of(operator, values, dtype)
        _BACKENDS[name](operator, values, output)
        return output

    return run


_BACKENDS = {
    "reference": _by_reference,
    "kernel": _by_kernel,
    "operator": _by_operator,
    "gpu": _by_gpu,
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Run small tensors on one thread: waking others costs more than their share of the work.

    Tests about threads set their own number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=CONTRACTS, ids=lambda contract: contract.name)
def operator(request: pytest.FixtureRequest) -> Operator:
    """Every operator's contract."""
    return request.param


@pytest.fixture(params=[c for c in CONTRACTS if c.name != "packed_decode"], ids=lambda c: c.name)
def fused(request: pytest.FixtureRequest) -> Operator:
    """The contracts of the operators with a convolution and a norm."""
    return request.param


@pytest.fixture(
    params=[pytest.param(n, marks=pytest.mark.gpu if n == "gpu" else ()) for n in _BACKENDS]
)
def run(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Run a call in place on its pools; return the output, which was full of NaN before."""
    return _runner(request.param)


@pytest.fixture
def runners() -> dict[str, Callable[..., Tensor]]:
    """The ways of running a call by name, for tests that pick."""
    return {name: _runner(name) for name in _BACKENDS}


@pytest.fixture
def call() -> Callable[..., Values]:
    """Draw a small call: sizes in capitals, fields of Case, scalars of the operator by name."""

    def call(operator: Operator, **changes: Any) -> Values:
        sizes = SIZES | {k: changes.pop(k) for k in list(changes) if k in SIZES}
        known = {a.name for a in operator.scalars}
        given = {k: changes.pop(k) for k in list(changes) if k in known}
        return draw(operator, replace(Case(sizes=sizes, scalars=given), **changes))

    return call


@pytest.fixture
def sentences() -> Callable[[Operator], str]:
    """Give every illegal call of an operator and its error, without what all of them share."""

    def sentence_of(operator: Operator, values: Values) -> str:
        given = [values[a.name] for a in operator.arguments]
        try:
            launcher(operator.name).facts(*given)
        except OperatorError as error:
            text = str(error).removeprefix(f"kda::{operator.name}: ")
            return f"{type(error).__name__}: {text}"
        return "no error"

    def sentences(operator: Operator) -> str:
        case = Case(sizes=SIZES | {"L": 3}, absent=frozenset())
        lines = []
        for violation in violations(operator, case):
            lines.append(f"{violation.argument} {violation.deed}")
            text = sentence_of(operator, violation.values)
            lines += textwrap.wrap(
                text, 96, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
        return "\n".join(lines)

    return sentences


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a bundle for this machine's GPU with the packed_decode of 4 heads and 3 rows."""
    directory = tmp_path_factory.mktemp("bundle")
    target = target_of(torch.cuda.get_device_capability())
    assert target is not None
    count = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = {"heads": 4, "rows": 3, "processors": count}
    kda_ops.warmup("packed_decode", arch=target.arch, bundle=directory, **sizes)
    return directory
