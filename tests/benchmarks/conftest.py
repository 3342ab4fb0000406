"""The scripts in kernels/benchmarks import each other by bare name, as they do when they run."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"

if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))
