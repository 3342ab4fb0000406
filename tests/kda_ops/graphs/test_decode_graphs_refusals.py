"""DecodeGraphs: what it refuses, with what words, and what is left after an error."""

import pytest
import torch

from kda_ops import DecodeGraphs


def test_calls_unlike_the_first_are_refused_before_anything_runs(loop, device):
    cache, twin = loop.random_cache(device), loop.random_cache(device)
    graphs = DecodeGraphs(loop.step_of(cache, "packed"), [2])
    slots, values = cache.indices([1, 2]), loop.inputs(2, 0, device)
    graphs.capture(slots, *values)
    x, gate, beta = values
    for arguments, error, words in (
        ((slots, x, gate), ValueError, "captured with 3 inputs, got 2"),
        ((slots, x[:1], gate, beta), ValueError, r"input 1 must be \[2, 768\], got \[1, 768\]"),
        ((slots, x, gate[:, :1], beta), ValueError, r"input 2 must be \[2, 256\]"),
        ((slots, x, gate, beta.float()), TypeError, "input 3 must be torch.bfloat16, as in the"),
        ((slots.long(), x, gate, beta), TypeError, "slots must be torch.int32"),
        ((slots[:, None], x, gate, beta), ValueError, r"slots must be \[2\], got \[2, 1\]"),
    ):
        with pytest.raises(error, match=f"DecodeGraphs: .*{words}"):
            graphs(*arguments)
    loop.assert_caches_equal(cache, twin)
    assert graphs.report.padded_calls == {2: 0}


def test_steps_and_arguments_that_cannot_be_padded_are_refused_and_nothing_is_kept(device):
    slots, x = torch.tensor([1], device=device), torch.zeros(1, 3, device=device)
    for step, arguments, error, words in (
        (lambda s, x: x.sum(0), (slots, x), ValueError, "must have 2 rows in dimension 0, got"),
        (lambda s, x: x.sum(), (slots, x), ValueError, r"in dimension 0, got \[\]"),
        (lambda s, x: (x, 3), (slots, x), TypeError, "must return tensors, got 3"),
        (lambda s, x: x, (slots, 3), TypeError, "input 1 must be a tensor, got 3"),
        (lambda s, x: x, (slots, x.sum()), ValueError, "input 1 must have rows, got a scalar"),
    ):
        graphs = DecodeGraphs(step, [2])
        with pytest.raises(error, match=f"DecodeGraphs: .*{words}"):
            graphs(*arguments)
        with pytest.raises(RuntimeError, match="nothing has been captured yet"):
            _ = graphs.report


@pytest.mark.parametrize("sizes", [[], [0, 2], [-1]])
def test_batch_sizes_are_positive(sizes):
    with pytest.raises(ValueError, match="batch_sizes must be >= 1"):
        DecodeGraphs(lambda slots: slots, sizes)


def test_a_step_that_raises_leaves_graphs_that_can_be_called_again(device):
    broken = [True]

    def step(slots, x):
        if broken[0]:
            raise ArithmeticError("not today")
        return x * 2

    graphs = DecodeGraphs(step, [2])
    slots, x = torch.tensor([1], device=device), torch.ones(1, 3, device=device)
    with pytest.raises(ArithmeticError, match="not today"):
        graphs(slots, x)
    broken[0] = False
    assert graphs(slots, x).tolist() == [[2.0] * 3]
