"""Graphs that hypothesis changes node by node: what keeps the meaning is matched, no other is lost.

A change of the meaning is a one-node accident of any kind: another operation, operand, constant or
axis. Whatever the pass does with such a graph, it has to go on computing what the graph says.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule
from torch.fx.node import map_arg

from kda_ops.passes import Options, rewrite_graph

aten = torch.ops.aten
F32, NOT_YET = torch.float32, Options(rewrite=False)
SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "phases": [Phase.explicit, Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


def shape(node):
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) and value.dtype is F32 else None


def tensors(node):
    """The operands of a node that are float32 tensors."""
    return [a for a in node.args if isinstance(a, torch.fx.Node) and shape(a) is not None]


def target(*kinds):
    return lambda node: node.target in kinds


def plain(node):
    """Not the sum of eps, looked for right below a root, nor the token on its way to the window."""
    small = [a for a in node.args if isinstance(a, float) and 0 < a < 1e-4]
    return not small and node.target is not aten.unsqueeze.default


def after(call):
    """A change that puts something behind a node."""
    return plain, lambda graph, node, draw: call(graph.call_function, node)


def instead(where, call):
    """A change that puts something in the place of a node, made of its operands."""

    def change(graph, node, draw):
        made = call(graph.call_function, *node.args)
        graph.erase_node(node)
        return made

    return where, change


def again(graph, node, draw):
    """Let the node's users work on the node's own operation, done twice."""
    return graph.create_node("call_function", node.target, (node, *node.args[1:]))


def swapped(graph, node, draw):
    node.args = (node.args[1], node.args[0], *node.args[2:])
    return node


def another_operand(graph, node, draw):
    which = draw(st.sampled_from(tensors(node)))
    like = [n for n in graph.nodes if shape(n) == shape(which) and n not in {which, node}]
    if not like:
        reject()
    other = draw(st.sampled_from(like))
    node.args = tuple(other if a is which else a for a in node.args)
    return node


def another_constant(graph, node, draw):
    factor = draw(st.sampled_from([0.5, 1.001, -1.0]))
    node.args = tuple(a * factor if isinstance(a, float) else a for a in node.args)
    return node


def another_axis(graph, node, draw):
    rank = len(shape(node.args[0]))
    axis = draw(st.sampled_from([a for a in range(-rank, 0) if [a] != node.args[1]]))
    node.args = (node.args[0], [axis], *node.args[2:])
    return node


def another_operation(graph, node, draw):
    node.target = draw(st.sampled_from([t for t in KIN[node.target] if t != node.target]))
    return node


def left_out(graph, node, draw):
    return tensors(node)[0]


UNARY = [
    *(aten.exp.default, aten.sigmoid.default, aten.tanh.default, aten.neg.default),
    *(aten.rsqrt.default, aten.sqrt.default, aten.log1p.default, aten.abs.default),
]
BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor]
KIN = {t: kin for kin in (UNARY, BINARY) for t in kin}
LOG2E = 1.4426950408889634

KEEPING = {
    "commuted": (
        lambda node: len(tensors(node)) == 2 and node.target in {aten.mul.Tensor, aten.add.Tensor},
        swapped,
    ),
    "sum of the negative": instead(
        target(aten.sub.Tensor),
        lambda call, a, b: call(aten.add.Tensor, (a, call(aten.neg.default, (b,)))),
    ),
    "product with the reciprocal": instead(
        lambda node: node.target is aten.div.Tensor and len(tensors(node)) == 2,
        lambda call, a, b: call(aten.mul.Tensor, (a, call(aten.reciprocal.default, (b,)))),
    ),
    "power": instead(
        lambda node: node.target is aten.mul.Tensor and node.args[0] is node.args[1],
        lambda call, a, b: call(aten.pow.Tensor_Scalar, (a, 2)),
    ),
    "power of a root": instead(
        target(aten.rsqrt.default), lambda call, a: call(aten.pow.Tensor_Scalar, (a, -0.5))
    ),
    "root below": instead(
        target(aten.rsqrt.default),
        lambda call, a: call(aten.reciprocal.default, (call(aten.sqrt.default, (a,)),)),
    ),
    "exp2": instead(
        target(aten.exp.default),
        lambda call, a: call(aten.exp2.default, (call(aten.mul.Tensor, (a, LOG2E)),)),
    ),
    "sigmoid by quotient": instead(
        target(aten.sigmoid.default),
        lambda call, a: call(
            aten.reciprocal.default,
            (call(aten.add.Tensor, (call(aten.exp.default, (call(aten.neg.default, (a,)),)), 1)),),
        ),
    ),
    "axis put back": instead(
        lambda node: node.target is aten.sum.dim_IntList and node.args[2:] == (True,),
        lambda call, a, dims, _: call(
            aten.unsqueeze.default, (call(aten.sum.dim_IntList, (a, dims)), dims[0])
        ),
    ),
    "unsqueezed": after(
        lambda call, x: call(aten.squeeze.dim, (call(aten.unsqueeze.default, (x, 0)), 0))
    ),
    "cloned": after(lambda call, x: call(aten.clone.default, (x,))),
    "flattened": after(
        lambda call, x: call(
            aten.reshape.default, (call(aten.reshape.default, (x, [-1])), list(shape(x)))
        )
    ),
    "negated twice": after(lambda call, x: call(aten.neg.default, (call(aten.neg.default, (x,)),))),
    "doubled and halved": after(
        lambda call, x: call(aten.div.Tensor, (call(aten.mul.Tensor, (x, 2.0)), 2))
    ),
}
CHANGING = {
    "another operand": (lambda node: bool(tensors(node)), another_operand),
    "another constant": (
        lambda node: any(isinstance(a, float) for a in node.args),
        another_constant,
    ),
    "another axis": (target(aten.sum.dim_IntList), another_axis),
    "another operation": (
        lambda node: node.target in KIN and len(tensors(node)) == len(node.args),
        another_operation,
    ),
    "operands swapped": (
        lambda node: node.target in {aten.sub.Tensor, aten.div.Tensor} and len(tensors(node)) == 2,
        swapped,
    ),
    "left out": (
        lambda node: bool(tensors(node)) and shape(tensors(node)[0]) == shape(node),
        left_out,
    ),
    "done twice": (lambda node: node.target in UNARY, again),
    "rolled": after(lambda call, x: call(aten.roll.default, (x, [1], [-1]))),
    "scaled": after(lambda call, x: call(aten.mul.Tensor, (x, 1.01))),
    "shifted": after(lambda call, x: call(aten.add.Tensor, (x, 0.1))),
}


def changeable(node):
    """Whether a node computes something, and is not the pool's own write."""
    written = node.target in {aten.copy_.default, aten.index_put.default, aten.full.default}
    return node.op == "call_function" and shape(node) is not None and not written


def changed(graph, changes, draw):
    """Copy a graph with one of some changes made to one of its nodes."""
    where, change = changes[draw(st.sampled_from(sorted(changes)))]
    places = [node for node in graph.nodes if changeable(node) and where(node)]
    if not places:
        reject()
    at = draw(st.sampled_from(places))
    copy, made = Graph(), {}
    for node in graph.nodes:
        made[node] = copy.node_copy(node, made.__getitem__)
        if node is at:
            there = set(copy.nodes)
            made[node] = change(copy, made[node], draw)
            describe([made[node], *(n for n in copy.nodes if n not in there)], shape(node))
    return copy


def describe(nodes, wanted):
    """Compute the values of changed nodes; a change that the shapes do not allow is none."""
    for node in sorted({n for n in nodes if n.op == "call_function"}):
        values = map_arg(node.args, lambda n: n.meta["val"])
        with node.all_input_nodes[0].meta["val"].fake_mode:
            try:
                node.meta["val"] = node.target(*values, **node.kwargs)
            except (RuntimeError, IndexError):
                reject()
    if shape(nodes[0]) != wanted:
        reject()


def run(graph, values):
    module, values = GraphModule(torch.nn.Module(), graph), [v.clone() for v in values]
    with torch.no_grad():
        return [*module(*values), *values]


def furthest(graph, other, values):
    """The largest difference of two graphs in results and pools, against the largest element."""
    worst = 0.0
    for found, wanted in zip(run(graph, values), run(other, values), strict=True):
        if wanted.is_floating_point():
            scale = 1 + wanted.abs().max().nan_to_num(0)
            difference = (found.nan_to_num(7.0) - wanted.nan_to_num(7.0)).abs().max()
            worst = max(worst, (difference / scale).item())
    return worst


def rewritten(graph):
    """Rewrite a copy of a graph."""
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    findings = rewrite_graph(copy)
    return copy, findings


@pytest.fixture(scope="module", params=["step", "layer"])
def reference(request, step):
    """A post-grad graph in float32, inputs for it, and the operator that it becomes."""
    if request.param == "step":
        spelling = step.Spelling(activation=F32)
        layer, x = step.StepLayer(spelling), step.inputs(spelling)
        captured = step.capture(layer, *x, options=NOT_YET)
    else:
        layers = request.getfixturevalue("layers")
        chosen = layers.chosen(lambda _, options: options[0], activation=F32, columns=4, heads=2)
        names, x = zip(*layers.inputs(chosen).items(), strict=True)

        def run_layer(*x):
            return layers.run(chosen, dict(zip(names, x, strict=True)))

        captured = step.capture(run_layer, *x, options=NOT_YET)
    (finding,) = captured.findings
    generator = torch.Generator().manual_seed(3)
    inputs = [n.meta["val"] for n in captured.module.graph.nodes if n.op == "placeholder"]
    values = [
        torch.randn(x.shape, generator=generator) if x.is_floating_point() else torch.arange(len(x))
        for x in inputs
    ]
    return captured.module.graph, values, finding.operator


@settings(max_examples=25, **SETTINGS)
@given(data=st.data())
def test_a_graph_with_its_meaning_kept_is_still_matched(reference, data):
    original, values, operator = reference
    graph = original
    for _ in range(data.draw(st.integers(1, 3))):
        graph = changed(graph, KEEPING, data.draw)
    found, findings = rewritten(graph)
    assert [finding.operator for finding in findings] == [operator]
    assert furthest(found, original, values) < 2e-5


@settings(max_examples=50, **SETTINGS)
@given(data=st.data())
def test_a_graph_with_another_meaning_keeps_that_meaning(reference, data):
    original, values, _ = reference
    graph = changed(original, CHANGING, data.draw)
    found, _ = rewritten(graph)
    assert furthest(found, graph, values) < 2e-5
