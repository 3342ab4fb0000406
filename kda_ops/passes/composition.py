"""A pass of ours in a slot of Inductor's configuration, behind what a user has put there.

Lives here: running the user's passes first, and one uuid for all of them. Not here: what our passes
do (manager.py, roundings.py) and putting them into the configuration (switch.py).
"""

from __future__ import annotations

import functools
import hashlib
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import dynamo_timed
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import kda_kernels
import kda_ops

# A pass that is told whether it sees an inference graph: where torch has such passes, one that the
# user installed has to be told through ours.
_Told: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


class ComposedPass(_Told):
    """A pass that first runs what was in its slot.

    Args:
        first: passes that run before this one, in order: what the user had installed.
    """

    def __init__(self, first: tuple[Callable[..., None], ...] = ()) -> None:
        self.first = first

    def __call__(self, graph: Graph, is_inference: bool = True) -> None:
        """Run the user's passes, then this one."""
        for earlier in self.first:
            if _Told is not CustomGraphPass and isinstance(earlier, _Told):
                earlier(graph, is_inference)
            else:
                earlier(graph)
        with dynamo_timed("kda_ops.passes"):  # seconds in torch._dynamo.utils.compile_times()
            self.run(graph)

    @abstractmethod
    def run(self, graph: Graph) -> None:
        """Do what this pass is for."""

    def identity(self) -> tuple[Any, ...]:
        """Return what the compiled code depends on besides sources, torch and earlier passes."""
        return (type(self).__name__,)

    def uuid(self) -> Any:
        """Return what the compiled code depends on, or None where an earlier pass cannot say."""
        earlier = []
        for other in self.first:
            identity = other.uuid() if isinstance(other, CustomGraphPass) else None
            if identity is None:
                return None
            earlier.append(identity)
        return ("kda_ops", source_hash(), torch.__version__, *self.identity(), tuple(earlier))


@functools.cache
def source_hash() -> str:
    """Return a digest of every source file of both packages."""
    digest = hashlib.sha256()
    for package in (kda_ops, kda_kernels):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*")):
            if path.suffix in {".py", ".cc", ".h"}:
                digest.update(str(path.relative_to(root)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()
