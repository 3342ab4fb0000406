"""The pass itself: one object for Inductor, with counters, a log and records of what was done.

Lives here: the order of erasing assertions, matching, certifying and splicing; the uuid for the
compile caches; composition with a pass that is there already. Not here: switching it on
(switch.py).
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

import kda_kernels
import kda_ops
from kda_ops.passes.anchors import anchor, candidates
from kda_ops.passes.certificate import certify
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.rewrite import splice
from kda_ops.passes.step import Step, match
from kda_ops.passes.terms import repeats

log = logging.getLogger("kda_ops.passes")
aten = torch.ops.aten


@dataclass(frozen=True)
class Options:
    """What changes the result of the pass, and so its place in the caches.

    Args:
        rewrite: False looks, counts and explains, but leaves the graph alone.
        certify: False skips the certificates; for measuring what they cost.
    """

    rewrite: bool = True
    certify: bool = True


@dataclass(frozen=True)
class Finding:
    """One place that looks like a delta-rule step.

    ``operator`` is what it was fused into, with ``arguments`` for people; otherwise ``reason`` and
    ``detail`` say why not. ``node`` is where it is or stopped, ``source`` the model's line.
    """

    node: str
    source: str
    pool: str
    operator: str | None = None
    arguments: dict[str, str] = field(default_factory=dict)
    reason: Reason | None = None
    detail: str = ""
    static_pool: bool | None = None
    pool_shape: tuple[int, ...] = ()


# A pass that is told whether it sees an inference graph: where torch has such passes, one that the
# user installed has to be told through ours.
_Told: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


class KdaPass(_Told):
    """Rewrites delta-rule steps of a post-grad graph to ``kda::packed_decode``.

    Args:
        options: see :class:`Options`.
        first: passes that run before this one, in order: what the user had installed.
        observers: called with the findings of every graph.
    """

    def __init__(
        self,
        options: Options | None = None,
        first: tuple[Callable[..., None], ...] = (),
        observers: tuple[Callable[[Graph, list[Finding]], None], ...] = (),
    ) -> None:
        self.options = options or Options()
        self.first = first
        self.observers = observers

    def __call__(self, graph: Graph, is_inference: bool = True) -> None:
        """Run the user's passes, then this one."""
        for earlier in self.first:
            if _Told is not CustomGraphPass and isinstance(earlier, _Told):
                earlier(graph, is_inference)
            else:
                earlier(graph)
        findings = rewrite_graph(graph, self.options)
        for observer in (*self.observers, *_observers):
            observer(graph, findings)

    def uuid(self) -> Any:
        """Return what the compiled code depends on, or None where an earlier pass cannot say."""
        earlier = []
        for other in self.first:
            identity = other.uuid() if isinstance(other, CustomGraphPass) else None
            if identity is None:
                return None
            earlier.append(identity)
        return ("kda_ops", source_hash(), torch.__version__, repr(self.options), tuple(earlier))


_observers: list[Callable[[Graph, list[Finding]], None]] = []


@contextmanager
def observing(observer: Callable[[Graph, list[Finding]], None]) -> Iterator[None]:
    """Call ``observer(graph, findings)`` for every graph that the pass sees meanwhile."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


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


def rewrite_graph(graph: Graph, options: Options | None = None) -> list[Finding]:
    """Rewrite every delta-rule step of a functional graph; return what was found.

    Works in place on a post-grad graph (functional, decomposed, ``copy_`` epilogue).
    """
    options = options or Options()
    counters["kda"]["graphs"] += 1
    findings = []
    for write in candidates(graph) if erase_assertions(graph) else ():
        finding = try_step(write, graph, options)
        findings.append(finding)
        report(finding)
    if any(finding.operator for finding in findings):
        graph.lint()
    return findings


def erase_assertions(graph: Graph) -> bool:
    """Remove metadata assertions, which export puts between the nodes of a step."""
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
    return True


def try_step(write: Node, graph: Graph, options: Options) -> Finding:
    """Match, certify and replace one step; a failure of any kind is a refusal."""
    pool: Any = write.args[0]
    shape = tuple(s if isinstance(s, int) else -1 for s in pool.meta["val"].shape)
    base = Finding(write.name, source_line(write), pool.name, pool_shape=shape)
    try:
        step = read_step(write, graph)
        if options.certify:
            certify(step)
        found = replace(base, static_pool=is_static(graph, step.anchor.pool))
        found = replace(found, arguments=described(step), source=source_line(step.output))
        if options.rewrite:
            splice(step, graph)
        return replace(found, operator="kda::packed_decode")
    except RefusalError as error:
        node = error.node or write
        return replace(
            base,
            node=node.name,
            source=source_line(node) or base.source,
            reason=error.reason,
            detail=error.detail,
        )


def read_step(write: Node, graph: Graph) -> Step:
    """Match a step; code that the matcher was not made for is a refusal, never a failed compile."""
    same = repeats(graph)
    try:
        return match(anchor(write, same), graph, same)
    except RefusalError:
        raise
    except Exception as error:
        log.debug("the matcher failed at %s", write, exc_info=True)
        fact = f"{type(error).__name__}: {error}"
        raise RefusalError(Reason.NOT_UNDERSTOOD, write, fact[:300]) from error


def report(finding: Finding) -> None:
    """Count and log one finding."""
    counters["kda"]["candidates"] += 1
    if finding.reason is None:
        counters["kda"]["matches"] += 1
        counters["kda"][f"matched {finding.operator}"] += 1
        log.info("%s: fused into %s", finding.source or finding.node, finding.operator)
        return
    counters["kda"]["refusals"] += 1
    counters["kda"][f"refused {finding.reason.name}"] += 1
    detail = f" ({finding.detail})" if finding.detail else ""
    log.info(
        "%s: not fused, %s: %s%s at node %s",
        finding.source or finding.node,
        finding.reason.name,
        finding.reason.sentence,
        detail,
        finding.node,
    )


def described(step: Step) -> dict[str, str]:
    """Return the operator's arguments for people."""
    arguments = step.arguments
    q, k, v = (part.node.name for part in arguments.parts)
    gate = "softplus" if arguments.lower_bound is None else f"{arguments.lower_bound:g}"
    return {
        "mixed_qkv": q if q == k == v else f"cat({q}, {k}, {v})",
        "raw_gate": arguments.gate.node.name,
        "raw_beta": arguments.beta.node.name,
        "A_log": arguments.a_log.node.name,
        "dt_bias": arguments.bias.node.name if arguments.bias else "zeros",
        "state": arguments.pool.name,
        "state_indices": arguments.index.name if arguments.index is not None else "None",
        "scale": f"{arguments.scale:.6g}",
        "lower_bound": gate,
        "first_slot": "None",
        "state_layout": arguments.layout,
        "output_dtype": str(step.output_dtype).removeprefix("torch."),
    }


def source_line(node: Node) -> str:
    """Return "file:line: code" of the model's line that a node came from, or ""."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip()]
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].startswith("File "):
            pieces = lines[at].split('"')
            number = lines[at].split("line ")[-1].split(",")[0]
            code = lines[at + 1] if at + 1 < len(lines) else ""
            return f"{pieces[1] if len(pieces) > 1 else '?'}:{number}: {code}".rstrip(": ")
    return ""


def is_static(graph: Graph, pool: Node) -> bool | None:
    """Whether CUDA graphs may take a pool's address as fixed; None where that is not known."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    indices = getattr(metadata, "static_input_indices", None)
    if indices is None:
        return None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return pool not in inputs or inputs.index(pool) in indices
