"""Errors are data: what they carry, what they are caught as, and that they travel."""

import pickle

import pytest

from kda_kernels.errors import ContractError, DtypeError, OperatorError, UnsupportedError


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (ContractError, ValueError),
        (DtypeError, TypeError),
        (UnsupportedError, NotImplementedError),
    ],
)
def test_each_error_is_caught_as_the_builtin_that_fits_it(kind, base):
    with pytest.raises(base) as caught:
        raise kind("packed_decode", "state", "big", "small")
    assert isinstance(caught.value, OperatorError)


def test_the_sentence_is_made_of_the_facts_and_the_source_is_optional():
    error = ContractError("fused_decode", "x", "[B, 4]", "[3, 5]", "B = 3 from x")
    assert str(error) == "kda::fused_decode: x must be [B, 4], got [3, 5] (B = 3 from x)"
    assert str(DtypeError("fused_decode", "x", "float32", "int8")) == (
        "kda::fused_decode: x must be float32, got int8"
    )


@pytest.mark.parametrize("kind", [ContractError, DtypeError, UnsupportedError])
def test_errors_cross_processes_whole(kind):
    error = kind("packed_decode", "state", "big", "small", "from there")
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is kind and str(other) == str(error)
    assert vars(other) == vars(error)
