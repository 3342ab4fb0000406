"""The errors an operator raises, as data: which operator, which argument, which rule, what came.

Lives here: the exception types and the one sentence they share. Not here: the rules themselves
(contract/) and the decision which error to raise (contract/check.py, plan.py).
"""

from __future__ import annotations


class OperatorError(Exception):
    """An operator call that was refused before anything was launched or written.

    Attributes:
        operator: name of the operator without its namespace, such as ``packed_decode``.
        argument: name of the argument that broke the rule.
        rule: what the argument must be.
        fact: what it was.
        source: where the numbers in the rule came from, or an empty string.
    """

    def __init__(
        self, operator: str, argument: str, rule: str, fact: str, source: str = ""
    ) -> None:
        """Build the sentence ``kda::<operator>: <argument> must be <rule>, got <fact>``."""
        self.operator = operator
        self.argument = argument
        self.rule = rule
        self.fact = fact
        self.source = source
        origin = f" ({source})" if source else ""
        super().__init__(f"kda::{operator}: {argument} must be {rule}, got {fact}{origin}")

    def __reduce__(self) -> tuple[type[OperatorError], tuple[str, str, str, str, str]]:
        """Pickle by the five facts, so that the error crosses process borders whole."""
        return type(self), (self.operator, self.argument, self.rule, self.fact, self.source)


class ContractError(OperatorError, ValueError):
    """The call is illegal: a shape, stride, device, alignment or scalar breaks the contract."""


class DtypeError(OperatorError, TypeError):
    """The call is illegal because of an argument's dtype (or because it is no tensor at all)."""


class UnsupportedError(OperatorError, NotImplementedError):
    """The call is legal, but no kernel serves it; the fact names the nearest supported choice."""
