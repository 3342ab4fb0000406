"""q, k and v each with a convolution and a window of their own, as in flash-linear-attention.

The operator works on one window, so the recurrence alone is taken, and it is said why.
"""

import torch


def test_of_three_convolutions_only_the_recurrence_is_taken_and_the_reason_says_so(step, layers):
    c = layers.chosen(lambda _, options: options[0], columns=4)
    given = layers.inputs(c)
    width = c.heads * 128
    del given["b"]
    for name, window in zip("qkv", given.pop("window").split(width, 1), strict=True):
        given[f"window_{name}"] = window.clone()

    def one(t, name, x, weight):
        window = t[f"window_{name}"]
        history = torch.cat([window[t["slots"]][..., 1:], x[..., None]], -1)
        window[t["slots"]] = history
        y = (history.float() * weight).sum(-1)
        return torch.nn.functional.silu(y).to(x.dtype)

    def layer(t):
        parts = zip("qkv", t["x"].split(width, 1), t["w"].split(width), strict=True)
        q, k, v = (one(t, *part).float().view(-1, c.heads, 128) for part in parts)
        q, k = c.unit(q) * 128**-0.5, c.unit(k)
        a = (t["gate"].float() + t["dt_bias"]).view(-1, c.heads, 128)
        d = c.gate(a, t["A_log"][:, None])
        o, state = c.recur(t["state"][t["slots"]].float(), q, k, v, d, c.beta(t["beta"]))
        t["state"][t["slots"]] = state.to(t["state"].dtype)
        o = o.to(t["x"].dtype).float()
        gate = c.out(t["out_gate"].view(-1, c.heads, 128))
        return (c.norm(o, t["norm"]) * gate).to(t["x"].dtype)

    traced = step.trace(given, layer, layers.TOLERANCE)
    (finding,) = traced.findings
    assert finding.operator == "kda::packed_decode"
    assert traced.difference <= 1
    (left,) = finding.left
    assert (left.part, left.reason.name) == ("convolution", "CONV_MISSING")
    assert left.detail == "3 windows where the operator takes one, with channels q, k, v"
