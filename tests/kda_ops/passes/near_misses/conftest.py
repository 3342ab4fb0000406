"""Steps that look like the delta rule and compute something else, by what they do otherwise."""

import pytest
import torch
import torch.nn.functional as F


def square_sum(x):
    return (x * x).sum(-1, keepdim=True)


NORMS = {
    "eps of 1e-5": ("NORM_EPS", lambda x: x * torch.rsqrt(square_sum(x) + 1e-5)),
    "eps of 1e-12": ("NORM_EPS", lambda x: x * torch.rsqrt(square_sum(x) + 1e-12)),
    "no eps": ("NORM_EPS", lambda x: x * torch.rsqrt(square_sum(x))),
    "eps outside of the root": ("NORM_FORM", lambda x: x / (square_sum(x).sqrt() + 1e-6)),
    "norm plus eps": ("NORM_FORM", lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-6)),
    "F.normalize": ("NORM_FORM", lambda x: F.normalize(x, dim=-1, eps=1e-6)),
    "clamped square": ("NORM_FORM", lambda x: x * torch.rsqrt(square_sum(x).clamp_min(1e-6))),
    "mean of squares": (
        "NORM_FORM",
        lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    ),
    "sum of absolutes": ("NORM_FORM", lambda x: x / (x.abs().sum(-1, keepdim=True) + 1e-6)),
    "no root": ("NORM_FORM", lambda x: x / (square_sum(x) + 1e-6)),
    "cube root": ("NORM_FORM", lambda x: x * (square_sum(x) + 1e-6).pow(-1 / 3)),
    "over the heads": (
        "NORM_FORM",
        lambda x: x * torch.rsqrt((x * x).sum((-1, -2), keepdim=True) + 1e-6),
    ),
    "over half of the channels": (
        "NORM_FORM",
        lambda x: x * torch.rsqrt(square_sum(x[..., :64]) + 1e-6),
    ),
    "none": ("NORM_MISSING", lambda x: x + 0),
    "softmax": ("NORM_MISSING", lambda x: torch.softmax(x, -1)),
}

GATES = {
    "softplus that overflows": ("GATE_FORM", lambda a, rate: -rate * torch.log1p(a.exp())),
    "softplus clamped": ("GATE_FORM", lambda a, rate: (-rate * F.softplus(a)).clamp(min=-5)),
    "softplus without rate": ("GATE_FORM", lambda a, rate: -F.softplus(a)),
    "softplus with a threshold": ("GATE_FORM", lambda a, rate: -rate * F.softplus(a, threshold=10)),
    "softplus with a beta": ("GATE_FORM", lambda a, rate: -rate * F.softplus(a, beta=2)),
    "softplus of the rate": ("GATE_FORM", lambda a, rate: -F.softplus(rate * a)),
    "computed before": ("GATE_FORM", lambda a, rate: -a.abs()),
    "of SiLU": ("GATE_FORM", lambda a, rate: -5.0 * F.silu(rate * a)),
    "of tanh": ("GATE_FORM", lambda a, rate: -5.0 * torch.tanh(rate * a)),
    "of a hard sigmoid": ("GATE_FORM", lambda a, rate: -5.0 * F.hardsigmoid(rate * a)),
    "of ReLU": ("GATE_FORM", lambda a, rate: -rate * F.relu(a)),
    "rate outside of the sigmoid": ("GATE_FORM", lambda a, rate: -rate * torch.sigmoid(a)),
    "rate added": ("GATE_FORM", lambda a, rate: -5.0 * torch.sigmoid(rate + a)),
    "growing": ("BOUND_RANGE", lambda a, rate: 5.0 * torch.sigmoid(rate * a)),
    "one a head": ("GATE_PER_HEAD", lambda a, rate: -rate * F.softplus(a[..., :1])),
}

BETAS = {
    "plain": ("BETA_FORM", lambda b: b.float()),
    "doubled": ("BETA_FORM", lambda b: 2 * b.float().sigmoid()),
    "tanh": ("BETA_FORM", lambda b: torch.tanh(b.float())),
    "hard sigmoid": ("BETA_FORM", lambda b: F.hardsigmoid(b.float())),
    "one minus": ("BETA_FORM", lambda b: 1 - 0.5 * b.float().sigmoid()),
    "softmax over heads": ("BETA_FORM", lambda b: torch.softmax(b.float(), -1)),
}


def over_keys(S, x):
    return (S * x[..., None]).sum(-2)


def over_values(S, x):
    return (S * x[..., None, :]).sum(-1)


def outer(k, u):
    return k[..., None] * u[..., None, :]


def after(S, k, v, d, b, sign=-1.0):
    """The state after the step of the delta rule."""
    S = S * d[..., None]
    return S + outer(k, (v + sign * over_keys(S, k)) * b[..., None])


def decayed_after(S, q, k, v, d, b):
    S = (S + outer(k, (v - over_keys(S, k)) * b[..., None])) * d[..., None]
    return over_keys(S, q), S


def predicted_before_decay(S, q, k, v, d, b):
    S = S * d[..., None] + outer(k, (v - over_keys(S, k)) * b[..., None])
    return over_keys(S, q), S


def output_of_decayed_state(S, q, k, v, d, b):
    return over_keys(S * d[..., None], q), after(S, k, v, d, b)


def prediction_over_values(S, q, k, v, d, b):
    S = S * d[..., None]
    S = S + outer(k, (v - over_values(S, k)) * b[..., None])
    return over_keys(S, q), S


def output_over_values(S, q, k, v, d, b):
    S = after(S, k, v, d, b)
    return over_values(S, q), S


def decayed_over_values(S, q, k, v, d, b):
    S = S * d[..., None, :]
    S = S + outer(k, (v - over_keys(S, k)) * b[..., None])
    return over_keys(S, q), S


def outer_transposed(S, q, k, v, d, b):
    S = S * d[..., None]
    S = S + outer((v - over_keys(S, k)) * b[..., None], k)
    return over_keys(S, q), S


def predicted_by_q(S, q, k, v, d, b):
    S = S * d[..., None]
    S = S + outer(k, (v - over_keys(S, q)) * b[..., None])
    return over_keys(S, q), S


def written_by_q(S, q, k, v, d, b):
    S = S * d[..., None]
    S = S + outer(q, (v - over_keys(S, k)) * b[..., None])
    return over_keys(S, q), S


def not_decayed(S, q, k, v, d, b):
    S = S + outer(k, (v - over_keys(S, k)) * b[..., None])
    return over_keys(S, q) + 0 * d, S


def decayed_twice(S, q, k, v, d, b):
    return predicted_before_decay(S * d[..., None], q, k, v, d, b)


def beta_on_value_alone(S, q, k, v, d, b):
    S = S * d[..., None]
    S = S + outer(k, v * b[..., None] - over_keys(S, k))
    return over_keys(S, q), S


def beta_squared(S, q, k, v, d, b):
    S = S * d[..., None]
    S = S + outer(k * b[..., None], (v - over_keys(S, k)) * b[..., None])
    return over_keys(S, q), S


def in_bfloat16(S, q, k, v, d, b):
    S, q, k, v, d, b = (x.bfloat16() for x in (S, q, k, v, d, b))
    S = after(S, k, v, d, b)
    return over_keys(S, q).float(), S.float()


def rounded_between(S, q, k, v, d, b):
    S = after(S, k, v, d, b).bfloat16().float()
    return over_keys(S, q), S


def error_of_wrong_sign(S, q, k, v, d, b):
    S = after(S, k, v, d, b, sign=1.0)
    return over_keys(S, q), S


def written_transposed(S, q, k, v, d, b):
    S = after(S, k, v, d, b)
    return over_keys(S, q), S.transpose(-1, -2)


def output_of_squared_state(S, q, k, v, d, b):
    S = after(S, k, v, d, b)
    return over_keys(S * S, q), S


def state_clamped(S, q, k, v, d, b):
    S = after(S, k, v, d, b).clamp(-1, 1)
    return over_keys(S, q), S


def error_clamped(S, q, k, v, d, b):
    S = S * d[..., None]
    S = S + outer(k, (v - over_keys(S, k)).clamp(-1, 1) * b[..., None])
    return over_keys(S, q), S


RECURRENCES = {
    "NOT_DELTA_RULE": [
        *(decayed_after, predicted_before_decay, prediction_over_values, decayed_over_values),
        *(outer_transposed, predicted_by_q, written_by_q, error_of_wrong_sign),
        *(written_transposed, output_of_squared_state),
    ],
    "OUTPUT_NOT_FOUND": [output_of_decayed_state, output_over_values],
    "GATE_FORM": [not_decayed, decayed_twice],
    "BETA_FORM": [beta_on_value_alone, beta_squared],
    "NOT_UNDERSTOOD": [state_clamped, error_clamped],
    "ROUNDING": [in_bfloat16, rounded_between],
}


def accumulate(pool, slots, state):
    pool.index_put_((slots,), state, accumulate=True)


def added(pool, slots, state):
    pool.index_add_(0, slots.remainder(7), state)


def written_elsewhere(pool, slots, state):
    pool[slots % 7] = state


def written_next_to_it(pool, slots, state):
    pool[(slots + 1) % 7] = state


def read_next_to_it(pool, slots):
    return pool[slots.flip(0)]


SLOTS = {
    "ACCUMULATES": [{"write": accumulate}, {"write": added}],
    "INDEX_MISMATCH": [
        *({"write": written_elsewhere}, {"write": written_next_to_it}, {"read": read_next_to_it}),
    ],
    "STATE_DTYPE": [{"pool": torch.float16}, {"pool": torch.float64}],
}


def every():
    """Yield a name, the reason and the changes of a spelling for every near-miss."""
    parts = {"unit": NORMS, "gate": GATES, "logits": BETAS}
    for part, cases in parts.items():
        for name, (reason, function) in cases.items():
            yield f"{part}: {name}", reason, {part: function}
    for reason, functions in RECURRENCES.items():
        for function in functions:
            yield function.__name__, reason, {"recur": function}
    for reason, changes in SLOTS.items():
        for change in changes:
            ((part, how),) = change.items()
            yield getattr(how, "__name__", f"{part}: {how}"), reason, change


NEAR_MISSES = {name: (reason, changes) for name, reason, changes in every()}


@pytest.fixture(params=NEAR_MISSES)
def near_miss(request):
    """The name of each near-miss in turn, its reason, and what it changes."""
    return request.param, *NEAR_MISSES[request.param]


@pytest.fixture(scope="session")
def near_misses():
    """All of them by name."""
    return NEAR_MISSES
