"""q, k and v each with a convolution of its own, over parts of one pool of windows.

And windows whose rows are read and written by look-ups, gathers and scatters.
"""

import pytest
import torch
import torch.nn.functional as F

BF16, F32 = torch.bfloat16, torch.float32


def slices(window, width):
    return tuple(window[:, i * width : (i + 1) * width] for i in range(3))


def chunks(window, width):
    return window.chunk(3, 1)


def narrow(window, width):
    return tuple(window.narrow(1, i * width, width) for i in range(3))


def together(t, windows, xs, weights, conv):
    """All windows are read before any is written."""
    old = [window[t["slots"]] for window in windows]
    tokens = [torch.cat([h, x[..., None]], -1)[..., 1:] for h, x in zip(old, xs, strict=True)]
    for window, new in zip(windows, tokens, strict=True):
        window[t["slots"]] = new
    return [conv(new, w, i) for i, (new, w) in enumerate(zip(tokens, weights, strict=True))]


def in_turn(t, windows, xs, weights, conv):
    """Each is read and written before the next."""
    mixed = []
    for i, (window, x, w) in enumerate(zip(windows, xs, weights, strict=True)):
        new = torch.cat([window[t["slots"]][..., 1:], x[..., None]], -1)
        window[t["slots"]] = new
        mixed.append(conv(new, w, i))
    return mixed


def dense(t, windows, xs, weights, conv):
    """Row i has window i, updated in place."""
    mixed = []
    for i, (window, x, w) in enumerate(zip(windows, xs, weights, strict=True)):
        new = torch.cat([window[..., 1:], x[..., None]], -1)
        window.copy_(new)
        mixed.append(conv(new, w, i))
    return mixed


def masked(t, windows, xs, weights, conv):
    """Padding rows keep their windows."""
    mixed = []
    for i, (window, x, w) in enumerate(zip(windows, xs, weights, strict=True)):
        old = window[t["slots"]]
        new = torch.cat([old[..., 1:], x[..., None]], -1)
        window[t["slots"]] = torch.where(t["valid"][:, None, None], new, old)
        mixed.append(conv(new, w, i))
    return mixed


def layer_of(c, layers, cut, convolve, parts=("w_q", "w_k", "w_v")):
    width = c.heads * layers.D

    def layer(t):
        def conv(new, w, i):
            y = F.conv1d(new.float(), w.view(width, 1, 4), groups=width)[..., 0]
            bias = t.get(f"b_{'qkv'[i]}")
            return F.silu(y if bias is None else y + bias).to(c.activation)

        weights = [t[name] for name in parts] if parts else t["w"].chunk(3)
        windows = cut(t["window"], width)
        mixed = convolve(t, windows, t["x"].split(width, 1), weights, conv)
        q, k, v = (m.float().view(-1, c.heads, layers.D) for m in mixed)
        q, k = c.unit(q) * layers.D**-0.5, c.unit(k)
        a = (t["gate"].float() + t["dt_bias"]).view(-1, c.heads, layers.D)
        old = t["state"] if t["slots"] is None else t["state"][t["slots"]]
        d, b = c.gate(a, t["A_log"][:, None]), c.beta(t["beta"])
        o, state = c.recur(old.float(), q, k, v, d, b)
        valid = t.get("valid")
        layers.store(t["state"], t["slots"], state.to(old.dtype), old, valid)
        o = o.to(t["x"].dtype).float()
        gate = c.out(t["out_gate"].view(-1, c.heads, layers.D))
        y = (c.norm(o, t["norm"]) * gate).to(t["x"].dtype)
        return y if valid is None else torch.where(valid[:, None, None], y, 0)

    return layer


def given(c, layers, bias=False, valid=False):
    t = layers.inputs(c)
    width = c.heads * layers.D
    for name, w in zip("qkv", t["w"].split(width), strict=True):
        t[f"w_{name}"] = w.clone()
        if bias:
            t[f"b_{name}"] = torch.randn(width)
    if valid:
        t["valid"] = torch.tensor([True, False, True])
    del t["b"]
    return t


CASES = {
    "slices in turn": (slices, in_turn, {}),
    "slices together": (slices, together, {"activation": BF16}),
    "chunks": (chunks, together, {}),
    "narrowed, with a bias each": (narrow, in_turn, {"bias": True, "heads": 1}),
    "dense": (slices, dense, {"form": "dense"}),
    "padding rows": (chunks, masked, {"valid": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_of_one_window_with_weights_of_their_own_are_one_operator(step, layers, case):
    cut, convolve, changes = CASES[case]
    bias, valid = changes.get("bias", False), changes.get("valid", False)
    fixed = {k: v for k, v in changes.items() if k not in {"bias", "valid"}}
    fixed = {"columns": 4, "activation": F32, "bias": False, "channels_last": False} | fixed
    c = layers.chosen(lambda _, options: options[0], **fixed)
    layer = layer_of(c, layers, cut, convolve)
    traced = step.trace(given(c, layers, bias, valid), layer, layers.TOLERANCE)
    (finding,) = traced.findings
    assert (finding.operator, finding.left) == ("kda::fused_decode", ())
    assert traced.difference <= 1
    assert "cat(" in finding.arguments["weight"]
    assert ("cat(" in finding.arguments["conv_bias"]) is bias
    assert not {"aten.index_put.default", "aten.slice_scatter.default"}.intersection(traced.targets)


def test_weights_in_one_tensor_stay_in_it(step, layers):
    c = layers.chosen(lambda _, options: options[0], columns=4, bias=False)
    layer = layer_of(c, layers, slices, in_turn, parts=())
    traced = step.trace(given(c, layers), layer, layers.TOLERANCE)
    (finding,) = traced.findings
    assert finding.operator == "kda::fused_decode" and traced.difference <= 1
    assert "cat(" not in finding.arguments["weight"]


def k_before_q(window, width):
    q, k, v = slices(window, width)
    return k, q, v


def overlapping(window, width):
    return tuple(window[:, i * width // 2 : i * width // 2 + width] for i in range(3))


def other_slots(t, windows, xs, weights, conv):
    moved = dict(t, slots=(t["slots"] + 1) % 6)
    return [
        *in_turn(t, windows[:2], xs[:2], weights[:2], conv),
        *in_turn(moved, windows[2:], xs[2:], weights[2:], conv),
    ]


def one_stays(t, windows, xs, weights, conv):
    """The window of v is read and does not move."""
    mixed = in_turn(t, windows[:2], xs[:2], weights[:2], conv)
    new = torch.cat([windows[2][t["slots"]][..., 1:], xs[2][..., None]], -1)
    return [*mixed, conv(new, weights[2], 2)]


def read_again(t, windows, xs, weights, conv):
    """The part of k is convolved over the window that q has moved."""
    q, v = in_turn(t, (windows[0], windows[2]), (xs[0], xs[2]), (weights[0], weights[2]), conv)
    new = torch.cat([windows[0][t["slots"]][..., 1:], xs[1][..., None]], -1)
    windows[1][t["slots"]] = new
    return q, conv(new, weights[1], 1), v


NEAR_MISSES = {
    "another order": (k_before_q, in_turn, "CONV_FORM"),
    "overlapping": (overlapping, in_turn, "CONV_FORM"),
    "v in other slots": (slices, other_slots, "INDEX_MISMATCH"),
    "v stays": (slices, one_stays, "CONV_FORM"),
    "k over the window of q": (slices, read_again, "CONV_FORM"),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_parts_that_do_not_make_one_window_are_left_with_the_reason(step, layers, case):
    cut, convolve, reason = NEAR_MISSES[case]
    c = layers.chosen(lambda _, options: options[0], columns=4, bias=False)
    layer = layer_of(c, layers, cut, convolve)
    traced = step.trace(given(c, layers), layer, layers.TOLERANCE)
    (finding,) = traced.findings
    assert finding.operator == "kda::packed_decode" and traced.difference <= 1
    assert [(left.part, left.reason.name) for left in finding.left] == [("convolution", reason)]


def row_index(t, pool):
    return t["slots"].view(-1, *[1] * (pool.dim() - 1)).expand(-1, *pool.shape[1:])


@pytest.mark.parametrize("columns", [3, 4])
def test_windows_are_read_and_written_by_look_ups_gathers_and_scatters_too(step, layers, columns):
    c = layers.chosen(lambda _, options: options[0], columns=columns, bias=False)

    def layer(t):
        window, state, rows = t["window"], t["state"], len(t["slots"])
        h = F.embedding(t["slots"], window.view(len(window), -1)).view(rows, -1, columns)
        mixed = c.silu(c.conv(h, t["x"], t["w"], None)).to(t["x"].dtype)
        moved = c.move(h, t["x"]).reshape(rows, -1)
        flat = window.view(len(window), -1)
        flat.scatter_(0, row_index(t, flat), moved)
        q, k, v = c.split(mixed, c.heads)
        q, k = c.unit(q) * layers.D**-0.5, c.unit(k)
        a = (t["gate"].float() + t["dt_bias"]).view(-1, c.heads, layers.D)
        old = state.gather(0, row_index(t, state))
        d = c.gate(a, t["A_log"][:, None])
        o, new = c.recur(old.float(), q, k, v, d, c.beta(t["beta"]))
        state[t["slots"]] = new.to(state.dtype)
        o = o.to(t["x"].dtype).float()
        gate = c.out(t["out_gate"].view(-1, c.heads, layers.D))
        return (c.norm(o, t["norm"]) * gate).to(t["x"].dtype)

    traced = step.trace(layers.inputs(c), layer, layers.TOLERANCE)
    (finding,) = traced.findings
    assert (finding.operator, finding.left) == ("kda::fused_decode", ())
    assert finding.arguments["first_slot"] == "0"
    assert traced.difference <= 1
