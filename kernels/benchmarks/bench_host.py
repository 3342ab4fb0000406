"""What a public call costs on the host beyond its kernel, beside a plain torch operator.

Run from a checkout with the package installed: ``python kernels/benchmarks/bench_host.py``, for
launches on a GPU with ``--device cuda``. Not here: how fast the kernels are (bench_decode.py).

The row of every call is a null row, so the kernel has nothing to compute but its zeros; what is
left is the way there: the public function, torch's dispatcher, signature and plan, TVM-FFI, and on
a GPU the launch. Two differences are printed: the public call less the compiled kernel called
directly with the same arguments, and less an empty TVM-FFI function called with them.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import harness
import kda_ops
import provenance
from kda_kernels import plan
from kda_kernels.contract.spec import Operator
from kda_kernels.errors import UnsupportedError
from kda_kernels.testing.cases import Case, draw, output_of

HEADS = 4
SIZES = {"B": 1, "R": 1, "N": 1, "T": 1, "H": HEADS, "S": 2, "L": 3}

Calls = dict[str, Callable[[], object]]


def calls(device: str) -> Calls:
    """Return what is timed, by name; operators without a kernel on the device are left out."""
    a, b, c = (torch.zeros(64, device=device) for _ in range(3))
    found: Calls = {"torch.add(out=)": lambda: torch.add(a, b, out=c)}
    for operator in plan.CONTRACTS:
        try:
            found |= _calls_of(operator, device)
        except UnsupportedError as missing:
            print(f"# left out: {missing}")
    return found


def _calls_of(operator: Operator, device: str) -> Calls:
    """Return an operator's calls: public, public with ``output=``, kernel, empty function."""
    values = draw(operator, Case(sizes=SIZES), device)
    values["state_indices"].fill_(-1)
    output = output_of(operator, values)
    function: Callable[..., object] = getattr(kda_ops, operator.public_name)
    given: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not inspect.Parameter.empty:
            continue  # as people call it: what has a default keeps it
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            named[parameter.name] = values[parameter.name]
        else:
            given.append(values[parameter.name])
    arguments = (*[values[argument.name] for argument in operator.abi], output)
    kernel = _kernel(operator, values, device)
    short = operator.name.removesuffix("_decode")
    return {
        f"{short} empty": functools.partial(_empty_function(), *arguments),
        f"{short} kernel": functools.partial(kernel, *arguments),
        f"{short} call": functools.partial(function, *given, **named),
        f"{short} call, output=": functools.partial(function, *given, **named, output=output),
    }


def _kernel(operator: Operator, values: dict[str, Any], device: str) -> Callable[..., object]:
    """Return the compiled function behind the calls, which takes the contract's arguments."""
    if device == "cpu":
        return plan.cpu_kernel(operator.name)
    given = [values[argument.name] for argument in operator.arguments]
    return plan.cuda_kernel(operator, values, plan.launcher(operator.name).facts(*given))


def _empty_function() -> Callable[..., object]:
    """Return a function behind TVM-FFI that does nothing, whatever it is given."""
    importlib.import_module("tvm_ffi.testing")  # registers it
    function: Callable[..., object] = importlib.import_module("tvm_ffi").get_global_func(
        "testing.nop"
    )
    return function


def beyond_an_empty_call(device: str, rounds: int) -> dict[str, float]:
    """Return the microseconds of each allocating public call less an empty TVM-FFI call."""
    sample = harness.measure(calls(device), rounds)
    return {
        name: (sample.median(name) - sample.median(name.replace("call", "empty"))) * 1e6
        for name in sample.seconds
        if name.endswith(" call")
    }


def main() -> None:
    """Measure, print, and write the report if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = harness.print_machine()
    if options.device == "cuda":
        facts |= provenance.machine()
        print(f"# device: {facts['device']}")
    sample = harness.measure(calls(options.device), options.rounds)
    report: dict[str, dict[str, float]] = {}
    print("call                            us  over its kernel  over an empty call")
    for name in sample.seconds:
        report[name] = {"us": sample.median(name) * 1e6}
        over = ""
        if " call" in name:
            for column, other in (("over its kernel", "kernel"), ("over an empty call", "empty")):
                other_us = sample.median(f"{name.split()[0]} {other}") * 1e6
                report[name][column] = report[name]["us"] - other_us
                over += f"{report[name][column]:17.1f}"
        print(f"{name:27s} {report[name]['us']:7.2f} {over}")
    harness.write_json(options.json, {"machine": facts, "calls": report})


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
