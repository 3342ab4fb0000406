"""The illegal calls drawn from a contract: one per rule, everything else legal."""

from kda_kernels.contract.spec import Layout, ScalarArg
from kda_kernels.testing.cases import Case
from kda_kernels.testing.violations import violations

SIZES = {"B": 3, "R": 6, "N": 2, "T": 3, "H": 2, "S": 9, "L": 3}
EVERYTHING = Case(sizes=SIZES, absent=frozenset())


def test_every_argument_is_broken_in_every_way_its_declaration_names(operator):
    deeds = {}
    for violation in violations(operator, EVERYTHING):
        deeds.setdefault(violation.argument, set()).add(violation.deed)
    for argument in operator.arguments:
        done = deeds[argument.name]
        if isinstance(argument, ScalarArg):
            assert done
            continue
        assert {"lost its last element", "has int16 elements", "is on another device"} <= done
        assert ("is None" in done) is not argument.optional
        assert ("has overlapping rows" in done) is (argument.layout is Layout.ROWS)
        pool = {"is expanded", "has misaligned slots", "starts off its alignment"}
        is_pool = argument.layout in (Layout.SLOTS, Layout.WINDOW)
        assert (pool <= done) is is_pool


def test_a_violation_differs_from_a_legal_call_in_one_argument(operator):
    calls = list(violations(operator, EVERYTHING))
    for violation in calls:
        other = next(v for v in calls if v.argument != violation.argument)
        for name, value in violation.values.items():
            if name not in (violation.argument, other.argument):
                again = other.values[name]
                assert value is again or type(value) is type(again)
                assert getattr(value, "shape", None) == getattr(again, "shape", None)
