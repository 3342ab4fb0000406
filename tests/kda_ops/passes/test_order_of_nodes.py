"""Wherever a step's inputs are computed, the operator comes after them and before its users."""

import itertools

import pytest
import torch
from torch.fx import Graph

from kda_ops.passes import rewrite_graph

PRODUCERS = ("mixed", "gate", "beta", "slots")


class Layer(torch.nn.Module):
    """A step whose four inputs are computed in the graph, in a given order."""

    def __init__(self, step, order):
        super().__init__()
        self.step, self.order = step.StepLayer(step.Spelling(activation=torch.float32)), order

    def forward(self, *x):
        made = {}
        for name in self.order:
            value = dict(zip(PRODUCERS, x, strict=True))[name]
            made[name] = value + 0 if name == "slots" else torch.tanh(value)
        return self.step(*(made[name] for name in PRODUCERS))


def permuted(graph, order, producers):
    """Copy a graph with its producers in another order and their users as early as may be."""
    copy, moved = Graph(), {}

    def take(node):
        if node not in moved:
            for source in node.all_input_nodes:
                take(source)
            moved[node] = copy.node_copy(node, moved.__getitem__)

    nodes = list(graph.nodes)
    for node in [n for n in nodes if n.op == "placeholder"]:
        take(node)
    for number in order:
        take(producers[number])
        ready = True
        while ready:
            ready = [
                n
                for n in nodes
                if n not in moved
                and n.op == "call_function"
                and n not in producers
                and "copy_" not in n.name
                and all(s in moved for s in n.all_input_nodes)
            ]
            for node in ready:
                take(node)
    for node in nodes:
        take(node)
    return copy


@pytest.fixture(scope="module")
def captured(step):
    """The graph before the pass, with the nodes that make the step's inputs."""
    from kda_ops.passes import Options

    layer = Layer(step, PRODUCERS)
    x = step.inputs(step.Spelling(activation=torch.float32))
    found = step.capture(layer, *x, options=Options(rewrite=False))
    graph = found.module.graph
    producers = [n for n in graph.nodes if str(n.target) == "aten.tanh.default"]
    producers += [n for n in graph.nodes if n.name == "add"]
    assert len(producers) == 4
    return graph, producers


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_operator_stands_after_its_inputs_in_every_order(captured, order):
    graph = permuted(*captured[:1], order, captured[1])
    graph.lint()
    findings = rewrite_graph(graph)
    assert [finding.operator for finding in findings] == ["kda::packed_decode"]
    graph.lint()
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        assert all(places[source] < places[node] for source in node.all_input_nodes)


def test_inputs_that_are_computed_last_give_the_same_result_as_eager(step):
    for order in (PRODUCERS, PRODUCERS[::-1]):
        torch.manual_seed(0)
        layer, eager = Layer(step, order), Layer(step, order)
        x = step.inputs(step.Spelling(activation=torch.float32))
        with torch.no_grad():
            expected = eager(*x)
        captured = step.capture(layer, *x)
        assert captured.matches == 1
        step.compare(captured.output, expected, 1e-5)
        step.compare(layer.step.pool, eager.step.pool, 1e-5)


def test_an_input_that_needs_the_updated_state_is_refused(step):
    def run(layer, mixed, gate, beta, slots):
        """Q of the step depends on the state after it."""
        s, pool = layer.spelling, layer.pool
        q, k, v = s.split(mixed, s.heads)
        k = s.unit(k)
        a = gate.float().view(-1, s.heads, 128) + layer.dt_bias.view(s.heads, 128)
        S = pool[slots] * s.gate(a, layer.A_log.exp()[:, None]).exp()[..., None]
        u = (v - (S * k[..., None]).sum(-2)) * s.logits(beta)[..., None]
        S = S + k[..., None] * u[..., None, :]
        pool[slots] = S
        q = s.unit(q * S[..., 0]) * s.scale
        return (S * q[..., None]).sum(-2)

    layer = step.StepLayer(step.Spelling())
    captured = step.capture(lambda *x: run(layer, *x), *step.inputs(step.Spelling()))
    assert captured.matches == 0
