"""transformers' KimiLinear and Glm5Next, eager reference path: whole layers become one operator."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch

from kda_ops.passes import observing

transformers = pytest.importorskip("transformers", minversion="5.17")


@pytest.fixture(scope="module")
def model():
    """Two KDA layers and one of full attention, with a cache after a prompt."""
    config = transformers.KimiLinearConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        linear_num_heads=2,
        linear_head_dim=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        mlp_layer_types=["dense"] * 3,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def decoder(model):
    """Return tokens and cache to logits; transformers has renamed the cache's argument."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return lambda tokens, cache: model(tokens, **{name: cache}).logits


def prefilled(model):
    cache = transformers.DynamicCache(config=model.config)
    torch.manual_seed(1)
    prompt = torch.randint(3, 64, (2, 5)).to(model.device)
    with torch.no_grad():
        return decoder(model)(prompt, cache)[:, -1:].argmax(-1), cache


def states(cache):
    """Return the windows and states of the two KDA layers."""
    return [
        s for layer in cache.layers[:2] for s in (layer.conv_states[0], layer.recurrent_states[0])
    ]


def decode(step, model):
    """Prefill, then capture one decode step and compare it with eager."""
    tokens, cache = prefilled(model)
    twin = copy.deepcopy(cache)
    with torch.no_grad():
        expected = decoder(model)(tokens, twin)
    return step.capture(decoder(model), tokens, cache), expected, cache, twin


def check_findings(captured):
    assert [f.operator for f in captured.findings] == ["kda::fused_decode"] * 2
    assert [f.left for f in captured.findings] == [(), ()]
    assert [f.arguments["state_indices"] for f in captured.findings] == ["None", "None"]
    assert "aten.convolution.default" not in captured.targets


def test_every_delta_layer_in_float32_becomes_one_operator_on_its_cache(step, model, device):
    captured, expected, cache, twin = decode(step, copy.deepcopy(model).to(device))
    check_findings(captured)
    assert not any(f.roundings for f in captured.findings)
    step.compare(captured.output, expected, 1e-5)
    for mine, eager in zip(states(cache), states(twin), strict=True):
        step.compare(mine, eager, 1e-5)


def test_in_bfloat16_it_is_as_near_to_float32_as_eager_is(step, model, device):
    low = copy.deepcopy(model).bfloat16().to(device)
    captured, expected, cache, twin = decode(step, low)
    check_findings(captured)
    step.compare(captured.output, expected, 0.02)
    tokens, start = prefilled(low)
    exact = copy.deepcopy(low).float()
    for layer in start.layers[:2]:
        layer.conv_states[0] = layer.conv_states[0].float()
    start.layers[2].keys, start.layers[2].values = (
        x.float() for x in (start.layers[2].keys, start.layers[2].values)
    )
    with torch.no_grad():
        decoder(exact)(tokens, start)
    for mine, eager, right in zip(states(cache), states(twin), states(start), strict=True):
        assert (mine - right).abs().mean() <= 1.1 * (eager - right).abs().mean() + 1e-7


@pytest.fixture(scope="module")
def generated(model):
    """What generate() returns for a left-padded batch, uncompiled and compiled with the pass.

    transformers compiles what follows the prompt by itself, where the cache is static.
    """
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, 64, (2, 5), generator=generator)
    prompt[0, :2] = 0
    compiling = transformers.CompileConfig(backend="kda", mode=None, fullgraph=True)
    compiling._compile_all_devices = True  # on the CPU too
    found, model = [], copy.deepcopy(model)  # which keeps what it has compiled

    def generate(**how):
        lengths = {"max_new_tokens": 64, "min_new_tokens": 64}
        mask = (prompt != 0).long()
        return model.generate(prompt, attention_mask=mask, do_sample=False, **lengths, **how)

    torch._dynamo.reset()
    uncompiled = generate(cache_implementation="static", disable_compile=True), generate()
    # A hit in a cache would skip the pass.
    uncached = torch._inductor.config.patch(fx_graph_cache=False)
    with uncached, observing(lambda _, findings: found.append(findings)):
        compiled = generate(cache_implementation="static", compile_config=compiling)
    return SimpleNamespace(uncompiled=uncompiled, compiled=compiled, found=found)


def test_generate_compiles_one_graph_and_every_delta_layer_of_it_becomes_one_operator(generated):
    (findings,) = generated.found
    assert [finding.operator for finding in findings] == ["kda::fused_decode"] * 2
    assert [finding.left for finding in findings] == [(), ()]


def test_64_greedy_tokens_of_a_left_padded_batch_are_those_of_the_uncompiled_model(generated):
    assert generated.compiled.shape == (2, 5 + 64)
    assert len(generated.compiled[:, 5:].unique()) > 8
    for uncompiled in generated.uncompiled:
        assert torch.equal(generated.compiled, uncompiled)


class OneLayer:
    """As much of a cache as one linear-attention layer asks for."""

    def __init__(self, window, state):
        self.window, self.state = window, state

    def get_conv_state(self, *_, **__):
        return self.window

    def get_recurrent_state(self, *_, **__):
        return self.state

    def update_recurrent_state(self, state, *_, **__):
        self.state.copy_(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_glm_with_its_lower_bound_becomes_one_operator(step, device, dtype):
    pytest.importorskip("transformers", minversion="5.21", reason="older caches are read otherwise")
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    config = SimpleNamespace(
        hidden_size=32,
        linear_num_heads=2,
        linear_head_dim=128,
        linear_conv_kernel_dim=4,
        linear_lower_bound=-5.0,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        layer_types=["linear_attention"],
    )
    torch.manual_seed(0)
    layer = modeling.Glm5NextTextLinearAttention(config, 0).eval()
    torch.nn.init.normal_(layer.forget_gate.A_log)
    torch.nn.init.normal_(layer.forget_gate.dt_bias)
    for name, child in layer.named_children():
        if name not in {"conv1d", "forget_gate"}:
            child.to(dtype)
    layer.forget_gate.f_a_proj.to(dtype)
    layer.forget_gate.f_b_proj.to(dtype)
    layer, x = layer.to(device), torch.randn(3, 1, 32).to(device, dtype)
    window, state = torch.randn(3, 768, 4).to(device, dtype), torch.randn(3, 2, 128, 128)
    caches = [OneLayer(window, state.to(device))]
    caches.append(copy.deepcopy(caches[0]))
    name = "cache" if "cache" in inspect.signature(layer.forward).parameters else "cache_params"
    with torch.no_grad():
        expected = layer(x, **{name: caches[0]})
    captured = step.capture(
        lambda x, w, s: layer(x, **{name: OneLayer(w, s)}), x, *vars(caches[1]).values()
    )
    (found,) = captured.findings
    assert (found.operator, found.left) == ("kda::fused_decode", ())
    assert found.arguments["lower_bound"] == "-5"
    step.compare(captured.output, expected, 2 * step.ROUNDING[dtype])
    step.compare(caches[1].window, caches[0].window, 0)
    step.compare(caches[1].state, caches[0].state, step.ROUNDING[dtype])
