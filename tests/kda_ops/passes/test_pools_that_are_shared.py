"""The pool belongs to the step: whoever else looks at it keeps the step from being rewritten."""

import copy

import pytest
import torch

D = 128


def advance(layer, pool, mixed, gate, beta, slots):
    """One step on a given pool, with what is inside of it."""
    s = layer.spelling
    q, k, v = s.split(mixed, s.heads)
    q, k = s.unit(q) * s.scale, s.unit(k)
    a = gate.float().view(-1, s.heads, D) + layer.dt_bias.view(s.heads, D)
    g = s.gate(a, layer.A_log.exp()[:, None])
    o, S = s.recur(pool[slots], q, k, v, g.exp(), s.logits(beta))
    return o, S, q


def around(before=None, after=None, inside=None):
    """Return a function that does something before, after or with the inside of a step."""

    def run(layer, pool, *x):
        first = before(pool) if before else None
        o, S, q = advance(layer, pool, *x)
        pool[x[3]] = S
        last = after(pool) if after else None
        seen = inside(S, q) if inside else None
        return [item for item in (o, first, last, seen) if item is not None]

    return run


def zero_a_slot(pool):
    pool[3].zero_()


def halve(pool):
    pool.mul_(0.5)


def save(pool):
    saved = torch.empty_like(pool)
    saved.copy_(pool)
    return saved


def twice(between=None):
    def run(layer, pool, *x):
        first, S, _ = advance(layer, pool, *x)
        pool[x[3]] = S
        seen = between(pool) if between else first.sum()
        second, S, _ = advance(layer, pool, *x)
        pool[x[3]] = S
        return [first, seen, second]

    return run


def returned(layer, pool, *x):
    o, S, _ = advance(layer, pool, *x)
    return [o, pool.index_put((x[3],), S)]


def masked(layer, pool, mixed, gate, beta, slots):
    valid, slots = (slots >= 0)[:, None, None, None], slots.clamp(min=0)
    old = pool[slots]
    o, S, _ = advance(layer, pool, mixed, gate, beta, slots)
    pool[slots] = torch.where(valid, S, old)
    return [o * valid[..., 0]]


def through_a_view(layer, pool, *x):
    part = pool.view(1, *pool.shape)[0]
    o, S, _ = advance(layer, part, *x)
    part[x[3]] = S
    return [o]


def later_input(layer, pool, mixed, gate, beta, slots):
    o, S, _ = advance(layer, pool, mixed, gate, beta, slots)
    pool[slots] = S
    return [o, (mixed + pool[slots, 0, 0, :1]).sum()]


class Model(torch.nn.Module):
    def __init__(self, layer, run):
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, *x):
        return self.run(self.layer, self.layer.pool, *x)


def outcome(step, run):
    """Capture a model and compare results and pool with eager PyTorch."""
    layer = step.StepLayer(step.Spelling())
    eager = copy.deepcopy(layer)
    x = step.inputs(step.Spelling())
    with torch.no_grad():
        expected = run(eager, eager.pool, *x)
    captured = step.capture(Model(layer, run), *x)
    for found, wanted in zip(captured.output, expected, strict=True):
        step.compare(found, wanted, 1e-4)
    step.compare(layer.pool, eager.pool, 1e-5)
    return captured


REFUSED = {
    "read before": (around(before=torch.sum), "STATE_READ_ELSEWHERE"),
    "read after": (around(after=torch.sum), "STATE_READ_ELSEWHERE"),
    "gathered after": (around(after=lambda p: p[torch.arange(2)]), "STATE_READ_ELSEWHERE"),
    "cloned": (around(before=torch.clone), "STATE_SNAPSHOT"),
    "copied": (around(before=save), "STATE_SNAPSHOT"),
    "looked at through a view": (around(before=lambda p: p[2] * 2), "STATE_ALIASED"),
    "a slot zeroed before": (around(before=zero_a_slot), "STATE_NOT_INPUT"),
    "halved before": (around(before=halve), "STATE_NOT_INPUT"),
    "new state used": (around(inside=lambda S, q: S.sum()), "INTERMEDIATE_USED"),
    "normalised q used": (around(inside=lambda S, q: q), "INTERMEDIATE_USED"),
    "returned, not stored": (returned, "STATE_NOT_WRITTEN_BACK"),
    "masked": (masked, "MASKED_ROWS"),
    "read in part after": (later_input, "STATE_ALIASED"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pool_that_is_shared_is_left_alone(step, name):
    run, reason = REFUSED[name]
    captured = outcome(step, run)
    assert captured.reasons == [reason]
    assert captured.after == captured.before


def test_two_steps_on_one_pool_are_both_rewritten(step):
    assert outcome(step, twice()).matches == 2


def test_two_steps_on_one_pool_with_a_read_between_keep_the_read_value(step):
    captured = outcome(step, twice(between=torch.sum))
    assert captured.matches == 0
    assert captured.reasons[0] == "STATE_READ_ELSEWHERE"


def test_a_pool_that_is_a_view_of_an_input_is_worked_on_in_place(step):
    assert outcome(step, through_a_view).matches == 1


def test_an_output_may_be_used_as_often_as_one_likes(step):
    def run(layer, pool, *x):
        o, S, _ = advance(layer, pool, *x)
        pool[x[3]] = S
        return [o, o * 2, o.bfloat16()]

    assert outcome(step, run).matches == 1


def test_more_slots_than_rows_are_refused(step):
    def run(layer, pool, mixed, gate, beta, slots):
        o, S, _ = advance(layer, pool, mixed[:1], gate[:1], beta[:1], slots)
        pool[slots] = S
        return [o]

    captured = outcome(step, run)
    assert captured.matches == 0
    assert captured.reasons == ["ARGUMENT_LAYOUT"]


def test_a_head_width_that_no_kernel_serves_is_refused(step):
    def run(pool, k, v, slots):
        S = pool[slots]
        S = S + k[..., None] * (v - (S * k[..., None]).sum(-2))[..., None, :]
        pool[slots] = S
        return (S * k[..., None]).sum(-2)

    x = torch.randn(3, 2, 64)
    captured = step.capture(run, torch.randn(5, 2, 64, 64), x, x.flip(0), torch.arange(3))
    assert captured.reasons == ["HEAD_WIDTH"]


def test_metadata_assertions_do_not_stand_in_the_way(step):
    layer = step.StepLayer(step.Spelling())

    class Asserting(step.StepLayer):
        def forward(self, mixed, gate, beta, slots):
            torch.ops.aten._assert_tensor_metadata(mixed, dtype=torch.bfloat16)
            return super().forward(mixed, gate, beta, slots)

    asserting = Asserting(step.Spelling())
    asserting.load_state_dict(layer.state_dict())
    captured = step.capture(asserting, *step.inputs(step.Spelling()))
    assert captured.matches == 1
    assert "aten._assert_tensor_metadata.default" not in captured.targets
