"""What the demo prints, as functions from results to lines of text.

Nothing is computed or decided here.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from kda_ops.demo.comparison import REWRITTEN, Comparison, Setting
from kda_ops.demo.decode import Decoded, Difference
from kda_ops.demo.rewrite import Compilation, Operation
from kda_ops.passes import Finding

_BOOKKEEPING = frozenset(
    {"getitem", "reshape", "view", "unsqueeze", "split", "split_with_sizes", "slice", "expand"}
)
_CODE_WIDTH = 66
_CONSTANTS = ("scale", "norm_eps", "lower_bound", "first_slot", "state_layout")


def region(operations: Sequence[Operation]) -> Iterator[str]:
    """The model's lines that were folded, each with the operations it had become."""
    lines: dict[tuple[str, int, str], list[str]] = {}
    for operation in operations:
        lines.setdefault((operation.file, operation.line, operation.code), []).append(
            operation.target
        )
    for (_, number, code), targets in sorted(lines.items()):
        short = code if len(code) <= _CODE_WIDTH else code[: _CODE_WIDTH - 1] + "…"
        if operations_there := counted(targets):
            yield f"    {number:4}  {short:<{_CODE_WIDTH}}  {operations_there}"


def counted(targets: Iterable[str]) -> str:
    """Operations with their numbers, without those that only move axes: "mul ×3, sum"."""
    counts = Counter(target for target in targets if target not in _BOOKKEEPING)
    return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in counts.items())


def operator(finding: Finding) -> Iterator[str]:
    """The call that a step became; the constants are those found in the graph."""
    arguments = finding.arguments
    tensors = [
        n for n in arguments if n not in {*_CONSTANTS, "output_dtype"} and arguments[n] != "None"
    ]
    lines = textwrap.wrap(", ".join(tensors) + ",", _CODE_WIDTH)
    bound = "None" if arguments["lower_bound"] == "softplus" else arguments["lower_bound"]
    told = {**arguments, "lower_bound": bound, "state_layout": f'"{arguments["state_layout"]}"'}
    lines += textwrap.wrap(", ".join(f"{n}={told[n]}" for n in _CONSTANTS if n in told), 76)
    yield f"          {finding.operator}("
    yield from (f"              {line}" for line in lines[:-1])
    yield f"              {lines[-1]})"
    yield "          on the pools themselves: each is read once and written once, in place"


def opening(setting: Setting, why: str) -> Iterator[str]:
    """What is about to run, and where."""
    sizes = setting.sizes
    state = 2 * sizes.layers * sizes.rows * sizes.heads * 128 * 128 * sizes.state_dtype.itemsize
    weights = sum(p.numel() * p.element_size() for p in setting.model.parameters())
    threads = f", {torch.get_num_threads()} threads" if sizes.device.type == "cpu" else ""
    yield (
        f"A language model of {sizes.layers} layers of Kimi delta attention, {sizes.heads} heads, "
        "in plain PyTorch"
    )
    yield f"  on {sizes.device} ({why}){threads}"
    yield (
        f"  {sizes.rows} sequences in pools of {sizes.slots} slots, states kept in "
        f"{str(sizes.state_dtype).removeprefix('torch.')}"
    )
    yield (
        f"  a position moves {state / 2**20:.1f} MiB of state, read and written once, and reads "
        f"{weights / 2**20:.1f} MiB of weights"
    )
    yield ""


def finished(name: str, decoded: Decoded, compiled: Compilation) -> Iterator[str]:
    """One way of decoding has ended."""
    compiling = f"compiled in {compiled.seconds:.1f} s, " if compiled.code else ""
    positions = decoded.tokens.shape[0]
    yield f"  {name:<26}{compiling}{positions} positions in {sum(decoded.seconds):.1f} s"


def rewrite(compiled: Compilation, layers: int, *, every: bool = False) -> Iterator[str]:
    """What the pass did: a step before and after, and why others were left as they are."""
    yield f"Rewritten: {compiled.rewritten} of {layers} layers"
    fused = [finding for finding in compiled.findings if finding.operator]
    pairs = list(zip(compiled.folded_by_step, fused, strict=False))
    for step, finding in pairs if every else pairs[:1]:
        file = next((operation.file for operation in step if operation.file), "the model")
        yield ""
        yield f"  before  {len(step)} operations, from {file}:"
        yield from region(step)
        yield ""
        yield "  after   1 operation:"
        yield from operator(finding)
    if len(pairs) > 1 and not every:
        yield f"  (shown: the first layer; --verbose shows all {len(pairs)})"
    for finding in compiled.findings:
        if finding.operator is None:
            yield from refusal(finding)


def refusal(finding: Finding) -> Iterator[str]:
    """Why one place was left as it is, and what its author can do."""
    if finding.reason is None:
        return
    detail = f" ({finding.detail})" if finding.detail else ""
    yield f"  left as it is: {finding.reason.name}: {finding.reason.sentence}{detail}"
    yield f"    at {finding.source or finding.node}"
    yield f"    advice: {finding.reason.advice}"


def speeds(ways: Sequence[tuple[str, Decoded, Compilation]]) -> Iterator[str]:
    """A table of tokens per second, against the first way."""
    yield f"  {'':<26}{'tokens/s':>10}{'speed-up':>10}{'first call':>13}"
    base = ways[0][1].tokens_per_second
    for name, decoded, compilation in ways:
        rate = decoded.tokens_per_second
        first = f"{compilation.seconds:.1f} s"
        yield f"  {name:<26}{rate:>10.0f}{rate / base:>9.1f}×{first:>13}"


def differences(
    rows: Sequence[tuple[str, Difference, Difference | None, str]], budget: Difference
) -> Iterator[str]:
    """A table of largest differences from float64 and from eager, against the budget."""
    yield f"  {'':<26}{'from float64':^22}{'from eager':^22}{'greedy':>8}"
    yield f"  {'':<26}{'logits':>11}{'pools':>11}{'logits':>11}{'pools':>11}{'tokens':>8}"
    for name, exact, eager, tokens in rows:
        other = f"{eager.logits:>11.1e}{eager.pools:>11.1e}" if eager else f"{'–':>11}{'–':>11}"
        yield f"  {name:<26}{exact.logits:>11.1e}{exact.pools:>11.1e}{other}{tokens:>8}".rstrip()
    yield f"  {'budget':<26}{budget.logits:>11.1e}{budget.pools:>11.1e}"


def texts(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Prompts and what the model went on with."""
    pairs = list(rows)
    width = max((len(prompt) for prompt, _ in pairs), default=0)
    for prompt, continuation in pairs:
        yield f"  {prompt:<{width}} │ {continuation}"


def verdict(faults: Sequence[str], comparison: Comparison) -> Iterator[str]:
    """The last lines: all is well, or what is not."""
    if faults:
        yield from (f"FAULT: {fault}" for fault in faults)
        return
    layers = comparison.setting.sizes.layers
    tokens = comparison.decoded[REWRITTEN].tokens.numel()
    yield (
        f"OK: {layers} of {layers} layers rewritten, no pool copied, {tokens} tokens equal in all "
        "three, differences within the budget"
    )


def say(lines: Iterable[str]) -> None:
    """Print lines at once, also into a pipe."""
    print("\n".join(lines), flush=True)
