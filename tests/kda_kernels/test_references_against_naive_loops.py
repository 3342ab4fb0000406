"""The references held against the contract's mathematics written as loops over single numbers.

The loops below share nothing with the references: they go row by row and key by key in Python's
and numpy's float64, and round to the activation type by integers.
"""

import math

import numpy as np
import pytest
import torch

from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import clone, exact, run_reference
from kda_kernels.testing.compare import error

D = 128
PACKED, FUSED, SPECULATIVE = CONTRACTS
MANTISSA = {torch.bfloat16: (8, -133), torch.float16: (11, -24), torch.float32: (24, -149)}


def rounded(value, dtype):
    """Nearest even among the numbers of a type (no overflow occurs here)."""
    bits, lowest = MANTISSA[dtype]
    _, exponent = math.frexp(value)
    unit = math.ldexp(1.0, max(exponent - bits, lowest))
    return round(value / unit) * unit


def sigmoid(z):
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


def softplus(a):
    return a if a > 20 else math.log1p(math.exp(a))


class Loops:
    """One call, computed number by number on copies of its pools."""

    def __init__(self, operator, values):
        self.v = {
            name: value.to(torch.float64).numpy().copy()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in values.items()
        }
        self.activation = values[operator.tensors[0].name].dtype
        self.S, self.H = self.v["state"].shape[:2]
        rows = self.v[operator.tensors[0].name].shape[0]
        self.rows = rows
        self.gate = self.v["raw_gate"].reshape(rows, self.H, D)
        self.beta = self.v["raw_beta"].reshape(rows, self.H)
        self.A = self.v["A_log"].reshape(-1)
        self.bias = self.v["dt_bias"].reshape(self.H, D)
        self.output = np.zeros((rows, self.H, D))

    def slot(self, index):
        first = self.v["first_slot"]
        if first is None:
            return index % self.S if -self.S <= index < self.S else None
        return index if first <= index < self.S else None

    def read_state(self, slot):
        pool = self.v["state"][slot]
        return (pool if self.v["state_layout"] == "vk" else pool.transpose(0, 2, 1)).copy()

    def write_state(self, slot, S):
        self.v["state"][slot] = S if self.v["state_layout"] == "vk" else S.transpose(0, 2, 1)

    def decay(self, row, h, k):
        a, rate = self.gate[row, h, k] + self.bias[h, k], math.exp(self.A[h])
        bound = self.v["lower_bound"]
        g = -rate * softplus(a) if bound is None else bound * sigmoid(rate * a)
        return math.exp(g)

    def recur(self, S, m, row):
        """Advance every head of S by one token in place and return o."""
        scale = self.v["scale"] or D**-0.5
        o = np.zeros((self.H, D))
        for h in range(self.H):
            q, k, v = (m[p * self.H * D + h * D :][:D] for p in range(3))
            q = scale * q / math.sqrt(math.fsum(q * q) + 1e-6)
            k = k / math.sqrt(math.fsum(k * k) + 1e-6)
            d = np.array([self.decay(row, h, key) for key in range(D)])
            beta = sigmoid(self.beta[row, h])
            for value in range(D):
                faded = S[h, value] * d
                u = v[value] - math.fsum(faded * k)
                S[h, value] = faded + beta * u * k
                o[h, value] = math.fsum(S[h, value] * q)
        return o

    def convolve(self, history, x):
        """Return m of every channel from three history columns, oldest first, and the token."""
        mixed, bias = np.zeros(3 * self.H * D), self.v["conv_bias"]
        for c in range(3 * self.H * D):
            part, channel = divmod(c, self.H * D)
            w = self.v["weight"][part, :, channel]
            z = sum(w[t] * history[c, t] for t in range(3)) + w[3] * x[c]
            z = z if bias is None else z + bias[c]
            mixed[c] = rounded(z * sigmoid(z), self.activation)
        return mixed

    def norm(self, o, row):
        gate = self.v["output_gate"].reshape(self.rows, self.H, D)[row]
        for h in range(self.H):
            rough = [rounded(value, self.activation) for value in o[h]]
            mean = math.fsum(value * value for value in rough) / D
            for i, value in enumerate(rough):
                y = value / math.sqrt(mean + self.v["norm_eps"]) * self.v["norm_weight"][i]
                self.output[row, h, i] = y * sigmoid(gate[h, i])

    def packed_decode(self):
        for row in range(self.rows):
            slot = self.slot(int(self.v["state_indices"][row]))
            if slot is None:
                continue
            S = self.read_state(slot)
            self.output[row] = self.recur(S, self.v["mixed_qkv"][row], row)
            self.write_state(slot, S)

    def fused_decode(self):
        for row in range(self.rows):
            slot = self.slot(int(self.v["state_indices"][row]))
            if slot is None:
                continue
            window, x, S = self.v["conv_state"][slot], self.v["x"][row], self.read_state(slot)
            self.norm(self.recur(S, self.convolve(window[:, -3:], x), row), row)
            self.write_state(slot, S)
            window[:, :-1] = window[:, 1:].copy()
            window[:, -1] = x

    def packed_fused_decode(self):
        T = self.v["state_indices"].shape[1]
        starts = [int(start) for start in self.v["query_start_loc"]]
        for n, line in enumerate(self.v["state_indices"].tolist()):
            a = min(max(int(self.v["num_accepted_tokens"][n]), 1), T) - 1
            slots = [self.slot(index) for index in line]
            if starts[n + 1] == starts[n] or slots[0] is None or slots[a] is None:
                continue
            window, S = self.v["conv_state"][slots[0]], self.read_state(slots[a])
            columns = [window[:, a + i].copy() for i in range(3)]
            for t, row in enumerate(range(starts[n], starts[n + 1])):
                x = self.v["x"][row]
                o = self.recur(S, self.convolve(np.stack(columns[-3:], 1), x), row)
                columns.append(x)
                if slots[t] is not None:
                    self.norm(o, row)
                    self.write_state(slots[t], S)
            for column, values in enumerate(columns[1:]):
                window[:, column] = values


def assert_reference_follows_loops(operator, values, wanted=2e-6):
    loops = Loops(operator, values)
    getattr(loops, operator.name)()
    expected = torch.from_numpy(loops.output).view([-1, loops.H, D])
    wide = clone(values)
    output, state = exact(operator, wide)
    assert error(output.view_as(expected), expected)[1] < 1e-11
    assert error(state, torch.from_numpy(loops.v["state"]))[1] < 1e-11
    output = run_reference(operator, values)
    grain = torch.finfo(values["raw_gate"].dtype).eps
    pool_grain = torch.finfo(values["state"].dtype).eps
    assert error(output.view_as(expected), expected)[0] < max(grain, wanted)
    assert error(values["state"], torch.from_numpy(loops.v["state"]))[0] < max(pool_grain, wanted)
    if "conv_state" in values:
        window = torch.from_numpy(loops.v["conv_state"])
        assert torch.equal(values["conv_state"].double(), window)


GATES = pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
LAYOUTS = pytest.mark.parametrize("state_layout", ["vk", "kv"])


@GATES
@LAYOUTS
def test_packed_decode_reference_is_the_mathematics(call, lower_bound, state_layout):
    for activation, heads in ((torch.float32, 1), (torch.bfloat16, 2), (torch.float16, 1)):
        values = call(
            PACKED,
            H=heads,
            activation=activation,
            lower_bound=lower_bound,
            state_layout=state_layout,
        )
        values["state_indices"][1] = -1
        assert_reference_follows_loops(PACKED, values)


@GATES
@LAYOUTS
@pytest.mark.parametrize("columns", [3, 4, 5])
def test_fused_decode_reference_is_the_mathematics(call, lower_bound, state_layout, columns):
    values = call(
        FUSED,
        L=columns,
        activation=[torch.float32, torch.bfloat16, torch.float16][columns - 3],
        lower_bound=lower_bound,
        state_layout=state_layout,
        window="DS" if columns == 4 else "SD",
        taps="channel-major" if columns == 5 else "tap-major",
        absent=frozenset({"t1_state_indices"} | ({"conv_bias"} if columns == 3 else set())),
        scale=None if columns == 3 else 0.3,
        norm_eps=1e-3,
    )
    values["state_indices"][2] = 0
    assert_reference_follows_loops(FUSED, values)


@GATES
@LAYOUTS
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_packed_fused_decode_reference_is_the_mathematics(call, lower_bound, state_layout, tokens):
    values = call(
        SPECULATIVE,
        N=4,
        T=tokens,
        R=3 * tokens + 1,
        H=1,
        S=4 * tokens + 2,
        activation=[torch.float32, torch.bfloat16][tokens % 2],
        lower_bound=lower_bound,
        state_layout=state_layout,
        window="SD" if tokens % 2 else "DS",
    )
    # A full sequence, an empty one, a short one and one that is null; then rows of nobody.
    short = max(tokens - 1, 1)
    bounds = [0, tokens, tokens, tokens + short, tokens + short + 1]
    values["query_start_loc"] = torch.tensor(bounds, dtype=torch.int32)
    values["num_accepted_tokens"] = torch.tensor([tokens, 1, short, 1], dtype=torch.int32)
    values["state_indices"][3, 0] = 0
    if tokens > 2:  # a token without a slot in the middle: the recurrence goes on through it
        values["state_indices"][0, 1] = -1
    assert_reference_follows_loops(SPECULATIVE, values)
