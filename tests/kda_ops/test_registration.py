"""What torch knows of the operators: schemas, tags, aliases, versions; torch's own opcheck."""

import pytest
import torch
from torch.library import opcheck

from kda_kernels.contract.spec import Role
from kda_kernels.testing.cases import clone, output_of

OVERLOADS = ("default", "out")

# Between them: both windows, padded rows and slots, both taps, all spellings, every optional
# argument there and not there, every type, both state layouts.
CHECKED = {
    "plain": {},
    "padded, DS, everything given": {
        "window": "DS",
        "taps": "channel-major",
        "row_padding": 5,
        "row_offset": 1,
        "slot_padding": 64,
        "absent": frozenset(),
        "index_dtype": torch.int64,
        "scalars": {"first_slot": None, "lower_bound": None, "scale": 0.5, "state_layout": "kv"},
    },
    "padded, SD, bf16 pool, no indices": {
        "row_padding": 3,
        "slot_padding": 32,
        "spelling": 1,
        "state_dtype": torch.bfloat16,
        "weight_dtype": torch.bfloat16,
        "parameter_dtype": torch.bfloat16,
        "absent": frozenset({"conv_bias", "t1_state_indices", "state_indices"}),
    },
}


def arguments(operator, values, overload):
    """A call as an overload takes it."""
    listed = operator.abi if overload == "out" else operator.arguments
    values = {"output_dtype": None, **values}
    positional = tuple(values[a.name] for a in listed if not a.keyword)
    keywords = {a.name: values[a.name] for a in listed if a.keyword}
    if overload == "out":
        keywords["output"] = output_of(operator, values)
    return positional, keywords


@pytest.mark.parametrize("name", OVERLOADS)
@pytest.mark.parametrize("case", CHECKED)
def test_opcheck_passes(operator, overload, call, name, case):
    positional, keywords = arguments(operator, call(**CHECKED[case]), name)
    assert set(opcheck(overload(name), positional, keywords).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", OVERLOADS)
def test_opcheck_passes_on_an_empty_batch(operator, overload, call, name):
    values = call({"B": 0, "R": 0, "N": 0})
    positional, keywords = arguments(operator, values, name)
    assert set(opcheck(overload(name), positional, keywords).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", OVERLOADS)
def test_operators_are_compliant_and_need_exact_strides(overload, name):
    assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(overload(name).tags)


@pytest.mark.parametrize("name", OVERLOADS)
def test_pools_and_output_are_written_each_under_an_alias_of_its_own(operator, overload, name):
    schema = overload(name)._schema
    aliased = {a.name: a.alias_info for a in schema.arguments if a.alias_info is not None}
    pools = {a.name for a in operator.tensors if a.role is Role.UPDATE}
    assert aliased.keys() == pools | ({"output"} if name == "out" else set())
    assert all(info.is_write for info in aliased.values())
    letters = [frozenset(info.before_set) for info in aliased.values()]
    assert len(set(letters)) == len(letters)


def test_no_overload_returns_something_that_it_was_given(overload):
    assert [r.alias_info for r in overload("default")._schema.returns] == [None]
    assert overload("out")._schema.returns == []


def test_the_schema_repeats_names_order_and_defaults_of_the_contract(operator, overload):
    given = overload("default")._schema.arguments
    listed = [a for a in operator.arguments if not a.keyword]
    listed += [a for a in operator.arguments if a.keyword]
    assert [a.name for a in given] == [a.name for a in listed]
    assert [a.kwarg_only for a in given] == [a.keyword for a in listed]
    scalars = {a.name: a.default for a in operator.scalars}
    assert {a.name: a.default_value for a in given if a.name in scalars} == scalars


@pytest.mark.parametrize("name", OVERLOADS)
def test_versions_of_what_is_written_and_of_nothing_else_go_up(operator, overload, call, name):
    positional, keywords = arguments(operator, call(), name)
    given = {
        a.name: value
        for a, value in zip(operator.arguments, positional, strict=False)
        if isinstance(value, torch.Tensor)
    } | {k: v for k, v in keywords.items() if isinstance(v, torch.Tensor)}
    before = {k: v._version for k, v in given.items()}
    overload(name)(*positional, **keywords)
    changed = {k for k, v in given.items() if v._version != before[k]}
    pools = {a.name for a in operator.tensors if a.role is Role.UPDATE}
    assert changed == pools | ({"output"} if name == "out" else set())


def test_only_declared_arguments_are_written(operator, overload, call):
    values = call(absent=frozenset(), row_padding=3, slot_padding=32)
    before = clone(values)
    positional, keywords = arguments(operator, values, "default")
    overload("default")(*positional, **keywords)
    pools = {a.name for a in operator.tensors if a.role is Role.UPDATE}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and name not in pools:
            # NaN lies between padded rows, so compare bytes of the whole storage.
            old, new = before[name].untyped_storage(), value.untyped_storage()
            assert bytes(old.tolist()) == bytes(new.tolist()), name
