"""One pool stacked over layers: every layer works on it in place, and no copy of it is made."""

import re

import torch
from torch._inductor.utils import run_and_get_code

import kda_ops
from kda_ops.passes import Finding, observing


def test_layers_of_one_stacked_pool_are_rewritten_without_a_copy(step):
    spelling = step.Spelling()
    layer, x = step.StepLayer(spelling), step.inputs(spelling)
    pools = torch.randn(3, *layer.pool.shape)

    def run(pools, mixed, gate, beta, slots):
        for number in range(3):
            q, k, v = step.split_chunk(mixed, 2)
            q, k = step.unit_rsqrt(q) * 128**-0.5, step.unit_rsqrt(k)
            a = gate.float().view(-1, 2, 128) + layer.dt_bias.view(2, 128)
            d = step.softplus_gate(a, layer.A_log.exp()[:, None]).exp()
            o, S = step.recur_kv(pools[number, slots], q, k, v, d, step.sigmoid(beta))
            pools[number, slots] = S
            mixed = mixed + o.flatten(1).repeat(1, 3).to(mixed.dtype)
        return mixed

    found: list[Finding] = []
    eager = pools.clone()
    with torch.no_grad(), kda_ops.enabled(), observing(lambda _, findings: found.extend(findings)):
        expected = run(eager, *x)
        with torch._inductor.config.patch(fx_graph_cache=False):
            output, (code,) = run_and_get_code(torch.compile(run), pools, *x)
    assert [finding.operator for finding in found] == ["kda::packed_decode"] * 3
    assert len(re.findall(r"torch\.ops\.kda\.packed_decode\.default\(", code)) == 3
    assert not re.search(r"empty_strided\w*\(\([^)]*128, 128", code)
    step.compare(output, expected, 0.02)
    step.compare(pools, eager, 0.02)
