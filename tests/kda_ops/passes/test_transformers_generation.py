"""Whole models of transformers decode 64 tokens with the pass as without it.

Every batch has padding on the left. The graphs are compiled as far as the pass, whose output runs
node by node: what Inductor makes of it is looked at in test_transformers_layers.py. In float32 the
tokens are equal. In bfloat16 both are given the same tokens, and their logits are held against
those of the same weights in float32: the budget is what the uncompiled model is off by.
"""

import copy
import inspect

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx

from kda_ops.passes import rewrite_graph

transformers = pytest.importorskip("transformers", minversion="5.17")
LENGTH, PROMPT = 64, 5
SHARED = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_experts_per_tok": 1,
    "linear_num_heads": 2,
    "linear_head_dim": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def kimi(*layers):
    config = transformers.KimiLinearConfig(
        **SHARED,
        num_hidden_layers=len(layers),
        qk_rope_head_dim=16,
        num_local_experts=2,
        layer_types=list(layers),
        mlp_layer_types=["dense"] * len(layers),
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def glm(*layers):
    pytest.importorskip("transformers", minversion="5.18", reason="its layers had other names")
    pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    text = SHARED | {
        "num_hidden_layers": len(layers),
        "qk_rope_head_dim": 0,
        "q_lora_rank": 16,
        "n_routed_experts": 2,
        "max_position_embeddings": 128,
        "index_topk": 128,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "layer_types": list(layers),
        "mlp_layer_types": ["dense"] * len(layers),
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    config = transformers.Glm5NextConfig(
        text_config=text, vision_config=vision | {"out_hidden_size": 32}
    )
    return transformers.Glm5NextForConditionalGeneration(config)


def made(build, *layers, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    model = build(*layers).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            torch.nn.init.normal_(parameter)
    return model.to(device, dtype)


def padded(batch, device):
    """A prompt of which the first row begins with padding, and its mask."""
    prompt = torch.randint(3, 64, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    prompt[0, :2] = 0
    return prompt.to(device), (prompt != 0).long().to(device)


def up_to_the_pass():
    """Return a backend that compiles as far as the pass, and the findings that it will see."""
    torch._dynamo.reset()
    found = []

    def inner(module, _, **__):
        found.append(rewrite_graph(module.graph))
        module.recompile()
        return make_boxed_func(module.forward)

    def backend(module, example):
        return compile_fx(module, example, inner_compile=inner)

    return backend, found


def check(found, at_most):
    """Raise AssertionError unless each of the few graphs has one layer, and it is all fused."""
    assert 1 <= len(found) <= at_most
    for findings in found:
        assert [(f.operator, f.left) for f in findings] == [("kda::fused_decode", ())]


def new_cache(kind, model):
    config = model.config.get_text_config()
    if kind == "static":
        return transformers.StaticCache(config=config, max_cache_len=PROMPT + LENGTH)
    return transformers.DynamicCache(config=config)


def by_hand(model, batch, cache_kind, step=None, forced=None):
    """Prefill, then decode token by token; return the tokens and the logits of every step.

    ``step`` is the model's own call or what was compiled of it. The next token is the most likely
    one, or that of ``forced``.
    """
    device = model.device
    prompt, mask = padded(batch, device)
    cache = new_cache(cache_kind, model)
    step = model if step is None else step
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    more = torch.ones(batch, LENGTH, dtype=mask.dtype, device=device)
    whole = torch.cat([mask, more], 1)
    logits = model(prompt, attention_mask=mask, **{named: cache}).logits[:, -1:]
    for layer in cache.layers if cache_kind == "dynamic" else ():
        for grown in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if grown is not None:
                torch._dynamo.mark_dynamic(grown, 2)
    tokens, seen = [], []
    for n in range(LENGTH):
        seen.append(logits)
        tokens.append(logits.argmax(-1) if forced is None else forced[:, n : n + 1])
        now = whole if cache_kind == "static" else whole[:, : PROMPT + n + 1]
        torch._dynamo.maybe_mark_dynamic(now, 1)
        logits = step(tokens[-1], attention_mask=now, **{named: cache}).logits
    return torch.cat(tokens, 1), torch.cat(seen, 1).float()


def test_kimi_linear_by_hand_with_a_dynamic_cache_says_the_same_64_tokens(device):
    model = made(kimi, "linear_attention", "full_attention", device=device)
    expected, _ = by_hand(model, 5, "dynamic")
    backend, findings = up_to_the_pass()
    step = torch.compile(model, backend=backend, fullgraph=True)
    found, _ = by_hand(model, 5, "dynamic", step)
    check(findings, 2)  # the second for all other lengths of the context
    assert torch.equal(found, expected)
    assert len(expected.unique()) > 8


def test_glm_by_generate_with_a_static_cache_says_the_same_64_tokens(device):
    model = made(glm, "linear_attention", "indexed_attention", device=device)
    prompt, mask = padded(5, device)
    how = {
        "attention_mask": mask,
        "do_sample": False,
        "max_new_tokens": LENGTH,
        "min_new_tokens": LENGTH,
        "cache_implementation": "static",
    }
    expected = model.generate(prompt, disable_compile=True, **how)
    backend, findings = up_to_the_pass()
    compiling = transformers.CompileConfig(backend=backend, mode=None, fullgraph=True)
    compiling._compile_all_devices = True  # on the CPU too
    found = model.generate(prompt, compile_config=compiling, **how)
    check(findings, 1)
    assert torch.equal(found, expected)
    assert len(expected.unique()) > 8


@pytest.mark.parametrize(
    ("build", "attention", "batch"),
    [(kimi, "full_attention", 1), (glm, "indexed_attention", 2)],
    ids=["Kimi Linear", "GLM"],
)
def test_in_bfloat16_64_steps_are_as_near_to_float32_as_uncompiled_ones(
    device, build, attention, batch
):
    pytest.importorskip("transformers", minversion="5.18", reason="older models do not round o")
    model = made(build, "linear_attention", attention, dtype=torch.bfloat16, device=device)
    tokens, eager = by_hand(model, batch, "static")
    _, exact = by_hand(copy.deepcopy(model).float(), batch, "static", forced=tokens)
    backend, findings = up_to_the_pass()
    step = torch.compile(model, backend=backend, fullgraph=True)
    _, found = by_hand(model, batch, "static", step, forced=tokens)
    check(findings, 1)
    off, budget = (found - exact).abs(), (eager - exact).abs()
    assert off.mean() <= 1.1 * budget.mean()
    assert off.max() <= 1.5 * budget.max()
