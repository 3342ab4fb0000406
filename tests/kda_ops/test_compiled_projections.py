"""An operator behind a projection whose rows Inductor would pad, as it does on a GPU."""

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import kda_ops
from kda_kernels.testing.cases import clone
from kda_kernels.testing.compare import assert_same_bits

HEADS, ROWS, D = 2, 5, 128
PARTS = (3 * HEADS * D, 256, 16, HEADS)
"""q, k and v; a gate behind the norm; what the decay is projected from; beta."""


@pytest.fixture
def values():
    """Projections as models have them: one wide and odd, from a part of which another starts."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return {
        "x": draw(ROWS, 32),
        "project": draw(32, sum(PARTS)),
        "decay": draw(16, HEADS * D),
        "A_log": draw(HEADS),
        "dt_bias": draw(HEADS * D),
        "state": draw(ROWS, HEADS, D, D),
    }


def step(
    x: Tensor,
    project: Tensor,
    decay: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Decode a token behind the projections; return the output and its gate."""
    qkv, gate, low, beta = (x @ project).split(PARTS, dim=-1)
    o = kda_ops.packed_kda_decode(qkv, low @ decay, beta, A_log, dt_bias, state, None)
    return o.flatten(1), torch.sigmoid(gate)


def test_under_the_pass_parts_of_a_row_are_passed_on_as_they_lie(values):
    torch._dynamo.reset()
    eager, compiled = clone(values), clone(values)
    expected = step(**eager)
    padded = torch._inductor.config.patch(disable_padding_cpu=False, force_disable_caches=True)
    with padded, kda_ops.enabled():
        actual, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), **compiled)
    (call,) = [line for line in code.splitlines() if "kda.packed_decode.default(" in line]
    assert call.count("reinterpret_tensor") == 2  # the packed row and beta
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert_same_bits(compiled["state"], eager["state"], "state")
