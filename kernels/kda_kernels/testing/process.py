"""Programs that run in a Python of their own and report what they found.

Lives here: starting one and reading its report. Not here: what the programs are, which are the
tests' own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

WITHOUT_CUTE_DSL = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl"):
            raise ModuleNotFoundError(f"{name} is not to be imported")
sys.meta_path.insert(0, Blocker())
"""
"""How a program starts that shall find no CuTe DSL. torch asks for it too, where it has CUDA."""


def report_of(code: str, *arguments: str, **environment: str | None) -> Any:  # noqa: ANN401
    """Return what a fresh process prints as JSON on its last line.

    Args:
        code: the program.
        arguments: of the program, from ``sys.argv[1]`` on.
        environment: variables beside this process's; those of None are taken away.
    """
    wanted = {k: v for k, v in {**os.environ, **environment}.items() if v is not None}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
        env=wanted,
        check=False,
    )
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])
