"""Matrix products reach the pass as they are where the device is CUDA; on the CPU many do not.

Inductor decomposes some products of vectors on the CPU alone, so the graphs of CUDA are made here
by leaving products whole. That they are those of CUDA is checked where there is a GPU.
"""

import pytest
import torch

aten = torch.ops.aten
PRODUCTS = (aten.bmm.default, aten.mm.default, aten.addmm.default, aten.baddbmm.default)


def einsum(S, q, k, v, d, beta):
    S = S * d[..., None]
    u = (v - torch.einsum("bhkv,bhk->bhv", S, k)) * beta[..., None]
    S = S + torch.einsum("bhk,bhv->bhkv", k, u)
    return torch.einsum("bhkv,bhk->bhv", S, q), S


def einsum_of_everything(S, q, k, v, d, beta):
    S = torch.einsum("bhvk,bhk->bhvk", S, d)
    u = torch.einsum("bhv,bh->bhv", v - torch.einsum("bhk,bhvk->bhv", k, S), beta)
    S = S + torch.einsum("bhv,bhk->bhvk", u, k)
    return torch.einsum("bhk,bhvk->bhv", q, S), S


def matmul(S, q, k, v, d, beta):
    S = d.unsqueeze(-1) * S
    u = (v.unsqueeze(-2) - k.unsqueeze(-2) @ S) * beta[..., None, None]
    S = S + k.unsqueeze(-1) @ u
    return (q.unsqueeze(-2) @ S).squeeze(-2), S


def matmul_values_by_keys(S, q, k, v, d, beta):
    S = S * d.unsqueeze(-2)
    u = (v.unsqueeze(-1) - S @ k.unsqueeze(-1)) * beta[..., None, None]
    S = S + u @ k.unsqueeze(-2)
    return (S @ q.unsqueeze(-1)).squeeze(-1), S


def bmm(S, q, k, v, d, beta):
    shape, n = S.shape, S.shape[0] * S.shape[1]
    q, k, v, d = (x.reshape(n, 128) for x in (q, k, v, d))
    S = S.reshape(n, 128, 128) * d[:, :, None]
    u = (v - torch.bmm(k[:, None], S)[:, 0]) * beta.reshape(n, 1)
    S = torch.baddbmm(S, k[:, :, None], u[:, None])
    return torch.bmm(q[:, None], S)[:, 0].view(*shape[:2], 128), S.view(shape)


RECURRENCES = {f.__name__: f for f in (einsum, einsum_of_everything, matmul, bmm)}
RECURRENCES["matmul, values by keys"] = matmul_values_by_keys


def traced(step, name, **how):
    """Trace one step with its products left whole."""
    spelling = step.Spelling(recur=RECURRENCES[name])
    layer = step.StepLayer(spelling)
    mixed, gate, beta, slots = step.inputs(spelling)
    given = {"mixed": mixed, "gate": gate, "beta": beta, "slots": slots}
    given |= {n: t.detach() for n, t in {**layer.state_dict()}.items()}

    def run(t):
        module = torch.nn.Module()
        module.spelling = spelling
        for parameter in ("A_log", "dt_bias", "pool"):
            setattr(module, parameter, t[parameter])
        return step.StepLayer.forward(module, t["mixed"], t["gate"], t["beta"], t["slots"])

    return step.trace(given, run, step.ROUNDING, **how)


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_recurrence_of_matrix_products_that_stay_becomes_one_operator(step, name):
    found = traced(step, name, whole=PRODUCTS)
    assert sum("mm.default" in target for target in found.source) >= 2
    assert [finding.operator for finding in found.findings] == ["kda::packed_decode"]
    assert found.difference < 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECURRENCES)
def test_the_graph_of_cuda_is_rewritten_and_is_nearly_the_one_with_products_left_whole(step, name):
    found = traced(step, name, device="cuda")
    assert [finding.operator for finding in found.findings] == ["kda::packed_decode"]
    assert found.difference < 1
    # Outer products become elementwise ones on every device, in newer versions of torch.
    whole, products = traced(step, name, whole=PRODUCTS), ("mm.default", "mul.Tensor")
    count = [
        sum(target.endswith(products) for target in graph) for graph in (found.source, whole.source)
    ]
    assert count[0] == count[1]
