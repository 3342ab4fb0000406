"""One matched step: from an anchor in a graph to an operator's arguments.

Lives here: the order in which the parts are read, and which nodes of the region the rest of the
graph may not look at. Not here: changing the graph (rewrite.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch._inductor.config as inductor_config
from torch.fx import Node

from kda_ops.passes.access import Access, D, access, check_dtypes
from kda_ops.passes.anchors import Anchor, outsider
from kda_ops.passes.arguments import Arguments
from kda_ops.passes.candidates import flows
from kda_ops.passes.convolution import Convolution
from kda_ops.passes.core import Core
from kda_ops.passes.delta_rule import HEAD
from kda_ops.passes.fused_arguments import FusedArguments, lay_out_fused
from kda_ops.passes.gated_norm import GatedNorm
from kda_ops.passes.gates import Gate
from kda_ops.passes.nodes import CASTS, is_view, rounds
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.terms import Scope, Term

aten = torch.ops.aten
PARAMETERS = frozenset(
    {"A_log", "dt_bias", "state_indices", "valid", "weight", "conv_bias", "norm_weight"}
)


@dataclass(frozen=True)
class Step:
    """A step that an operator can take over.

    ``pools`` are the states that the operator works on in place, by argument; ``output`` is the
    node that becomes its result, of type ``output_dtype``; ``region`` are the nodes between the
    arguments' leaves and the results, in graph order, of which ``dropped`` round to the
    activation type where the operator does not.
    """

    operator: str
    pools: dict[str, Anchor]
    arguments: Arguments | FusedArguments
    scope: Scope
    output: Node
    output_dtype: torch.dtype
    activation: torch.dtype
    region: tuple[Node, ...]
    dropped: frozenset[Node]

    @property
    def anchor(self) -> Anchor:
        """The recurrent state."""
        return self.pools["state"]

    @property
    def ends(self) -> tuple[Node, ...]:
        """The nodes that the operator's results take the place of."""
        return (self.output, *(found.result for found in self.pools.values()))


def packed_step(core: Core) -> Step:
    """Lay out the recurrence alone, or raise RefusalError."""
    arguments = lay_out(core)
    node, dtype = result(core.on_valid_rows(core.output.node), arguments)
    core.element(node)  # so that it is known which of its dimensions are rows
    return finished("packed_decode", {"state": core.anchor}, core, arguments, node, dtype)


def fused_step(core: Core, convolution: Convolution, norm: GatedNorm) -> Step:
    """Lay out the recurrence with the convolution before it and the norm behind it."""
    arguments = lay_out_fused(core, lay_out(core), convolution, norm)
    check_order(arguments, convolution.anchor)
    pools = {"conv_state": convolution.anchor, "state": core.anchor}
    dtype = norm.node.meta["val"].dtype
    kept = {part.node for part in convolution.mixed} | norm.rounded | {norm.node}
    return finished("fused_decode", pools, core, arguments, norm.valid, dtype, kept)


def check_order(arguments: FusedArguments, window: Anchor) -> None:
    """Refuse where a gate is computed from the convolution, which the operator keeps to itself."""
    convolved = flows(window.reads)
    for place in arguments.places:
        if place is not None and place.node in convolved:
            raise RefusalError(Reason.ORDER, place.node, "computed from the convolution")


def finished(
    name: str,
    pools: dict[str, Anchor],
    core: Core,
    arguments: Arguments | FusedArguments,
    output: Node,
    dtype: torch.dtype,
    kept: set[Node] | frozenset[Node] = frozenset(),
) -> Step:
    """Collect the region of a step and check that it is the operator's alone."""
    ends = (output, *(found.write for found in pools.values()))
    region = region_of(core.scope, arguments.leaves, ends)
    check_users(region, output, pools, arguments)
    activation = arguments.activation
    dropped = roundings(region, {output, *core.stored, *kept}, activation)
    return Step(name, pools, arguments, core.scope, output, dtype, activation, region, dropped)


def roundings(
    region: tuple[Node, ...], kept: set[Node], activation: torch.dtype
) -> frozenset[Node]:
    """Return the roundings in a region that the operator does not make.

    To the type of the activations they may be dropped, for the reason that Inductor drops those
    between operations that it fuses: what is left is closer to the mathematics.
    """
    found = [node for node in region if rounds(node) and node not in kept]
    for node in found:
        if node.meta["val"].dtype is not activation or inductor_config.emulate_precision_casts:
            name = str(node.meta["val"].dtype).removeprefix("torch.")
            raise RefusalError(Reason.ROUNDING, node, f"{node.name} is {name}")
    return frozenset(found)


def lay_out(core: Core) -> Arguments:
    """Find every argument of the recurrence in memory."""
    scope, update, gate, output = core.scope, core.update, core.gate, core.output
    along, across = update.key_axis, update.value_axis
    query = Term(output.query.node, output.query.index)
    key = Term(update.key.node, update.key.index)
    parts = (
        access(scope, query, along),
        access(scope, key, along),
        access(scope, update.value, across),
    )
    logits, bias = gate.logits, bias_access(scope, gate, along)
    if bias is None and gate.bias is not None:
        raise RefusalError(Reason.ARGUMENT_LAYOUT, gate.bias.node, "the gate's bias")
    valid = None
    if core.mask is not None:
        valid = access(scope, core.mask.valid, None, per_head=False)
    a_log = access(scope, gate.a_log, None, rows=False)
    if a_log.head_stride != 1:
        raise RefusalError(Reason.ARGUMENT_LAYOUT, a_log.node, "A_log is strided")
    arguments = Arguments(
        parts=parts,
        gate=access(scope, logits, along),
        beta=access(scope, core.beta, None),
        a_log=a_log,
        bias=bias,
        pool=core.anchor.pool,
        index=core.anchor.index,
        heads=scope.sizes[HEAD],
        scale=output.scale,
        lower_bound=gate.lower_bound,
        layout=update.layout,
        first_slot=core.anchor.first_slot,
        valid=valid,
        live=core.mask is None or core.mask.live,
    )
    check_dtypes((*parts, arguments.gate, arguments.beta))
    return arguments


def bias_access(scope: Scope, gate: Gate, along: str) -> Access | None:
    """Return where the gate's bias lies, or None where it is not one number per channel."""
    if gate.bias is None:
        return None
    try:
        bias = access(scope, gate.bias, along, rows=False)
    except RefusalError:
        return None
    return bias if bias.head_stride == D else None


def result(output: Node, arguments: Arguments) -> tuple[Node, torch.dtype]:
    """Return the node to replace: the cast to the activation type, if that is all that follows."""
    activation, node = arguments.activation, output
    if node.meta["val"].dtype is activation:
        return node, activation
    while len(node.users) == 1:
        (user,) = node.users
        if user.target in CASTS and user.meta["val"].dtype is activation:
            return user, activation
        if not is_view(user) or user.target in {aten.cat.default, aten.slice.Tensor}:
            break
        if user.meta["val"].numel() != node.meta["val"].numel() or user.target in CASTS:
            break
        node = user
    return output, torch.float32


def region_of(scope: Scope, leaves: dict[Node, str], ends: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes from the arguments' leaves to the results, in graph order."""
    reached, pending = set(ends), list(ends)
    while pending:
        for source in pending.pop().all_input_nodes:
            leaf = scope.same.get(source, source) in leaves
            if source not in reached and not leaf and source.op == "call_function":
                reached.add(source)
                pending.append(source)
    return tuple(sorted(reached))


def check_users(
    region: tuple[Node, ...],
    output: Node,
    pools: dict[str, Anchor],
    arguments: Arguments | FusedArguments,
) -> None:
    """Refuse where something outside needs a value that the operator keeps to itself."""
    inside = {*region, *(node for found in pools.values() for node in found.touching)}
    ends = {output, *(found.write for found in pools.values())}
    rows = from_rows(region, arguments)
    for node in region:
        if node in ends or node not in rows:
            continue
        for user in node.users:
            if user not in inside:
                raise RefusalError(Reason.INTERMEDIATE_USED, node, f"used by {user.name}")
    for found in pools.values():
        for user in found.pool.users if found.index is None else ():
            if user not in inside:
                raise outsider(user)


def from_rows(region: tuple[Node, ...], arguments: Arguments | FusedArguments) -> set[Node]:
    """Return the nodes of a region that compute something from a row's inputs or its state."""
    leaves = {n for n, role in arguments.leaves.items() if role not in PARAMETERS}
    moved = set(leaves)
    computed: set[Node] = set()
    for node in region:
        sources = set(node.all_input_nodes)
        if is_view(node) and not sources & computed and sources & moved:
            moved.add(node)
        elif sources & (moved | computed):
            computed.add(node)
    return computed
