"""transformers' KimiLinear, eager reference path: float32 is rewritten, bfloat16 explained."""

import copy
import inspect

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


def decode(step, model):
    """Prefill, then capture one decode step and compare it with eager."""
    cache = transformers.DynamicCache(config=model.config)
    # transformers renamed the argument after 5.17.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def logits(tokens, cache):
        return model(tokens, **{name: cache}).logits

    with torch.no_grad():
        tokens = logits(torch.randint(3, 64, (2, 5)), cache)[:, -1:].argmax(-1)
        twin = copy.deepcopy(cache)
        expected = logits(tokens, twin)
    captured = step.capture(logits, tokens, cache)
    return captured, expected, cache, twin


def test_every_delta_layer_in_float32_becomes_one_operator_on_its_cache(step, model):
    captured, expected, cache, twin = decode(step, model)
    assert (captured.matches, captured.reasons) == (2, [])
    assert [f.arguments["state_indices"] for f in captured.findings] == ["None", "None"]
    step.compare(captured.output, expected, 1e-5)
    for mine, eager in zip(cache.layers[:2], twin.layers[:2], strict=True):
        step.compare(mine.recurrent_states[0], eager.recurrent_states[0], 1e-5)


def test_a_beta_rounded_to_bfloat16_is_named_as_the_reason(step, model):
    captured, *_ = decode(step, copy.deepcopy(model).bfloat16())
    assert captured.reasons == ["ROUNDING", "ROUNDING"]
    assert all("torch.sigmoid(self.b_proj(" in f.source for f in captured.findings)
