"""The validator: every rule of every contract raises its own error before anything is written.

The sentences themselves are in test_sentences_of_*.py.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kda_kernels.contract.check import validate
from kda_kernels.errors import ContractError, DtypeError, OperatorError
from kda_kernels.plan import CONTRACTS, Launcher
from kda_kernels.testing.cases import Case, clone, draw, output_of
from kda_kernels.testing.compare import assert_same_bits
from kda_kernels.testing.violations import violations

SIZES = {"B": 3, "R": 6, "N": 2, "T": 3, "H": 2, "S": 9, "L": 3}
EVERYTHING = Case(sizes=SIZES, absent=frozenset())


def run(contract, values, output=None):
    """Call the operator as a launcher without plans gets it from the dispatcher."""
    launcher = Launcher(contract)
    if output is None:
        launcher.allocate(**{a.name: values[a.name] for a in contract.arguments})
    else:
        given = {a.name: values[a.name] for a in contract.abi}
        launcher.write(**given, output=output)


def storages(values):
    """Copies of every byte of every tensor on the CPU."""
    return {
        name: torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).clone()
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and value.device.type == "cpu"
    }


def test_every_broken_rule_raises_its_error_and_writes_nothing(operator):
    count = 0
    for violation in violations(operator, EVERYTHING):
        what = f"{violation.argument} {violation.deed}"
        before = storages(violation.values)
        with pytest.raises(OperatorError) as caught:
            run(operator, violation.values)
        assert type(caught.value) is violation.error, what
        for name, old in before.items():
            storage = violation.values[name].untyped_storage()
            assert_same_bits(torch.empty(0, dtype=torch.uint8).set_(storage), old, what)
        count += 1
    assert count > 45


def test_errors_carry_operator_argument_rule_and_fact(operator):
    elsewhere = {
        (operator.tensors[0].name, "is on another device"),  # then the next tensor is elsewhere
        ("state_indices", "lost its last element"),  # then T is smaller, and the window too long
    }
    for violation in violations(operator, EVERYTHING):
        with pytest.raises(OperatorError) as caught:
            run(operator, violation.values)
        error = caught.value
        assert error.operator == operator.name
        if (violation.argument, violation.deed) not in elsewhere:
            assert error.argument == violation.argument
        sentence = f"kda::{error.operator}: {error.argument} must be {error.rule}, got {error.fact}"
        source = f" ({error.source})" if error.source else ""
        assert str(error) == sentence + source


def test_shapes_say_where_their_numbers_came_from(operator):
    shapes = [v for v in violations(operator, EVERYTHING) if v.deed == "lost its last element"]
    for violation in shapes:
        with pytest.raises(ContractError) as caught:
            run(operator, violation.values)
        if caught.value.argument not in ("norm_weight", "conv_state"):
            assert "from" in caught.value.source


def test_a_legal_call_yields_its_dimensions_types_and_the_outputs_metadata(operator):
    values = draw(operator, EVERYTHING)
    facts = validate(operator, values)
    assert facts.dims == {symbol: SIZES[symbol] for symbol in operator.dims}
    assert facts.activation is torch.bfloat16 and facts.output_dtype is torch.bfloat16
    assert facts.device == torch.device("cpu")
    assert facts.output_shape == tuple(output_of(operator, values).shape)
    if operator is CONTRACTS[0]:
        wide = validate(operator, values | {"output_dtype": torch.float32})
        assert wide.output_dtype is torch.float32


def test_an_output_that_cannot_take_the_result_is_refused(operator):
    values = draw(operator, EVERYTHING)
    good = output_of(operator, values)
    other = torch.float16 if operator is CONTRACTS[0] else torch.float32
    rows = operator.rows
    for bad, error, words in (
        (good[..., :-1].contiguous(), ContractError, rf"output must be \[.*{rows}, .*\] = "),
        (good[0], ContractError, rf"output must be \[.*{rows}, .*\] = "),
        (good.to(other), DtypeError, "output must be bfloat16"),
        (good.to("meta"), ContractError, "output must be on cpu, got meta"),
        (good.mT.contiguous().mT, ContractError, "output must be contiguous, got strides"),
    ):
        before = clone(values)
        with pytest.raises(error, match=words):
            run(operator, values, bad)
        for name in ("state", "conv_state"):
            if name in values:
                assert_same_bits(values[name], before[name], name)
    with pytest.raises(DtypeError, match="output must be a tensor, got list"):
        run(operator, values, [])


def test_more_rows_than_slots_need_indices():
    for contract in CONTRACTS[:2]:
        values = draw(contract, Case(sizes=SIZES | {"B": 4, "S": 3, "H": 1}))
        values["state_indices"] = None
        with pytest.raises(ContractError, match=r"more rows than slots \(4 > 3\), got None"):
            run(contract, values)
        assert not torch.isnan(values["state"]).any()


def test_an_input_that_wants_a_gradient_is_refused_under_grad_mode_only(operator):
    floating = [a.name for a in operator.tensors if not a.dtypes[0].startswith("int")]
    for name in floating:
        values = draw(operator, EVERYTHING)
        values[name] = values[name].clone().requires_grad_()
        with pytest.raises(ContractError, match=f"{name} must be a tensor without requires_grad"):
            run(operator, values)
        with torch.no_grad():
            run(operator, values)


def test_scalars_of_a_wrong_type_are_a_dtype_error(operator):
    for name, bad in (
        ("scale", "1"),
        ("scale", True),
        ("lower_bound", "x"),
        ("first_slot", 1.5),
        ("first_slot", "0"),
        ("state_layout", 3),
        ("state_layout", None),
    ):
        values = draw(operator, EVERYTHING) | {name: bad}
        with pytest.raises(DtypeError, match=f"{name} must be"):
            validate(operator, values)


def test_integers_serve_as_floats_and_infinite_integers_do_not_exist(operator):
    values = draw(operator, EVERYTHING)
    validate(operator, values | {"scale": 1, "lower_bound": -5})
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ContractError, match="scale must be a finite number"):
            validate(operator, values | {"scale": bad})


def test_sparse_and_other_non_strided_tensors_are_refused(operator):
    values = draw(operator, EVERYTHING)
    first = operator.tensors[0].name
    with pytest.raises(ContractError, match=f"{first} must be a dense strided tensor"):
        validate(operator, values | {first: values[first].to_sparse()})


def test_a_window_of_two_columns_is_too_short():
    contract = CONTRACTS[1]
    values = draw(contract, EVERYTHING)
    values["conv_state"] = values["conv_state"][..., 1:].clone()
    with pytest.raises(ContractError, match="with L >= 3, got"):
        validate(contract, values)


def test_zero_heads_and_zero_tokens_are_refused(operator):
    values = draw(operator, EVERYTHING)
    with pytest.raises(ContractError, match="with H >= 1"):
        validate(operator, values | {"state": values["state"][:, :0]})
    if operator is CONTRACTS[2]:
        empty = values["state_indices"][:, :0]
        with pytest.raises(ContractError, match="with T >= 1"):
            validate(operator, values | {"state_indices": empty})


OPTIMISED = """
import torch
from kda_kernels.errors import OperatorError
from kda_kernels.plan import CONTRACTS, launcher
from kda_kernels.testing.cases import Case
from kda_kernels.testing.violations import violations
assert not __debug__, "unreachable under -O"
if __debug__:
    raise SystemExit("asserts are on")
count = 0
for contract in CONTRACTS:
    for v in violations(contract, Case(sizes=%r, absent=frozenset())):
        call = {a.name: v.values[a.name] for a in contract.arguments}
        try:
            launcher(contract.name).allocate(**call)
        except OperatorError as error:
            if type(error) is not v.error:
                raise SystemExit(f"{v.argument} {v.deed}: {error}")
            count += 1
        else:
            raise SystemExit(f"{contract.name}: {v.argument} {v.deed} passed")
print(count)
"""


def test_every_check_holds_under_python_dash_o():
    command = [sys.executable, "-O", "-c", OPTIMISED % SIZES]
    root = Path(__file__).resolve().parents[3]
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert int(ended.stdout) > 150
