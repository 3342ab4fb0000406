"""The pass itself: one object for Inductor, with counters, a log and records of what was done.

Lives here: the order of erasing assertions, matching, certifying and splicing. Not here: a user's
passes beside it (composition.py), switching it on (switch.py), and what is kept of a match
(findings.py).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch._dynamo.utils import counters
from torch.fx import Graph, Node

from kda_ops.passes.anchors import anchor, check_state
from kda_ops.passes.candidates import candidates
from kda_ops.passes.certificate import certify
from kda_ops.passes.composition import ComposedPass
from kda_ops.passes.convolution import read_convolution
from kda_ops.passes.core import Core, read_core, undecided
from kda_ops.passes.findings import Finding, Left, log, report, shape_of, source_line
from kda_ops.passes.gated_norm import read_norm
from kda_ops.passes.nodes import repeats
from kda_ops.passes.pools import pool_root
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.regions import around, code, nodes_of
from kda_ops.passes.rewrite import splice
from kda_ops.passes.roundings import remove_roundings
from kda_ops.passes.step import Step, fused_step, packed_step

aten = torch.ops.aten
T = TypeVar("T")
BOTH = "convolution and norm"


@dataclass(frozen=True)
class Options:
    """What changes the result of the pass, and so its place in the caches.

    Args:
        rewrite: False looks, counts and explains, but leaves the graph alone.
        certify: False skips the certificates; for measuring what they cost.
    """

    rewrite: bool = True
    certify: bool = True


class KdaPass(ComposedPass):
    """Rewrites delta-rule steps of a post-grad graph to kda operators.

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
        super().__init__(first)
        self.options = options or Options()
        self.observers = observers

    def run(self, graph: Graph) -> None:
        """Rewrite the graph, and tell the observers."""
        observers = (*self.observers, *_observers)
        findings = rewrite_graph(graph, self.options, listed=bool(observers))
        for observer in observers:
            observer(graph, findings)

    def identity(self) -> tuple[Any, ...]:
        """Return the options too."""
        return (*super().identity(), repr(self.options))


_observers: list[Callable[[Graph, list[Finding]], None]] = []


@contextmanager
def observing(observer: Callable[[Graph, list[Finding]], None]) -> Iterator[None]:
    """Call ``observer(graph, findings)`` for every graph that the pass sees meanwhile."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def rewrite_graph(
    graph: Graph, options: Options | None = None, *, listed: bool = False
) -> list[Finding]:
    """Rewrite every delta-rule step of a functional graph; return what was found.

    Works in place on a post-grad graph (functional, decomposed, ``copy_`` epilogue). ``listed``
    keeps the graph code of each place, before and after, in the findings.
    """
    options = options or Options()
    counters["kda"]["graphs"] += 1
    erase_assertions(graph)
    same: dict[Node, Node] | None = None
    findings = []
    for write in candidates(graph):
        same = repeats(graph) if same is None else standing(same)
        finding = try_step(write, graph, options, same, listed=listed)
        findings.append(finding)
        report(finding)
    remove_roundings(graph)
    keep_rows(graph)
    if any(finding.operator for finding in findings):
        graph.lint()
    return findings


def keep_rows(graph: Graph) -> None:
    """Ask Inductor to leave the rows that operators read as they are.

    On a GPU it pads the rows of what a projection writes, and copies each of a row's parts back for
    an operator that needs its strides exactly. What such an operator reads is to dislike padding;
    torch 2.11 and 2.13 mark the operator itself, but not what stands before it.
    """
    # Operators that write pools stand here as arguments of auto_functionalized.
    readers = [
        node
        for node in graph.nodes
        if any(getattr(x, "namespace", None) == "kda" for x in (node.target, *node.args[:1]))
    ]
    while readers:
        for source in readers.pop().all_input_nodes:
            # Its strides are settled while the first of its readers is lowered.
            for node in (source, *source.users):
                node.meta["dislike_padding"] = True
            if source.target is operator.getitem or getattr(source.target, "is_view", False):
                readers.append(source)


def standing(same: dict[Node, Node]) -> dict[Node, Node]:
    """Return what is left of the repeated nodes after some were erased."""
    return {k: v for k, v in same.items() if not (k._erased or v._erased)}


def erase_assertions(graph: Graph) -> None:
    """Remove metadata assertions, which export puts between the nodes of a step."""
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)


def try_step(
    write: Node, graph: Graph, options: Options, same: dict[Node, Node], *, listed: bool
) -> Finding:
    """Match, certify and replace one step; a failure of any kind is a refusal."""
    pool: Any = write.args[0]
    base = Finding(write.name, source_line(write), pool.name, pool_shapes=(shape_of(pool),))
    left: list[Left] = []
    ship = functools.partial(shipped, base, graph=graph, options=options, listed=listed)
    try:
        core = careful(write, lambda: read_core(anchor(write, same, check_state), same))
        found = None
        if (whole := whole_step(core, same, left)) is not None:
            found = attempt(left, BOTH, core, lambda: ship(whole))
        if found is None:
            step = careful(write, lambda: packed_step(core))
            found = careful(write, lambda: ship(step))
        return replace(found, left=tuple(left))
    except RefusalError as refusal:
        error = undecided(write) or refusal
        node = error.node or write
        return replace(
            base,
            node=node.name,
            source=source_line(node) or base.source,
            reason=error.reason,
            detail=error.detail,
            left=tuple(left),
            before=code(around(write)) if listed else (),
        )


def whole_step(core: Core, same: dict[Node, Node], left: list[Left]) -> Step | None:
    """Match the convolution before a step and the norm behind it, or say which did not fit."""
    convolution = attempt(left, "convolution", core, lambda: read_convolution(core, same))
    source = core.update.value if convolution is None else convolution.parts[0].x
    activation = source.node.meta["val"].dtype
    norm = attempt(left, "norm", core, lambda: read_norm(core, activation))
    if convolution is None or norm is None:
        return None
    return attempt(left, BOTH, core, lambda: fused_step(core, convolution, norm))


def attempt(left: list[Left], part: str, core: Core, read: Callable[[], T]) -> T | None:
    """Read a part of a step; where it is refused, note why and return None."""
    try:
        return careful(core.output.node, read)
    except RefusalError as error:
        left.append(Left(part, error.reason, error.detail, (error.node or core.output.node).name))
        return None


def careful(write: Node, read: Callable[[], T]) -> T:
    """Read a step; code that the matcher was not made for is a refusal, never a failed compile."""
    try:
        return read()
    except RefusalError:
        raise
    except Exception as error:
        log.debug("the matcher failed at %s", write, exc_info=True)
        fact = f"{type(error).__name__}: {error}"
        raise RefusalError(Reason.NOT_UNDERSTOOD, write, fact[:300]) from error


def shipped(base: Finding, step: Step, graph: Graph, options: Options, listed: bool) -> Finding:
    """Certify a step and put the operator in its place."""
    if options.certify:
        certify(step)
    pools = [pool_root(found.pool) for found in step.pools.values()]
    found = replace(
        base,
        operator=f"kda::{step.operator}",
        arguments=described(step),
        source=source_line(step.output),
        pool_shapes=tuple(shape_of(pool) for pool in pools),
        roundings=tuple(node.name for node in step.region if node in step.dropped),
    )
    nodes = nodes_of(step) if listed else set()
    before = code(nodes)
    made = splice(step, graph) if options.rewrite else []
    return replace(found, before=before, after=code({*nodes, *made}) if listed else ())


def described(step: Step) -> dict[str, str]:
    """Return the operator's arguments for people."""
    arguments = step.arguments.described()
    if step.operator == "packed_decode":
        arguments["output_dtype"] = str(step.output_dtype).removeprefix("torch.")
    return arguments


def is_static(graph: Graph, pool: Node) -> bool | None:
    """Whether CUDA graphs may take a pool's address as fixed; None where that is not known."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    indices = getattr(metadata, "static_input_indices", None)
    if indices is None:
        return None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return pool not in inputs or inputs.index(pool) in indices
