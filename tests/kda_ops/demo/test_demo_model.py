"""The demo's model against the mathematics written out as loops over single heads in float64."""

import math

import pytest
import torch

from kda_ops.demo.model import D, DeltaAttention, DeltaLM


@pytest.fixture(scope="module")
def attention():
    torch.manual_seed(1)
    layer = DeltaAttention(hidden=32, heads=2, slots=5, state_dtype=torch.float32).eval()
    layer.state.normal_()
    layer.window.normal_()
    layer.norm.data.uniform_(0.5, 1.5)
    return layer.requires_grad_(False)


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def by_the_formulas(layer, x, slot):
    """One row: the formulas of the contract, head by head, in float64."""
    width = layer.heads * D
    row = layer.project.weight.double() @ x.double()
    qkv, decay, gate, beta = (
        row[: 3 * width],
        row[3 * width : 4 * width],
        *row[4 * width :].split([width, layer.heads]),
    )
    taps = torch.cat([layer.window[slot].double(), qkv[:, None]], 1)
    mixed = (taps * layer.conv.double()).sum(1)
    mixed = mixed * sigmoid(mixed)
    state = torch.empty(layer.heads, D, D, dtype=torch.float64)
    out = torch.empty(layer.heads, D, dtype=torch.float64)
    for h in range(layer.heads):
        channels = slice(h * D, (h + 1) * D)
        q, k, v = (mixed[part * width :][channels] for part in range(3))
        q = q / torch.sqrt(q @ q + 1e-6) / math.sqrt(D)
        k = k / torch.sqrt(k @ k + 1e-6)
        a = decay[channels] + layer.dt_bias[channels].double()
        keep = torch.exp(-layer.A_log[h].double().exp() * torch.log1p(torch.exp(a)))
        S = keep[:, None] * layer.state[slot, h].double()
        S = S + sigmoid(beta[h]) * torch.outer(k, v - S.T @ k)
        o = S.T @ q
        o = o / torch.sqrt((o @ o) / D + 1e-5) * layer.norm.double() * sigmoid(gate[channels])
        state[h], out[h] = S, o
    return layer.out.weight.double() @ out.flatten(), state, taps[:, 1:]


def test_a_step_is_the_mathematics_of_the_contract(attention):
    x, slots = torch.randn(3, 32), torch.tensor([4, 0, 2])
    expected = [by_the_formulas(attention, row, slot) for row, slot in zip(x, slots, strict=True)]
    before = attention.state.clone(), attention.window.clone()
    y = attention(x, slots)
    for row, (slot, (out, state, window)) in enumerate(zip(slots, expected, strict=True)):
        torch.testing.assert_close(y[row].double(), out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(attention.state[slot].double(), state, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(attention.window[slot].double(), window, rtol=1e-5, atol=1e-5)
    for idle in (1, 3):
        assert torch.equal(attention.state[idle], before[0][idle])
        assert torch.equal(attention.window[idle], before[1][idle])


def test_a_sequence_does_not_depend_on_its_slot_or_its_neighbours():
    torch.manual_seed(2)
    model = DeltaLM(95, layers=2, heads=1, slots=4, hidden=32).eval().requires_grad_(False)
    together = [model(torch.tensor([t, 7]), torch.tensor([3, 1])) for t in (1, 2, 3)]
    for pool in model.buffers():
        pool.zero_()
    alone = [model(torch.tensor([t]), torch.tensor([0])) for t in (1, 2, 3)]
    for both, one in zip(together, alone, strict=True):
        torch.testing.assert_close(both[0], one[0])
