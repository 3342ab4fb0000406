"""Torch 2.11 removes roundings ahead of the pass: they are back when steps are matched.

Each test holds on every torch: one that keeps the roundings has nothing to put back.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx

from kda_ops.passes import Options
from kda_ops.passes.roundings import (
    PutBackRoundings,
    mark_roundings,
    put_back_roundings,
    remove_roundings,
)

CAST = torch.ops.prims.convert_element_type.default


def silu_then_split(m, heads):
    """Rounds and widens all channels at once, with no view in between."""
    return tuple(p.view(-1, heads, 128) for p in m.float().chunk(3, -1))


def layer_of(layers):
    """A layer in bfloat16 that rounds what the operator rounds: after SiLU, and the output."""
    return layers.sampled(
        5,
        activation=torch.bfloat16,
        conv=layers.conv_sum,
        silu=F.silu,
        split=silu_then_split,
        form="indexed",
        norm=layers.norm_rsqrt,
    )


@pytest.fixture
def rounding():
    """A graph that rounds a value to bfloat16 in vain: y = float32(bfloat16(x * x))."""

    def traced(x):
        product = torch.ops.aten.mul.Tensor(x, x)
        return CAST(CAST(product, torch.bfloat16), torch.float32)

    module = torch.fx.experimental.proxy_tensor.make_fx(traced, tracing_mode="fake")(torch.ones(4))
    return module.graph


def pointless_casts_removed(graph):
    """Remove the cast to bfloat16 as Inductor does, which hands the outer cast's metadata on."""
    outer = list(graph.nodes)[-2]
    inner = outer.args[0]
    with graph.inserting_before(outer):
        direct = graph.call_function(CAST, (inner.args[0], torch.float32))
    direct.meta.update(outer.meta)
    outer.replace_all_uses_with(direct)
    graph.erase_node(outer)
    graph.erase_node(inner)


def casts(graph):
    return [(node.args[1], node.meta["val"].dtype) for node in graph.nodes if node.target is CAST]


def test_a_marked_rounding_that_was_removed_is_put_back_where_it_was(rounding):
    before = casts(rounding)
    mark_roundings(rounding)
    pointless_casts_removed(rounding)
    put_back_roundings(rounding)
    rounding.lint()
    assert casts(rounding) == before
    assert [dtype for dtype, _ in before] == [torch.bfloat16, torch.float32]


def test_what_nobody_took_over_is_removed_again(rounding):
    mark_roundings(rounding)
    pointless_casts_removed(rounding)
    without = str(rounding)
    put_back_roundings(rounding)
    remove_roundings(rounding)
    rounding.lint()
    assert str(rounding) == without


def test_a_rounding_that_an_operator_took_over_stays(rounding):
    mark_roundings(rounding)
    pointless_casts_removed(rounding)
    put_back_roundings(rounding)
    rounded = next(node for node in rounding.nodes if node.target is CAST)
    with rounding.inserting_after(rounded):
        rounding.call_function(torch.ops.aten.neg.default, (rounded,))
    remove_roundings(rounding)
    assert not rounded._erased
    assert not any(user.target is CAST for user in rounded.users)


def test_roundings_that_are_still_there_are_left_alone(rounding):
    mark_roundings(rounding)
    before = str(rounding)
    put_back_roundings(rounding)
    remove_roundings(rounding)
    assert str(rounding) == before


def test_a_layer_that_rounds_after_silu_becomes_one_operator_and_rounds_there(layers, step):
    chosen = layer_of(layers)
    tensors = layers.inputs(chosen)
    eager = copy.deepcopy(tensors)
    captured = step.capture(lambda t: layers.run(chosen, t), tensors)
    (found,) = captured.findings
    assert (found.operator, found.left) == ("kda::fused_decode", ())
    step.compare(captured.output, layers.run(chosen, eager), layers.TOLERANCE[torch.bfloat16])
    step.compare(tensors["state"], eager["state"], layers.TOLERANCE[torch.bfloat16])


@pytest.fixture(scope="module")
def looked_at(layers, step):
    """The layer's graph that the pass has only looked at, and the graph without the pass."""
    chosen, plain = layer_of(layers), []

    def inner(module, _, **__):
        plain.append(step.listing(module.graph))
        return make_boxed_func(module.forward)

    def run(tensors):
        return layers.run(chosen, tensors)

    looked = step.capture(run, layers.inputs(chosen), options=Options(rewrite=False))
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(run, backend=lambda m, x: compile_fx(m, x, inner_compile=inner))(
            layers.inputs(chosen)
        )
    return looked, plain[0]


def test_a_layer_that_is_not_rewritten_compiles_as_without_the_pass(looked_at):
    looked, plain = looked_at
    assert looked.matches == 1
    assert looked.after == plain


@pytest.mark.parametrize(("name", "put_back"), [("rows", True), ("tangents_1", False)])
def test_roundings_are_put_back_but_not_in_graphs_with_gradients(looked_at, name, put_back):
    graph = copy.deepcopy(looked_at[0].module.graph)
    rounded = next(node for node in graph.nodes if node.target is CAST)
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder(name)
    rounded.meta["kda_ops_rounded_to"] = torch.float16
    before = len(graph.nodes)
    PutBackRoundings()(graph)
    assert (len(graph.nodes) > before) is put_back
