"""The vocabulary of contracts: dimensions as text, lookups by name."""

import pytest

from kda_kernels.contract.spec import Extent, Layout, Rule, TensorArg, parse_extent, parse_shape
from kda_kernels.plan import CONTRACTS


@pytest.mark.parametrize(
    ("text", "symbol", "times", "plus"),
    [
        ("B", "B", 1, 0),
        ("D", None, 1, 128),
        ("4", None, 1, 4),
        ("H*D", "H", 128, 0),
        ("3*H*D", "H", 384, 0),
        ("3*H", "H", 3, 0),
        ("T+2", "T", 1, 2),
        ("3*H*D+5", "H", 384, 5),
        ("3*D", None, 1, 384),
    ],
)
def test_a_dimension_reads_as_a_multiple_of_one_symbol_plus_a_constant(text, symbol, times, plus):
    assert parse_extent(text) == Extent(text, symbol, times, plus)


@pytest.mark.parametrize(
    ("text", "value"), [("B", 7), ("H*D", 384), ("3*H*D", 1152), ("T+2", 5), ("4", 4), ("D", 128)]
)
def test_a_dimension_has_a_value_once_its_symbol_is_known(text, value):
    assert parse_extent(text).value({"B": 7, "H": 3, "T": 3}) == value


@pytest.mark.parametrize("text", ["", "b", "B*", "*B", "B-1", "2*B*C*D", "B+", "H/2", "B C", "3H"])
def test_what_is_no_dimension_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match="not a dimension"):
        parse_extent(text)


def test_a_shape_is_its_dimensions_with_or_without_spaces():
    assert parse_shape("1, B,H , D") == tuple(parse_extent(t) for t in ("1", "B", "H", "D"))


def test_a_tensors_shapes_are_parsed_when_it_is_declared():
    argument = TensorArg("x", ("B, H*D", "B, H, D"), ("float32",), Layout.COMPACT, "x")
    assert [len(extents) for extents in argument.extents] == [2, 3]
    with pytest.raises(ValueError, match="not a dimension"):
        TensorArg("x", ("B, h",), ("float32",), Layout.COMPACT, "x")


def test_arguments_are_found_by_name_and_unknown_ones_named():
    contract = CONTRACTS[0]
    assert contract.argument("scale").rule is Rule.FINITE
    assert contract.tensor("state").name == "state"
    with pytest.raises(KeyError, match="packed_decode has no argument 'weight'"):
        contract.argument("weight")
    with pytest.raises(KeyError, match="'scale' of packed_decode is no tensor"):
        contract.tensor("scale")


def test_every_symbol_of_every_shape_is_fixed_by_a_tensor_of_the_contract():
    for contract in CONTRACTS:
        spellings = [e for t in contract.tensors for e in t.extents] + [contract.output.extents]
        symbols = {extent.symbol for extents in spellings for extent in extents} - {None}
        assert symbols == set(contract.dims)
        for symbol, (name, meaning, minimum) in contract.dims.items():
            assert meaning and minimum >= 0
            assert symbol in [extent.text for extent in contract.tensor(name).extents[0]]
        assert contract.rows in contract.dims


def test_kernels_receive_every_argument_but_the_output_type():
    for contract in CONTRACTS:
        left_out = [a.name for a in contract.arguments if a not in contract.abi]
        assert left_out == (["output_dtype"] if contract is CONTRACTS[0] else [])
