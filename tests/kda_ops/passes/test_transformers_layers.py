"""transformers' KimiLinear and Glm5Next, eager reference path: whole layers become one operator."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch

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
    with torch.no_grad():
        return decoder(model)(torch.randint(3, 64, (2, 5)), cache)[:, -1:].argmax(-1), cache


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


def test_every_delta_layer_in_float32_becomes_one_operator_on_its_cache(step, model):
    captured, expected, cache, twin = decode(step, model)
    check_findings(captured)
    assert not any(f.roundings for f in captured.findings)
    step.compare(captured.output, expected, 1e-5)
    for mine, eager in zip(states(cache), states(twin), strict=True):
        step.compare(mine, eager, 1e-5)


def test_in_bfloat16_it_is_as_near_to_float32_as_eager_is(step, model):
    low = copy.deepcopy(model).bfloat16()
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
def test_a_layer_of_glm_with_its_lower_bound_becomes_one_operator(step, dtype):
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
    x = torch.randn(3, 1, 32).to(dtype)
    caches = [OneLayer(torch.randn(3, 768, 4).to(dtype), torch.randn(3, 2, 128, 128))]
    caches.append(copy.deepcopy(caches[0]))
    with torch.no_grad():
        expected = layer(x, cache=caches[0])
    captured = step.capture(
        lambda x, w, s: layer(x, cache=OneLayer(w, s)), x, *vars(caches[1]).values()
    )
    (found,) = captured.findings
    assert (found.operator, found.left) == ("kda::fused_decode", ())
    assert found.arguments["lower_bound"] == "-5"
    step.compare(captured.output, expected, 2 * step.ROUNDING[dtype])
    step.compare(caches[1].window, caches[0].window, 0)
    step.compare(caches[1].state, caches[0].state, step.ROUNDING[dtype])
