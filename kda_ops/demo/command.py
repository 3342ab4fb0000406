"""`kda-ops demo`: its options, what it prints in which order, its exit status.

Lives here: the conversation with the user. Not here: any measurement (comparison.py,
kimi_linear.py) or the form of a table (report.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import kda_ops
from kda_ops.demo import report
from kda_ops.demo.comparison import EAGER, PLAIN, REWRITTEN, Comparison, Setting, Sizes, compare
from kda_ops.demo.decode import Decoded, decode_text, difference
from kda_ops.demo.rewrite import Compilation

WAYS = (EAGER, PLAIN, REWRITTEN)
_TEXTS_SHOWN = 4
DEFAULTS = {"tiny": Sizes(), "transformers": Sizes(layers=2, rows=4)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    default = DEFAULTS["tiny"]
    parser.add_argument(
        "--model",
        choices=tuple(DEFAULTS),
        default="tiny",
        help="the small model of this package, or transformers' KimiLinear with random weights",
    )
    for name, value, text in (
        ("layers", None, f"layers of delta attention (default: {_counts(lambda s: s.layers)})"),
        ("batch", None, f"sequences decoded together (default: {_counts(lambda s: s.rows)})"),
        ("heads", default.heads, "heads of 128 channels in each layer (default: %(default)s)"),
        ("steps", 64, "tokens to decode behind the prompts (default: %(default)s)"),
    ):
        parser.add_argument(f"--{name}", type=_positive, default=value, metavar="N", help=text)
    parser.add_argument(
        "--seed", type=int, default=default.seed, metavar="N", help="seed of the weights"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type the states are kept in (default: float32)",
    )
    parser.add_argument(
        "--device", default=None, help="cpu or cuda; default: a GPU if there are kernels for it"
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("-q", "--quiet", action="store_true", help="print the verdict only")
    amount.add_argument("-v", "--verbose", action="store_true", help="show every layer, every text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")


def _counts(number: Callable[[Sizes], int]) -> str:
    """Say a default that depends on the model."""
    return ", ".join(f"{number(sizes)} for {name}" for name, sizes in DEFAULTS.items())


def _positive(text: str) -> int:
    """Read a number of things of which there has to be one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        0 if everything agrees and every layer was rewritten, 1 otherwise.
    """
    device, why = choose_device(args.device)
    default = DEFAULTS[args.model]
    sizes = replace(
        default,
        layers=args.layers or default.layers,
        heads=args.heads,
        rows=args.batch or default.rows,
        steps=args.steps,
        state_dtype=getattr(torch, args.dtype),
        seed=args.seed,
        device=device,
    )
    if args.model == "transformers":
        from kda_ops.demo import kimi_linear  # noqa: PLC0415 - transformers is optional

        return kimi_linear.run(sizes, why, quiet=args.quiet)
    return _small(sizes, why, args)


def choose_device(wanted: str | None) -> tuple[torch.device, str]:
    """Return the device to use and why, in words.

    A GPU is taken only if the operators have kernels for it, which one small call tells.
    """
    if wanted is not None:
        return torch.device(wanted), "asked for"
    if not torch.cuda.is_available():
        return torch.device("cpu"), "no GPU found"
    try:
        _probe(torch.device("cuda"))
    except kda_ops.OperatorError as error:
        return torch.device("cpu"), f"not the GPU: {error}"
    return torch.device("cuda"), torch.cuda.get_device_name()


def _probe(device: torch.device) -> None:
    """Call the operator that the pass uses on one row."""
    zeros = torch.zeros(384, dtype=torch.bfloat16, device=device)
    state = torch.zeros(1, 1, 128, 128, device=device)
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    kda_ops.packed_kda_decode(
        zeros[None], zeros[None, :128], zeros[None, :1], zeros[:1], zeros[:128], state, slot
    )


def _small(sizes: Sizes, why: str, args: argparse.Namespace) -> int:
    """Compare the three ways of running the small model."""
    setting = Setting.of(sizes)
    if not args.quiet:
        report.say(report.opening(setting, why))

    def finished(name: str, decoded: Decoded, compiled: Compilation) -> None:
        if args.quiet:
            return
        report.say(report.finished(name, decoded, compiled))
        if name == REWRITTEN:
            report.say(["", *report.rewrite(compiled, sizes.layers, every=args.verbose)])

    comparison = compare(setting, finished)
    if not args.quiet:
        report.say(["", *_texts(comparison, everything=args.verbose)])
        report.say(["", *_tables(comparison)])
    faults = comparison.faults()
    report.say(["", *report.verdict(faults, comparison)])
    if args.json is not None:
        args.json.write_text(json.dumps(figures(comparison), indent=2) + "\n", encoding="utf-8")
    return 1 if faults else 0


def _texts(comparison: Comparison, *, everything: bool) -> Iterable[str]:
    setting = comparison.setting
    rows = len(setting.prompts) if everything else _TEXTS_SHOWN
    tokens = comparison.decoded[REWRITTEN].tokens
    pairs = [
        (prompt, decode_text(tokens[len(prompt) - 1 :, row]))
        for row, prompt in enumerate(setting.prompts[:rows])
    ]
    yield "Decoded (random weights, so the text means nothing; it is the same in all three)"
    yield from report.texts(pairs)
    if rows < len(setting.prompts):
        yield f"  … and {len(setting.prompts) - rows} more"


def _tables(comparison: Comparison) -> Iterable[str]:
    ways = [(name, comparison.decoded[name], comparison.compiled[name]) for name in WAYS]
    yield from report.speeds(ways)
    yield ""
    eager = comparison.decoded[EAGER]
    rows = [
        (
            name,
            difference(decoded, comparison.exact),
            None if name == EAGER else difference(decoded, eager),
            "equal" if comparison.same_tokens(name) else "DIFFER",
        )
        for name, decoded, _ in ways
    ]
    yield from report.differences(rows, comparison.budget)


def figures(comparison: Comparison) -> dict[str, Any]:
    """The figures of a comparison as plain data."""
    sizes = comparison.setting.sizes
    ways = {}
    for name in WAYS:
        decoded, compiled = comparison.decoded[name], comparison.compiled[name]
        error = difference(decoded, comparison.exact)
        ways[name] = {
            "tokens_per_second": decoded.tokens_per_second,
            "first_call_seconds": compiled.seconds,
            "logits_from_float64": error.logits,
            "pools_from_float64": error.pools,
            "tokens_equal": comparison.same_tokens(name),
        }
    return {
        "layers": sizes.layers,
        "heads": sizes.heads,
        "rows": sizes.rows,
        "positions": comparison.setting.positions,
        "state": str(sizes.state_dtype).removeprefix("torch."),
        "device": str(sizes.device),
        "torch": torch.__version__,
        "rewritten": comparison.compiled[REWRITTEN].rewritten,
        "ways": ways,
        "faults": comparison.faults(),
    }
