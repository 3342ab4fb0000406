"""What a decode step's timeline on a GPU says: projections, the KDA part, the rest, gaps.

Lives here: telling kernels apart by name and place. Not here: how a timeline is recorded
(gpu_timing.py) and the model (stack.py).

Projections are the kernels of matrix products, by name, and copies right before them: a product
that adds starts as a copy of what it adds to, which is how Inductor calls the one behind which
stands the residual. Of the others those that run between a layer's first and last product are the
KDA part; the rest are norms and residuals between layers.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gpu_timing import Launch

# Names that cuBLAS, CUTLASS and Inductor's templates give to products, their reductions and the
# clearing of their workspaces. Kernels of CuTe DSL start with kernel_cutlass and are no products.
_PRODUCT = re.compile(
    r"gemm|gemv|nvjet|xmma|splitk|cublas|triton_tem|memset|(?<!kernel_)cutlass", re.IGNORECASE
)

_COPY = "Memcpy DtoD"
"""How the profiler calls a copy from the device to itself."""


@dataclass(frozen=True)
class Parts:
    """One step; times in microseconds.

    Attributes:
        projections, kda, rest: durations of the kernels of each part.
        kernels, kda_kernels: how many ran, and how many of them in the KDA part.
        gaps: time between the first kernel's start and the last one's end when none ran.
    """

    projections: float
    kda: float
    rest: float
    kernels: float
    kda_kernels: float
    gaps: float

    def columns(self, layers: int) -> str:
        """The part's columns of a table."""
        return (
            f"{self.projections:11.1f} {self.kda:9.1f} {self.rest:7.1f} {self.kernels:7.0f} "
            f"{self.kda_kernels / layers:9.1f} {self.gaps:8.1f}"
        )


COLUMNS = "projections       KDA    rest kernels KDA/layer     gaps"


def is_product(name: str) -> bool:
    """Tell by its name whether a kernel belongs to a matrix product."""
    return _PRODUCT.search(name) is not None


def read(launches: Sequence[Launch], layers: int) -> Parts:
    """Read one step off its kernels in order.

    Every layer launches the same products, so the step's products are dealt to the layers evenly.

    Raises:
        ValueError: they cannot be: the names of a library's products are not known here.
    """
    places = [i for i, launch in enumerate(launches) if is_product(launch.name)]
    if not places or len(places) % layers:
        names = sorted({launch.name for launch in launches})
        raise ValueError(f"{len(places)} products in {layers} layers, of kernels {names}")
    each = len(places) // layers
    inside: set[int] = set()
    for first in range(0, len(places), each):
        inside.update(range(places[first], places[first + each - 1]))
    copies = {i - 1 for i in places if i and launches[i - 1].name.startswith(_COPY)}
    kda = inside - copies - set(places)
    total = sum(launch.us for launch in launches)
    projections = sum(launches[i].us for i in copies.union(places))
    of_kda = sum(launches[i].us for i in kda)
    return Parts(
        projections=projections,
        kda=of_kda,
        rest=total - projections - of_kda,
        kernels=len(launches),
        kda_kernels=len(kda),
        gaps=_idle(launches),
    )


def _idle(launches: Sequence[Launch]) -> float:
    """Return how long nothing ran between the first start and the last end."""
    idle, busy_until = 0.0, launches[0].start
    for launch in launches:
        idle += max(0.0, launch.start - busy_until)
        busy_until = max(busy_until, launch.start + launch.us)
    return idle


def median(runs: Sequence[Parts]) -> Parts:
    """Return the median of several steps, field by field."""
    fields = [asdict(run) for run in runs]
    return Parts(**{name: statistics.median(run[name] for run in fields) for name in fields[0]})
