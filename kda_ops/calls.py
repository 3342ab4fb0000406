"""Which operator calls somebody is going to make: spelled out, or seen while a function runs.

Lives here: calls as metadata (tensors on the meta device), from a description or from running a
function on fake tensors, which computes nothing and changes nothing. Not here: what is then
compiled (warming.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from kda_kernels.contract.check import Facts, validate
from kda_kernels.contract.example import Kinds, example, shadow
from kda_kernels.contract.spec import Operator
from kda_kernels.plan import CONTRACTS

_KINDS = {
    "activation_dtype": "activation",
    "state_dtype": "state",
    "parameter_dtype": "parameter",
    "weight_dtype": "weight",
    "index_dtype": "index",
    "conv_layout": "window",
    "weight_layout": "taps",
    "conv_bias": "conv_bias",
}
_NEEDS = {
    "weight_dtype": "weight",
    "conv_layout": "conv_state",
    "weight_layout": "weight",
    "conv_bias": "conv_bias",
}
_SIZES = {"columns": "L", "tokens": "T"}


@dataclass(frozen=True)
class Call:
    """One call: the operator, its arguments by name with tensors on meta, facts about it.

    ``facts.device`` is the device of the call's real tensors, meta where there are none.
    """

    operator: Operator
    values: Mapping[str, Any]
    facts: Facts


def operator_named(name: str) -> Operator:
    """Return the contract of an operator by its name or its public function's.

    Raises:
        ValueError: there is no such operator.
    """
    for contract in CONTRACTS:
        if name.removeprefix("kda::") in (contract.name, contract.public_name):
            return contract
    known = ", ".join(repr(contract.name) for contract in CONTRACTS)
    raise ValueError(f"there is no operator {name!r}; there are {known}")


def described(
    operator: Operator,
    heads: int | Iterable[int],
    rows: int | Iterable[int],
    options: Mapping[str, Any],
) -> list[Call]:
    """Return the calls of every number of heads and rows.

    Raises:
        TypeError: an option that the operator has not.
        ContractError, DtypeError: the operator refuses such a call.
    """
    scalars = {s.name for s in operator.scalars}
    sizes = {name: symbol for name, symbol in _SIZES.items() if symbol in operator.dims}
    tensors = {t.name for t in operator.tensors}
    known = {k for k in _KINDS if _NEEDS.get(k, operator.tensors[0].name) in tensors}
    known |= scalars | sizes.keys()
    unknown = ", ".join(sorted(options.keys() - known))
    if unknown:
        said = ", ".join(sorted(known))
        raise TypeError(f"warm-up of {operator.name} has no option {unknown}; it has {said}")
    kinds = Kinds(**{_KINDS[k]: v for k, v in options.items() if k in _KINDS})
    given = {k: v for k, v in options.items() if k in scalars}
    chosen = {symbol: options[name] for name, symbol in sizes.items() if name in options}
    found = []
    for h, r in itertools.product(_numbers(heads), _numbers(rows)):
        dims = {**chosen, operator.rows: r, "H": h, "S": max(r, 1)}
        if "N" in operator.dims:
            dims["N"] = -(-r // chosen.get("T", 1))
        found.append(_call(operator, example(operator, dims, kinds, given), None))
    return found


def _numbers(given: int | Iterable[int]) -> list[int]:
    return [given] if isinstance(given, int) else list(given)


def seen(function: Callable[..., Any], *inputs: Any) -> list[Call]:  # noqa: ANN401
    """Return the operator calls that a function makes on inputs like these.

    It runs on fake tensors: nothing is computed, no pool changes, and what it does with values
    (not with shapes) fails. Tensors it holds itself, such as parameters and pools, count as they
    are.

    Raises:
        TypeError: the function was compiled by torch.compile.
    """
    if hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod"):
        raise TypeError(
            "a function that torch.compile made compiles its kernels when it is called: call it "
            "once with its inputs, outside of a CUDA graph's capture"
        )
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        copies = tree_map_only(Tensor, fake.from_tensor, inputs)
        with _Watcher() as watcher:
            function(*copies)
    return [_bound(*noted) for noted in watcher.calls]


class _Watcher(TorchDispatchMode):
    """Keeps the calls of this package's operators and lets every call through."""

    def __init__(self) -> None:
        """Start with no call."""
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Note a call of ours; torch calls this for every operator."""
        if func._schema.name.startswith("kda::"):
            self.calls.append((func._schema, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _bound(
    schema: Any,  # noqa: ANN401
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call:
    """Return a call from what torch's dispatcher was given."""
    operator = operator_named(schema.name)
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    output = given.pop(operator.output.name, None)
    values: dict[str, Any] = dict.fromkeys(a.name for a in operator.arguments)
    return _call(operator, values | given, output)


def _call(operator: Operator, values: Mapping[str, Any], output: Tensor | None) -> Call:
    """Validate a call and keep no more than its metadata."""
    facts = validate(operator, dict(values), output)
    return Call(operator, dict(_shadows(values)), facts)


def _shadows(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Tensor):
            address = 0 if isinstance(value, FakeTensor) or value.is_meta else value.data_ptr()
            yield name, shadow(value, address)
        else:
            yield name, value
