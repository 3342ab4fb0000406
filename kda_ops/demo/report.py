"""What the demo prints, as functions from results to lines of text.

Nothing is computed or decided here, and nothing is printed: command.py writes the lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kda_ops.demo.decode import Decoded, Difference
from kda_ops.demo.rewrite import Compilation, Operation
from kda_ops.passes import Finding

_BOOKKEEPING = frozenset(
    {"getitem", "reshape", "view", "unsqueeze", "split", "split_with_sizes", "slice", "expand"}
)
_CODE_WIDTH = 66


def region(operations: Sequence[Operation]) -> Iterator[str]:
    """The model's lines that were folded, each with the operations it had become."""
    lines: dict[tuple[str, int, str], list[str]] = {}
    for operation in operations:
        lines.setdefault((operation.file, operation.line, operation.code), []).append(
            operation.target
        )
    for (_, number, code), targets in sorted(lines.items()):
        short = code if len(code) <= _CODE_WIDTH else code[: _CODE_WIDTH - 1] + "…"
        yield f"    {number:4}  {short:<{_CODE_WIDTH}}  {counted(targets)}".rstrip()


def counted(targets: Iterable[str]) -> str:
    """Operations with their numbers, without those that only move axes: "mul ×3, sum"."""
    counts = Counter(target for target in targets if target not in _BOOKKEEPING)
    return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in counts.items())


def operator(finding: Finding) -> Iterator[str]:
    """The call that a step became, with what its arguments are."""
    arguments = finding.arguments
    yield f"          {finding.operator}("
    tensors = ("mixed_qkv", "raw_gate", "raw_beta", "A_log", "dt_bias", "state_indices")
    yield "            " + ", ".join(f"{name}={arguments[name]}" for name in tensors) + ","
    yield f"            state={arguments['state']} (the pool itself, updated in place),"
    words = ("scale", "lower_bound", "state_layout", "output_dtype")
    yield "            " + ", ".join(f"{name}={arguments[name]}" for name in words) + ")"


def rewrite(compiled: Compilation, layers: int) -> Iterator[str]:
    """What the pass did: the first step before and after, then a line for each place."""
    yield f"Rewritten: {compiled.rewritten} of {layers} layers"
    fused = [finding for finding in compiled.findings if finding.operator]
    if fused and compiled.folded_by_step:
        step = compiled.folded_by_step[0]
        file = next((operation.file for operation in step if operation.file), "the model")
        yield ""
        yield f"  before  {len(step)} operations a layer, from {file}:"
        yield from region(step)
        yield ""
        yield "  after   1 operation a layer:"
        yield from operator(fused[0])
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


def speeds(ways: Sequence[tuple[str, Decoded, Compilation | None]]) -> Iterator[str]:
    """A table of tokens per second, against the first way."""
    yield f"  {'':<26}{'tokens/s':>10}{'speed-up':>10}{'first call':>13}"
    base = ways[0][1].tokens_per_second
    for name, decoded, compilation in ways:
        rate = decoded.tokens_per_second
        first = f"{compilation.seconds:.1f} s" if compilation and compilation.code else "–"
        yield f"  {name:<26}{rate:>10.0f}{rate / base:>9.1f}×{first:>13}"


def differences(
    rows: Sequence[tuple[str, Difference, Difference | None, str]], budget: Difference
) -> Iterator[str]:
    """A table of largest differences from float64 and from eager, against the budget."""
    yield f"  {'':<26}{'from float64':^22}{'from eager':^22}{'greedy':>8}"
    yield f"  {'':<26}{'logits':>11}{'pools':>11}{'logits':>11}{'pools':>11}{'tokens':>8}"
    for name, exact, eager, tokens in rows:
        other = (
            f"{eager.logits:>11.1e}{eager.pools:>11.1e}" if eager else f"{'–':>11}{'–':>11}"
        )
        yield f"  {name:<26}{exact.logits:>11.1e}{exact.pools:>11.1e}{other}{tokens:>8}".rstrip()
    yield f"  {'budget':<26}{budget.logits:>11.1e}{budget.pools:>11.1e}"


def texts(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Prompts and what the model went on with."""
    pairs = list(rows)
    width = max((len(prompt) for prompt, _ in pairs), default=0)
    for prompt, continuation in pairs:
        yield f"  {prompt:<{width}} │ {continuation}"
