"""The command line, `kda-ops` or `python -m kda_ops`. What a command does lives in its own module."""

import argparse
from collections.abc import Sequence

import kda_ops


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="kda-ops")
    parser.add_argument("--version", action="version", version=kda_ops.__version__)
    parser.parse_args(argv)
    parser.print_help()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
