"""Decodes with transformers' own KimiLinear: its classes, its cache, random weights.

Lives here: a small configuration, prefill and decode with a static cache, the comparison of the
same step compiled with and without the pass. Not here: the pass, and the model of this package
(model.py). transformers is imported only when the command asks for it.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda_ops.demo import report
from kda_ops.demo.comparison import EAGER, PLAIN, REWRITTEN, Sizes
from kda_ops.demo.decode import (
    TEXT,
    VOCABULARY,
    Decoded,
    decode_text,
    difference,
    encode,
    synchronize,
)
from kda_ops.demo.progress import Progress
from kda_ops.demo.rewrite import Compilation, first_call

MISSING = (
    "kda-ops demo: --model transformers needs transformers 5.17 or newer: "
    "pip install 'transformers>=5.17'"
)
_PROMPT = 32

CachedStep = Callable[[Tensor, Any], Tensor]
"""Tokens [B, n] and a cache to logits [B, n, vocabulary]; the cache moves on by n positions."""


@dataclass(frozen=True)
class KimiLinear:
    """A KimiLinear of transformers and the texts it goes on with, all of one length."""

    sizes: Sizes
    model: Any
    tokens: Tensor

    @classmethod
    def of(cls, sizes: Sizes) -> KimiLinear:
        """Build it from a seed: layers of delta attention, behind them one of full attention.

        Raises:
            ImportError: transformers is missing or has no KimiLinear yet.
        """
        from transformers import (  # noqa: PLC0415 - optional
            KimiLinearConfig,
            KimiLinearForCausalLM,
            logging,
        )

        logging.set_verbosity_error()
        layers = sizes.layers + 1
        config = KimiLinearConfig(
            vocab_size=VOCABULARY,
            hidden_size=sizes.hidden,
            intermediate_size=2 * sizes.hidden,
            num_hidden_layers=layers,
            layer_types=["linear_attention"] * sizes.layers + ["full_attention"],
            mlp_layer_types=["dense"] * layers,
            linear_num_heads=sizes.heads,
            linear_head_dim=128,
            num_attention_heads=2,
            num_key_value_heads=2,
            kv_lora_rank=64,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
            # Large enough that the answer depends on the text: greedy tokens do not go in circles.
            initializer_range=0.1,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
        )
        torch.manual_seed(sizes.seed)
        model = KimiLinearForCausalLM(config).float().eval().requires_grad_(False)
        starts = [9 * row % len(TEXT) for row in range(sizes.rows)]
        texts = [(TEXT[start:] + " " + TEXT)[:_PROMPT] for start in starts]
        tokens = torch.tensor([encode(text) for text in texts])
        return cls(sizes, model.to(sizes.device), tokens.to(sizes.device))

    def step(self, tokens: Tensor, cache: Any) -> Tensor:  # noqa: ANN401 - transformers' own
        """Run tokens [B, n] on top of a cache."""
        return self.model(input_ids=tokens, use_cache=True, **{self.cache_name: cache}).logits

    @property
    def cache_name(self) -> str:
        """The argument that takes the cache, which transformers has renamed."""
        parameters = inspect.signature(self.model.model.forward).parameters
        return "cache" if "cache" in parameters else "past_key_values"

    def prefilled(self) -> tuple[Any, Tensor]:
        """Return a cache that has seen the prompts, and the first token [B, 1] behind them."""
        from transformers import StaticCache  # noqa: PLC0415 - optional

        # Static: every shape and address stays what it is, so one compiled graph serves all steps.
        length = _PROMPT + self.sizes.steps
        cache = StaticCache(config=self.model.config, max_cache_len=length)
        return cache, self.step(self.tokens, cache)[:, -1:].argmax(-1)

    def run(self, name: str, step: CachedStep) -> tuple[Decoded, Compilation]:
        """Call a step once on a cache of its own, then decode greedily from the prompts on."""
        with Progress("first call" if name == EAGER else f"compiling: {name}", 0):
            cache, token = self.prefilled()
            compiled = first_call(step, token, cache)
        cache, token = self.prefilled()
        chosen, logits, seconds = [token[:, 0]], [], []
        with Progress(name, self.sizes.steps - 1) as progress:
            for _ in range(self.sizes.steps - 1):
                started = time.perf_counter()
                scores = step(token, cache)[:, -1]
                token = scores.argmax(-1, keepdim=True)
                synchronize(token.device)
                seconds.append(time.perf_counter() - started)
                chosen.append(token[:, 0])
                logits.append(scores)
                progress.step()
        pools = dict(states(cache))
        return Decoded(torch.stack(chosen), torch.stack(logits), pools, tuple(seconds)), compiled


def states(cache: Any) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401 - transformers' own
    """Every tensor that a cache keeps, by layer and kind."""
    for number, layer in enumerate(cache.layers):
        for kind in ("recurrent_states", "conv_states"):
            for tensor in getattr(layer, kind, {}).values():
                yield f"layers.{number}.{kind}", tensor
        for kind in ("keys", "values"):
            if (tensor := getattr(layer, kind, None)) is not None:
                yield f"layers.{number}.{kind}", tensor


def run(sizes: Sizes, why: str, *, quiet: bool) -> int:
    """Decode with KimiLinear in three ways and say what the pass did to each layer.

    Returns:
        0 if greedy tokens are equal in all three, whether or not the pass could rewrite the
        layers; 1 if they are not, or if transformers is missing.
    """
    try:
        kimi = KimiLinear.of(sizes)
    except ImportError:
        print(MISSING, file=sys.stderr)
        return 1
    if not quiet:
        report.say(_opening(kimi, why))
    steps: dict[str, CachedStep] = {
        EAGER: kimi.step,
        PLAIN: torch.compile(kimi.step),
        REWRITTEN: torch.compile(kimi.step, backend="kda"),
    }
    ways: list[tuple[str, Decoded, Compilation]] = []
    with torch.no_grad():
        for name, step in steps.items():
            ways.append((name, *kimi.run(name, step)))
            if not quiet:
                report.say(report.finished(*ways[-1]))
    equal = all(torch.equal(decoded.tokens, ways[0][1].tokens) for _, decoded, _ in ways)
    if not quiet:
        report.say(["", *_layers(ways[-1][2], sizes.layers)])
        report.say(["", *_texts(kimi, ways[-1][1])])
        report.say(["", *report.speeds(ways), "", *_differences(ways)])
    report.say(["", _verdict(ways, sizes.layers, equal=equal)])
    return 0 if equal else 1


def _opening(kimi: KimiLinear, why: str) -> Iterator[str]:
    import transformers  # noqa: PLC0415 - optional

    sizes = kimi.sizes
    yield (
        f"KimiLinear of transformers {transformers.__version__}, random weights: {sizes.layers} "
        f"layers of delta attention with {sizes.heads} heads, 1 of full attention"
    )
    yield f"  on {sizes.device} ({why}); {sizes.rows} sequences, prompts of {_PROMPT} tokens"
    yield ""


def _layers(compiled: Compilation, layers: int) -> Iterator[str]:
    yield f"Rewritten: {compiled.rewritten} of {layers} layers of delta attention"
    for number in range(layers):
        if number >= len(compiled.findings):
            yield f"  layer {number}: nothing that looks like a delta-rule step was found"
            continue
        finding = compiled.findings[number]
        if finding.operator:
            yield f"  layer {number}: {finding.operator}, in place on the cache's own state"
        else:
            first, *rest = report.refusal(finding)
            yield f"  layer {number}: {first.strip()}"
            yield from (f"  {line}" for line in rest)


def _texts(kimi: KimiLinear, decoded: Decoded) -> Iterator[str]:
    yield "Decoded (random weights, so the text means nothing; it is the same in all three)"
    yield from report.texts(
        (decode_text(kimi.tokens[row]), decode_text(decoded.tokens[:, row]))
        for row in range(min(4, kimi.sizes.rows))
    )


def _differences(ways: list[tuple[str, Decoded, Compilation]]) -> Iterator[str]:
    eager = ways[0][1]
    yield "  Largest difference from eager"
    for name, decoded, _ in ways[1:]:
        found = difference(decoded, eager)
        tokens = "equal" if torch.equal(decoded.tokens, eager.tokens) else "DIFFER"
        yield f"  {name:<26}logits {found.logits:.1e}, cache {found.pools:.1e}, tokens {tokens}"


def _verdict(ways: list[tuple[str, Decoded, Compilation]], layers: int, *, equal: bool) -> str:
    rewritten = ways[-1][2].rewritten
    if not equal:
        return "FAULT: greedy tokens differ"
    tokens = ways[0][1].tokens.numel()
    done = (
        f"OK: {tokens} greedy tokens equal in all three, {rewritten} of {layers} layers rewritten"
    )
    return done if rewritten == layers else f"{done} (the reasons are above)"
