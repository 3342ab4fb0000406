"""One operator takes the place of the step in every way that people write it."""

import pytest
import torch
import torch.nn.functional as F

D = 128
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def split_even(mixed, heads):
    return tuple(p.view(-1, heads, D).float() for p in mixed.split(heads * D, -1))


def split_sizes(mixed, heads):
    return tuple(p.float().unflatten(-1, (heads, D)) for p in mixed.split([heads * D] * 3, -1))


def split_slices(mixed, heads):
    n = heads * D
    parts = mixed[:, :n], mixed[:, n : 2 * n], mixed[:, 2 * n :]
    return tuple(p.view(-1, heads, D).float() for p in parts)


def split_unbind(mixed, heads):
    return mixed.float().view(-1, 3, heads, D).unbind(1)


def split_select(mixed, heads):
    parts = mixed.view(-1, 3, heads, D)
    return tuple(parts[:, i].float() for i in range(3))


def split_head_major(mixed, heads):
    return tuple(p.float() for p in mixed.view(-1, heads, 3, D).unbind(2))


def split_after_silu(mixed, heads):
    return tuple(p.view(-1, heads, D) for p in F.silu(mixed.float()).chunk(3, -1))


def split_projections(mixed, heads):
    parts = (torch.tanh(p) for p in mixed.split(heads * D, -1))
    return tuple(p.view(-1, heads, D).float() for p in parts)


def split_swapped(mixed, heads):
    q, k, v = split_even(mixed, heads)
    return k, q, v


def unit_pow(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).pow(-0.5)


def unit_root(x):
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def unit_reciprocal(x):
    return x * (1 / torch.sqrt((x * x).sum(-1) + 1e-6)).unsqueeze(-1)


def unit_norm(x):
    return x * torch.rsqrt(x.norm(dim=-1, keepdim=True) ** 2 + 1e-6)


def gate_bounded(a, rate):
    return -5.0 * torch.sigmoid(rate * a)


def gate_bounded_at_four(a, rate):
    return torch.sigmoid(a * rate).mul(-4)


def gate_by_quotient(a, rate):
    return -5 / (1 + torch.exp(-(rate * a)))


def gate_by_log1p(a, rate):
    return -(rate * torch.where(a > 20, a, torch.log1p(a.exp())))


def gate_by_log(a, rate):
    return torch.where(a <= 20, torch.log(1 + a.exp()), a) * -rate


def beta_by_quotient(beta):
    return 1 / (1 + torch.exp(-beta.float()))


def recur_vk(S, q, k, v, d, beta):
    S = S * d[..., None, :]
    u = (v - (S * k[..., None, :]).sum(-1)) * beta[..., None]
    S = S + u[..., None] * k[..., None, :]
    return (S * q[..., None, :]).sum(-1), S


def recur_einsum(S, q, k, v, d, beta):
    S = S * d[..., None]
    u = (v - torch.einsum("bhkv,bhk->bhv", S, k)) * beta[..., None]
    S = S + torch.einsum("bhk,bhv->bhkv", k, u)
    return torch.einsum("bhkv,bhk->bhv", S, q), S


def recur_matmul(S, q, k, v, d, beta):
    S = d.unsqueeze(-1) * S
    u = (v.unsqueeze(-2) - k.unsqueeze(-2) @ S) * beta[..., None, None]
    S = S + k.unsqueeze(-1) @ u
    return (q.unsqueeze(-2) @ S).squeeze(-2), S


def recur_bmm(S, q, k, v, d, beta):
    shape, n = S.shape, S.shape[0] * S.shape[1]
    q, k, v, d = (x.reshape(n, D) for x in (q, k, v, d))
    S = S.reshape(n, D, D) * d[:, :, None]
    u = (v - torch.bmm(k[:, None], S)[:, 0]) * beta.reshape(n, 1)
    S = torch.baddbmm(S, k[:, :, None], u[:, None])
    return torch.bmm(q[:, None], S)[:, 0].view(*shape[:2], D), S.view(shape)


def recur_as_flash_linear_attention(S, q, k, v, d, beta):
    S = S * d[..., None]
    error = v - (k[..., None] * S).sum(-2)
    S = S + torch.einsum("bhk,bhv->bhkv", beta[..., None] * k, error)
    return torch.einsum("bhk,bhkv->bhv", q, S), S


def recur_with_scaled_keys(S, q, k, v, d, beta):
    S, kb = S * d[..., None], k * beta[..., None]
    vb = v * beta[..., None]
    S = S + k[..., None] * (vb[..., None, :] - (S * kb[..., None]).sum(-2, keepdim=True))
    return (S * q[..., None]).sum(-2), S


def recur_output_first(S, q, k, v, d, beta):
    S = S * d[..., None]
    u = (v - (S * k[..., None]).sum(-2)) * beta[..., None]
    o = (S * q[..., None]).sum(-2) + u * (k * q).sum(-1, keepdim=True)
    return o, torch.addcmul(S, k[..., None], u[..., None, :])


def recur_decayed_keys(S, q, k, v, d, beta):
    u = (v - (S * (k * d)[..., None]).sum(-2)) * beta[..., None]
    S = S * d[..., None] + k[..., None] * u[..., None, :]
    return (S * q[..., None]).sum(-2), S


def read_select(pool, slots):
    return pool.index_select(0, slots % 7)


def read_cast_first(pool, slots):
    return pool.float()[slots]


def write_copy(pool, slots, state):
    pool.index_copy_(0, slots % 7, state)


def write_put(pool, slots, state):
    pool.index_put_((slots,), state)


SPELLINGS = {
    "as a rule": {},
    "split": {"split": split_even},
    "split sizes": {"split": split_sizes},
    "slices": {"split": split_slices},
    "unbind": {"split": split_unbind},
    "select": {"split": split_select},
    "heads outside of parts": {"split": split_head_major},
    "activation in the graph": {"split": split_after_silu, "activation": F32},
    "three projections": {"split": split_projections},
    "q behind k": {"split": split_swapped},
    "power norm": {"unit": unit_pow},
    "root and quotient norm": {"unit": unit_root},
    "reciprocal norm": {"unit": unit_reciprocal},
    "squared norm": {"unit": unit_norm},
    "bounded gate": {"gate": gate_bounded},
    "bounded gate at -4": {"gate": gate_bounded_at_four},
    "bounded gate by quotient": {"gate": gate_by_quotient},
    "softplus by log1p": {"gate": gate_by_log1p},
    "softplus by log": {"gate": gate_by_log},
    "beta by quotient": {"logits": beta_by_quotient},
    "values by keys": {"recur": recur_vk},
    "einsum": {"recur": recur_einsum},
    "matmul": {"recur": recur_matmul},
    "bmm": {"recur": recur_bmm},
    "beta in the key": {"recur": recur_as_flash_linear_attention},
    "beta in key and value": {"recur": recur_with_scaled_keys},
    "output before the update": {"recur": recur_output_first},
    "decay in the key": {"recur": recur_decayed_keys},
    "index_select and index_copy": {"read": read_select, "write": write_copy},
    "index_put": {"write": write_put},
    "scale on the output": {"scale_output": True},
    "another scale": {"scale": 0.3},
    "no cast behind": {"cast": False},
    "float32 activations": {"activation": F32},
    "float16 activations": {"activation": F16},
    "bfloat16 pool": {"pool": BF16},
    "bfloat16 pool cast as a whole": {"pool": BF16, "read": read_cast_first},
    "one head": {"heads": 1},
    "three heads": {"heads": 3},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_becomes_one_operator(step, device, name):
    captured = step.check_step(step.Spelling(), device=device, **SPELLINGS[name])
    assert captured.reasons == []
    assert captured.targets.count("auto_functionalized_v2") == 1
    assert not {"aten.index.Tensor", "aten.index_put.default"} & set(captured.targets)


@pytest.mark.parametrize(
    "name", ["as a rule", "unbind", "three projections", "bmm", "einsum", "beta in the key"]
)
def test_a_spelling_becomes_one_operator_with_a_dynamic_batch(step, name):
    captured = step.check_step(step.Spelling(), dynamic=True, **SPELLINGS[name])
    assert captured.matches == 1


@pytest.mark.parametrize("heads", [1, 2])
def test_a_single_row_is_rewritten(step, heads):
    assert step.check_step(step.Spelling(heads=heads), rows=1).matches == 1


def test_the_layout_is_read_from_the_recurrence(step):
    layouts = [
        step.check_step(step.Spelling(), recur=recur).findings[0].arguments["state_layout"]
        for recur in (step.recur_kv, recur_vk)
    ]
    assert layouts == ["kv", "vk"]


def test_constants_are_forwarded_exactly(step):
    changes = {"scale": 0.3, "gate": gate_bounded_at_four}
    captured = step.check_step(step.Spelling(), **changes)
    (node,) = [n for n in captured.module.graph.nodes if "auto_functionalized" in str(n.target)]
    assert (node.kwargs["scale"], node.kwargs["lower_bound"]) == (0.3, -4.0)
    assert node.kwargs["first_slot"] is None
