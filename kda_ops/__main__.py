"""The command line, `kda-ops` or `python -m kda_ops`.

Only the parsing lives here. Each command imports what it needs when it runs, so that
`kda-ops doctor` works where half the machine is broken.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from kda_ops import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        The exit status: 0 when the command did what it says, 1 when it found or met a fault.
        A wrong command line raises SystemExit with status 2, as argparse does.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(with_demo="demo" in argv[:1])
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return int(_COMMANDS[args.command](args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has seen enough.
        sys.stderr.close()
        return 0


def _parser(*, with_demo: bool) -> argparse.ArgumentParser:
    """Build the parser; the demo's own options are read in only for the demo."""
    parser = argparse.ArgumentParser(
        prog="kda-ops", description="Decode operators for Kimi Delta Attention."
    )
    parser.add_argument("--version", action="version", version=f"kda-ops {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    demo = commands.add_parser("demo", help="decode with a small model: eager, compiled, rewritten")
    if with_demo:
        _demo_command().add_arguments(demo)
    commands.add_parser("doctor", help="say what was found on this machine and what is missing")
    _add_build(commands.add_parser("build", help="compile kernels now instead of on first use"))
    explain = commands.add_parser("explain", help="say what the graph pass would do to a model")
    explain.add_argument(
        "target",
        metavar="module:callable",
        help="a function of no arguments that returns (model, inputs), inputs a tuple of tensors",
    )
    explain.add_argument(
        "--html", metavar="FILE", help="write a page too, with graph code before and after"
    )
    return parser


def _add_build(build: argparse.ArgumentParser) -> None:
    """Add the options of ``build``."""
    build.description = (
        "Compile the CPU kernels; with --arch the GPU kernels instead, for GPUs that need not be "
        "here. Fails where a GPU kernel needs local memory, which spilled registers would."
    )
    build.add_argument(
        "--arch", metavar="LIST", help="architectures, such as sm_90a,sm_100a, or all"
    )
    build.add_argument("--out", metavar="DIR", help="write a bundle, for KDA_BUNDLE")
    build.add_argument(
        "--with-runtime",
        action="store_true",
        help="copy CuTe DSL's runtime library too (44 MB)",
    )
    build.add_argument("--report", metavar="FILE", help="write what kernels take, as Markdown")
    build.add_argument("--processes", metavar="N", type=int, help="compile so many at a time")


def _demo_command() -> ModuleType:
    return importlib.import_module("kda_ops.demo.command")


def _demo(args: argparse.Namespace) -> int:
    return int(_demo_command().run(args))


def _doctor(_: argparse.Namespace) -> int:
    from kda_ops import doctor

    findings = doctor.examine()
    print(doctor.report(findings))
    return doctor.status(findings)


def _build(args: argparse.Namespace) -> int:
    from kda_kernels._cpu import build

    if args.arch is not None:
        from kda_ops import bundling

        return bundling.run(args)
    if args.out or args.report or args.with_runtime:
        print("kda-ops build: --out and what goes with it need --arch", file=sys.stderr)
        return 2
    try:
        kernels = build.build_all()
    except build.CompilerMissing as missing:
        print(f"kda-ops build: {missing}", file=sys.stderr)
        return 1
    for kernel in kernels:
        print(f"{'built' if kernel.built else 'found'}  {kernel.operator}  {kernel.path}")
    return 0


def _explain(args: argparse.Namespace) -> int:
    import kda_ops

    module, _, name = args.target.partition(":")
    if not name:
        print(f"kda-ops explain: {args.target!r} is not module:callable", file=sys.stderr)
        return 2
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    model, inputs = getattr(importlib.import_module(module), name)()
    report = kda_ops.explain(model, *inputs)
    print(report)
    if args.html is not None:
        try:
            Path(args.html).write_text(report.html(), encoding="utf-8")
        except OSError as error:
            print(f"kda-ops explain: {error}", file=sys.stderr)
            return 1
    return 0


_COMMANDS = {"demo": _demo, "doctor": _doctor, "build": _build, "explain": _explain}

if __name__ == "__main__":
    raise SystemExit(main())
