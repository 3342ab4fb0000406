"""dynamic=True: what code fixes is decided and taken, and what stays symbolic is refused.

Rows and slots may be symbols. Heads and their width are numbers of a kernel, so they have to be
numbers in the graph: those of parameters and buffers, or of inputs of which rows alone are marked.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

D = 128


def everything_symbolic():
    """What torch.compile(..., dynamic=True) sets for inputs that nobody marked."""
    return torch._dynamo.config.patch(assume_static_by_default=False)


def unit(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def step_of(heads, width):
    """A step whose numbers of heads and channels are as given, or those of its inputs if None."""

    def run(pool, q, k, v, gate, beta, A_log, slots):
        shape = (-1, heads or pool.shape[1], width or pool.shape[2])
        q, k, v, gate = (x.view(shape) for x in (q, k, v, gate))
        q, k = unit(q) * D**-0.5, unit(k)
        S = pool[slots] * torch.exp(-A_log.exp()[:, None] * F.softplus(gate))[..., None]
        u = torch.sigmoid(beta)[..., None] * (v - (S * k[..., None]).sum(-2))
        S = S + k[..., None] * u[..., None, :]
        pool[slots] = S
        return (S * q[..., None]).sum(-2)

    return run


def arguments(heads=2, slots=7, rows=3):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    rows_of = [draw(rows, heads * D) for _ in range(4)]
    index = torch.randperm(slots, generator=generator)[:rows]
    return [draw(slots, heads, D, D), *rows_of, draw(rows, heads), draw(heads), index]


def compared(step, run, given):
    """Capture a step with everything symbolic and compare result and pool with eager."""
    twin = copy.deepcopy(given)
    expected = run(*twin)
    with everything_symbolic():
        captured = step.capture(run, *given)
    step.compare(captured.output, expected, 1e-5)
    step.compare(given[0], twin[0], 1e-5)
    return captured


def test_a_row_whose_width_stays_symbolic_is_refused_with_the_way_out(step):
    with everything_symbolic():
        captured = step.check_step(step.Spelling())
    assert captured.reasons == ["DYNAMIC_SHAPE"]
    assert captured.after == captured.before
    assert "mark_dynamic" in captured.findings[0].reason.advice


@pytest.mark.parametrize(("heads", "width"), [(2, D), (None, None)])
def test_a_pool_that_is_an_argument_is_refused_where_its_heads_are_symbols(step, heads, width):
    captured = compared(step, step_of(heads, width), arguments())
    assert captured.reasons == ["DYNAMIC_SHAPE"]
    assert captured.after == captured.before


def test_inputs_whose_widths_the_code_decides_are_taken_with_everything_else_symbolic(step):
    given = arguments()
    run = step_of(2, D)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("pool", given[0].clone())
            self.register_buffer("A_log", given[6].clone())
            self.project = torch.nn.Linear(64, 2 * D, bias=False)

        def forward(self, h, beta, slots):
            q, k, v, gate = (self.project(h * n) for n in (1.0, 2.0, 3.0, 4.0))
            return run(self.pool, q, k, v, gate, beta, self.A_log, slots)

    layer = Layer()
    twin = copy.deepcopy(layer)
    x = (torch.randn(3, 64), given[5], given[7])
    expected = twin(*x)
    with everything_symbolic():
        captured = step.capture(layer, *x)
    assert captured.matches == 1
    step.compare(captured.output, expected, 1e-5)
    step.compare(layer.pool, twin.pool, 1e-5)


def test_rows_and_slots_that_are_marked_are_symbols_of_a_graph_that_is_taken(step):
    given = arguments()
    for tensor in (*given[:6], given[7]):
        torch._dynamo.mark_dynamic(tensor, 0)
    twin = copy.deepcopy(given)
    run = step_of(None, None)
    expected = run(*twin)
    captured = step.capture(run, *given)
    assert captured.matches == 1
    step.compare(captured.output, expected, 1e-5)
    step.compare(given[0], twin[0], 1e-5)
