"""Parts around a step that are other functions stay in the graph, and the result stays the same."""

import pytest
import torch
import torch.nn.functional as F


def silu_missing(x):
    return x + 0


def silu_gelu(x):
    return F.gelu(x)


def silu_swish(x):
    return x * torch.sigmoid(1.702 * x)


def silu_hard(x):
    return F.hardswish(x)


def silu_doubled(x):
    return F.silu(F.silu(x))


def taps(h, x):
    return torch.cat([h, x.unsqueeze(-1)], -1).float()


def conv_backwards(h, x, w, b):
    return (taps(h, x)[..., -4:] * w.flip(-1)).sum(-1)


def conv_of_three(h, x, w, b):
    return (taps(h, x)[..., -3:] * w[:, 1:]).sum(-1)


def conv_without_token(h, x, w, b):
    return (h[..., -3:].float() * w[:, :3]).sum(-1) + x.float()


def conv_token_twice(h, x, w, b):
    return (taps(h, x)[..., -4:] * w).sum(-1) + x.float() * w[:, 3]


def conv_oldest_twice(h, x, w, b):
    t = taps(h, x)
    return (t[..., [-4, -4, -2, -1]] * w).sum(-1)


def conv_early(h, x, w, b):
    t = taps(h, x)[..., -4:]
    return t[..., 0] * w[:, 1] + t[..., 1] * w[:, 0] + t[..., 2] * w[:, 2] + t[..., 3] * w[:, 3]


def conv_scaled(h, x, w, b):
    return (taps(h, x)[..., -4:] * w).sum(-1) * 0.5


def conv_shifted(h, x, w, b):
    return (taps(h, x)[..., -4:] * w).sum(-1) + 1.0


def conv_bias_of_row(h, x, w, b):
    return (taps(h, x)[..., -4:] * w).sum(-1) + x.float()


def conv_squared(h, x, w, b):
    return (taps(h, x)[..., -4:].square() * w).sum(-1)


def move_nothing(h, x):
    return h * 1


def move_twice(h, x):
    return torch.cat([h[..., 2:], x.unsqueeze(-1), x.unsqueeze(-1)], -1)


def move_to_the_front(h, x):
    return torch.cat([x.unsqueeze(-1), h[..., :-1]], -1)


def move_scaled(h, x):
    return torch.cat([h[..., 1:], 2 * x.unsqueeze(-1)], -1)


def move_silu(h, x):
    return torch.cat([h[..., 1:], F.silu(x).unsqueeze(-1)], -1)


def move_rolled(h, x):
    return torch.roll(h, -1, -1)


def norm_eps_outside(o, w):
    return o / (o.pow(2).mean(-1, keepdim=True).sqrt() + 1e-5) * w


def norm_clamped(o, w):
    return o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True).clamp_min(1e-5)) * w


def norm_centred(o, w):
    o = o - o.mean(-1, keepdim=True)
    return o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def norm_layer(o, w):
    return F.layer_norm(o, (128,), w)


def norm_l2(o, w):
    return o * torch.rsqrt(o.pow(2).sum(-1, keepdim=True) + 1e-5) * w


def norm_over_heads(o, w):
    return o * torch.rsqrt(o.pow(2).mean((-1, -2), keepdim=True) + 1e-5) * w


def norm_missing(o, w):
    return o * w


def norm_with_bias(o, w):
    return o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5) * w + w


def norm_weight_squared(o, w):
    return o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5) * w * w


def norm_doubled(o, w):
    return 2 * o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def norm_cubed(o, w):
    return o * (o.pow(2).mean(-1, keepdim=True) + 1e-5).pow(-1.0) * w


def norm_of_absolute(o, w):
    return o.abs() * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def out_silu(g):
    return F.silu(g.float())


def out_tanh(g):
    return torch.tanh(g.float())


def out_doubled(g):
    return 2 * torch.sigmoid(g.float())


def out_missing(g):
    return g.float()


def out_scaled_logits(g):
    return torch.sigmoid(1.01 * g.float()) ** 2


def out_hard(g):
    return F.hardsigmoid(g.float())


LOOK_ALIKES = {
    "silu": {
        "CONV_MISSING": [silu_missing, silu_gelu, silu_swish, silu_hard],
    },
    "conv": {
        "CONV_FORM": [
            conv_of_three,
            conv_without_token,
            conv_token_twice,
            conv_early,
            conv_scaled,
            conv_shifted,
            conv_bias_of_row,
        ],
        "NOT_UNDERSTOOD": [conv_oldest_twice, conv_squared],
    },
    "move": {
        "CONV_WINDOW": [move_nothing, move_to_the_front, move_twice, move_scaled, move_silu],
    },
    "norm": {
        "OUTPUT_NORM": [
            norm_eps_outside,
            norm_clamped,
            norm_centred,
            norm_layer,
            norm_l2,
            norm_over_heads,
            norm_missing,
            norm_with_bias,
            norm_weight_squared,
            norm_doubled,
            norm_cubed,
            norm_of_absolute,
        ],
    },
    "out": {
        "OUTPUT_NORM": [out_silu, out_tanh, out_doubled, out_missing, out_hard],
    },
}
CASES = [
    pytest.param(part, reason, wrong, id=wrong.__name__)
    for part, reasons in LOOK_ALIKES.items()
    for reason, wrongs in reasons.items()
    for wrong in wrongs
]


@pytest.mark.parametrize(("part", "reason", "wrong"), CASES)
def test_a_part_that_only_looks_alike_is_left_with_its_reason(layers, part, reason, wrong):
    seed = [case.values[2] for case in CASES].index(wrong)
    traced = layers.trace(layers.sampled(seed, form="indexed", heads=2, **{part: wrong}))
    (found,) = traced.findings
    assert found.operator == "kda::packed_decode"
    assert reason in [left.reason.name for left in found.left], found.left
    assert traced.difference < 1


@pytest.mark.parametrize("wrong", [silu_doubled, conv_backwards, move_rolled, out_scaled_logits])
def test_what_is_inside_of_a_look_alike_may_be_taken_but_changes_nothing(layers, wrong):
    part = wrong.__name__.partition("_")[0]
    assert layers.trace(layers.sampled(1, form="indexed", **{part: wrong})).difference < 1


def other_slots(layers):
    def run(c, t):
        window = t["window"].clone()
        y = layers.run(c, {**t, "window": window})
        t["window"][t["slots"] - 1] = window[t["slots"]]
        return y

    return run


def read_window(layers):
    def run(c, t):
        total = t["window"].float().sum()
        return layers.run(c, t) + 0 * total.to(t["x"].dtype)

    return run


def read_state(layers):
    def run(c, t):
        before = t["state"].float().sum()
        return layers.run(c, t) + 0 * before.to(t["x"].dtype)

    return run


def snapshot(layers):
    def run(c, t):
        saved = t["state"].clone()
        y = layers.run(c, t)
        return y + 0 * saved.float().sum().to(y.dtype)

    return run


@pytest.mark.parametrize(
    ("around", "operator"),
    [
        (other_slots, "kda::packed_decode"),
        (read_window, "kda::packed_decode"),
        (read_state, None),
        (snapshot, None),
    ],
)
def test_pools_that_others_look_at_keep_their_values(layers, around, operator):
    traced = layers.trace(layers.sampled(7, form="indexed", heads=2), around(layers))
    assert traced.findings[0].operator == operator
    assert traced.difference < 1


def test_padding_rows_whose_output_is_kept_are_not_made_null(layers):
    chosen = layers.sampled(11, form="masked")

    def kept(c, t):
        """The state of padding rows is masked, their output is not."""
        shown = layers.SimpleNamespace(**{**vars(c), "form": "indexed"})
        valid, slots = t["slots"] >= 0, t["slots"].clamp(min=0)
        old = t["window"].clone(), t["state"].clone()
        y = layers.run(shown, {**t, "slots": slots})
        for pool, before in zip((t["window"], t["state"]), old, strict=True):
            mask = valid.view(-1, *[1] * (pool.dim() - 1))
            pool[slots] = torch.where(mask, pool[slots], before[slots])
        return y

    traced = layers.trace(chosen, kept)
    assert all(f.operator is None for f in traced.findings)
    assert traced.difference < 1
