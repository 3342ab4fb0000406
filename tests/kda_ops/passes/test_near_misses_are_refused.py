"""What looks like the step and is another function stays as it is, with the reason for it."""

import pytest
import torch
import torch.nn.functional as F

D = 128


def norm_eps_larger(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-5)


def norm_eps_smaller(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-12)


def norm_eps_outside(x):
    return x / ((x * x).sum(-1, keepdim=True).sqrt() + 1e-6)


def norm_plus_eps(x):
    return x / (x.norm(dim=-1, keepdim=True) + 1e-6)


def norm_clamped(x):
    return F.normalize(x, dim=-1, eps=1e-6)


def norm_by_mean(x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def norm_missing(x):
    return x


def gate_overflowing(a, rate):
    return -rate * torch.log1p(a.exp())


def gate_growing(a, rate):
    return 5 * torch.sigmoid(rate * a)


def gate_clamped(a, rate):
    return torch.clamp(-rate * F.softplus(a), min=-5)


def gate_per_head(a, rate):
    return -rate * F.softplus(a[..., :1])


def gate_without_rate(a, rate):
    return -F.softplus(a)


def gate_precomputed(a, rate):
    return -a.abs()


def gate_silu(a, rate):
    return -5.0 * F.silu(rate * a)


def gate_other_threshold(a, rate):
    return -rate * F.softplus(a, threshold=10)


def beta_plain(beta):
    return beta.float()


def beta_doubled(beta):
    return 2 * beta.float().sigmoid()


def beta_tanh(beta):
    return torch.tanh(beta.float())


def updated(S, k, v, d, beta, sign=-1.0):
    S = S * d[..., None]
    u = (v + sign * (S * k[..., None]).sum(-2)) * beta[..., None]
    return S + k[..., None] * u[..., None, :]


def decayed_after(S, q, k, v, d, beta):
    u = (v - (S * k[..., None]).sum(-2)) * beta[..., None]
    S = (S + k[..., None] * u[..., None, :]) * d[..., None]
    return (S * q[..., None]).sum(-2), S


def predicted_before_decay(S, q, k, v, d, beta):
    u = (v - (S * k[..., None]).sum(-2)) * beta[..., None]
    S = S * d[..., None] + k[..., None] * u[..., None, :]
    return (S * q[..., None]).sum(-2), S


def output_of_old_state(S, q, k, v, d, beta):
    return (S * q[..., None]).sum(-2), updated(S, k, v, d, beta)


def axes_mixed_in_prediction(S, q, k, v, d, beta):
    S = S * d[..., None]
    u = (v - (S * k[..., None, :]).sum(-1)) * beta[..., None]
    S = S + k[..., None] * u[..., None, :]
    return (S * q[..., None]).sum(-2), S


def axes_mixed_in_output(S, q, k, v, d, beta):
    S = updated(S, k, v, d, beta)
    return (S * q[..., None, :]).sum(-1), S


def error_of_wrong_sign(S, q, k, v, d, beta):
    S = updated(S, k, v, d, beta, 1.0)
    return (S * q[..., None]).sum(-2), S


def written_transposed(S, q, k, v, d, beta):
    S = updated(S, k, v, d, beta)
    return (S * q[..., None]).sum(-2), S.transpose(-1, -2)


def not_decayed(S, q, k, v, d, beta):
    u = (v - (S * k[..., None]).sum(-2)) * beta[..., None]
    S = S + k[..., None] * u[..., None, :]
    return (S * q[..., None]).sum(-2) + 0 * d, S


def in_bfloat16(S, q, k, v, d, beta):
    S, q, k, v, d, beta = (x.bfloat16() for x in (S, q, k, v, d, beta))
    S = updated(S, k, v, d, beta)
    return (S * q[..., None]).sum(-2).float(), S.float()


def rounded_between(S, q, k, v, d, beta):
    S = updated(S, k, v, d, beta).bfloat16().float()
    return (S * q[..., None]).sum(-2), S


def squared(S, q, k, v, d, beta):
    S = updated(S, k, v, d, beta)
    return (S * S * q[..., None]).sum(-2), S


def accumulate(pool, slots, state):
    pool.index_put_((slots,), state, accumulate=True)


def scattered(pool, slots, state):
    pool.scatter_(0, slots.remainder(7)[:, None, None, None].expand_as(state), state)


def scattered_flat(pool, slots, state):
    flat = state.flatten(1)
    pool.view(len(pool), -1).scatter_(0, slots.remainder(7)[:, None].expand_as(flat), flat)


def written_flat(pool, slots, state):
    pool.view(len(pool), -1)[slots] = state.flatten(1)


def looked_up(pool, slots):
    return F.embedding(slots.remainder(7), pool.flatten(1)).view(-1, *pool.shape[1:])


def gathered(pool, slots):
    index = slots.remainder(7)[:, None, None, None]
    return pool.gather(0, index.expand(-1, *pool.shape[1:]))


def written_elsewhere(pool, slots, state):
    pool[slots % 7] = state


NEAR_MISSES = {
    "NORM_EPS": [{"unit": norm_eps_larger}, {"unit": norm_eps_smaller}],
    "NORM_FORM": [
        {"unit": norm_eps_outside},
        {"unit": norm_plus_eps},
        {"unit": norm_clamped},
        {"unit": norm_by_mean},
    ],
    "NORM_MISSING": [{"unit": norm_missing}],
    "ROUNDING": [
        {"recur": in_bfloat16},
        {"recur": rounded_between},
    ],
    "GATE_FORM": [
        {"gate": gate_overflowing},
        {"gate": gate_clamped},
        {"gate": gate_without_rate},
        {"gate": gate_precomputed},
        {"gate": gate_silu},
        {"gate": gate_other_threshold},
        {"recur": not_decayed},
    ],
    "GATE_PER_HEAD": [{"gate": gate_per_head}],
    "BOUND_RANGE": [{"gate": gate_growing}],
    "BETA_FORM": [{"logits": beta_plain}, {"logits": beta_doubled}, {"logits": beta_tanh}],
    "NOT_DELTA_RULE": [
        {"recur": decayed_after},
        {"recur": predicted_before_decay},
        {"recur": axes_mixed_in_prediction},
        {"recur": error_of_wrong_sign},
        {"recur": written_transposed},
        {"recur": squared},
    ],
    "OUTPUT_NOT_FOUND": [
        {"recur": output_of_old_state},
        {"recur": axes_mixed_in_output},
    ],
    "ACCUMULATES": [{"write": accumulate}],
    "INDEX_FORM": [
        {"write": scattered},
        {"write": scattered_flat},
        {"read": looked_up},
        {"read": gathered},
    ],
    "STATE_SHAPE": [{"write": written_flat}],
    "INDEX_MISMATCH": [{"write": written_elsewhere}],
}
CASES = [
    pytest.param(reason, changes, id=f"{reason}-{next(iter(changes.values())).__name__}")
    for reason, cases in NEAR_MISSES.items()
    for changes in cases
]


@pytest.fixture(scope="module")
def round_trips_survive(step):
    """Whether a cast to bfloat16 and back reaches the pass; torch 2.11 removes it before."""
    captured = step.capture(lambda x: x.to(torch.bfloat16).float() * 2, torch.ones(4))
    return sum("convert_element_type" in target for target in captured.targets) == 2


REMOVABLE = (rounded_between,)


@pytest.mark.parametrize(("reason", "changes"), CASES)
def test_a_near_miss_is_refused_with_its_reason(step, reason, changes, round_trips_survive):
    spelling = step.Spelling(**changes)
    layer = step.StepLayer(spelling)
    captured = step.capture(layer, *step.inputs(spelling))
    if not round_trips_survive and any(change in REMOVABLE for change in changes.values()):
        # What is left is the plain step, and fusing it computes what torch alone would compute.
        assert captured.matches == 1
        return
    assert captured.reasons == [reason]
    assert captured.matches == 0
    assert captured.after == captured.before


@pytest.mark.parametrize("pool", [torch.float16, torch.float64])
def test_a_pool_of_a_type_that_no_kernel_serves_is_refused(step, pool):
    spelling = step.Spelling(pool=pool)
    captured = step.capture(step.StepLayer(spelling), *step.inputs(spelling))
    assert captured.reasons == ["STATE_DTYPE"]


def test_a_silu_behind_the_step_stays_outside_of_it(step):
    class Gated(step.StepLayer):
        def forward(self, mixed, gate, beta, slots):
            o = super().forward(mixed, gate, beta, slots).float()
            return o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * F.silu(o)

    spelling = step.Spelling()
    captured = step.capture(Gated(spelling), *step.inputs(spelling))
    assert captured.matches == 1
    assert "aten.rsqrt.default" in captured.targets
