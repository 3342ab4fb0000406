"""transformers' KimiLinear with its own generate(): the pass rewrites its delta-attention layers.

    python examples/kimi_linear_generate.py [--device cuda]

transformers compiles the decode step itself where it is given a static cache. All that is needed is
kda_ops.enabled() around the first call. Random weights: the text means nothing.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    CompileConfig,
    GenerationConfig,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    PreTrainedModel,
)

import kda_ops


def small_model() -> PreTrainedModel:
    """A layer of delta attention and one of full attention, heads as wide as the real ones."""
    torch.manual_seed(0)
    config = KimiLinearConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "dense"],
        linear_num_heads=2,
        linear_head_dim=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return KimiLinearForCausalLM(config).eval().requires_grad_(False)


def generation(*, compiled: bool, tokens: int) -> GenerationConfig:
    """Greedy decoding with a static cache; compiled by generate() itself, or not at all."""
    config = CompileConfig()  # mode="reduce-overhead"
    # generate() compiles on GPUs only, unless it is told otherwise.
    config._compile_all_devices = True
    return GenerationConfig(
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static",
        disable_compile=not compiled,
        compile_config=config if compiled else None,
        pad_token_id=0,
    )


def main(arguments: list[str] | None = None) -> tuple[Tensor, Tensor, int]:
    """Generate eagerly and compiled, and return both texts and the number of rewritten layers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=8)
    options = parser.parse_args(arguments)

    model = small_model().to(options.device)
    prompt = torch.randint(3, 256, (2, 6), device=options.device)
    eager = model.generate(
        prompt, generation_config=generation(compiled=False, tokens=options.tokens)
    )
    before = counters["kda"]["matches"]
    with kda_ops.enabled():
        text = model.generate(
            prompt, generation_config=generation(compiled=True, tokens=options.tokens)
        )
    rewritten = counters["kda"]["matches"] - before
    print(f"eager:    {eager[:, prompt.shape[1] :].tolist()}")
    print(f"compiled: {text[:, prompt.shape[1] :].tolist()}")
    print(f"delta-attention layers rewritten: {rewritten}")
    return eager, text, rewritten


if __name__ == "__main__":
    main()
