"""Speculative decoding: a draft model guesses, the model checks all guesses in one call.

    python examples/speculative_decoding.py [--device cuda] [--sequences 4] [--tokens 4]

The draft is the model without its last layer. In a round it guesses T - 1 tokens of every sequence;
the model then runs the last certain token and the guesses, T tokens a sequence, through
packed_fused_kda_decode, which keeps a checkpoint of the state for each of them in T slots. What the
model itself would have said is accepted, and the next round starts from the checkpoint of the last
accepted token: nothing is copied back. Prompts go the same way, up to T tokens at a time. The text
is the one that plain decoding gives.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kda_ops
from kda_model import D, DeltaModel, Weights
from kda_ops import StateCache, StateSpec

VOCABULARY, HIDDEN = 64, 128


class Drafts(NamedTuple):
    """What packed_fused_kda_decode is told about a ragged batch."""

    slots: Tensor  # [N, T]: a checkpoint for each token
    starts: Tensor  # [N+1]: first row of each sequence, and the number of rows
    accepted: Tensor  # [N]: how many tokens of the call before were right


def attention_of_drafts(x: Tensor, w: Weights, batch: Drafts, pools: kda_ops.LayerPools) -> Tensor:
    """Advance one layer by the tokens of every sequence: x [R, hidden] -> [R, H*128]."""
    by_head = (-1, w.A_log.shape[0], D)
    output = kda_ops.packed_fused_kda_decode(
        F.linear(x, w.qkv.flatten(0, 2)),
        w.conv.flatten(2),
        pools.window,
        F.linear(x, w.decay.flatten(0, 1)).view(by_head)[None],
        F.linear(x, w.beta)[None],
        w.A_log,
        w.dt_bias.flatten(),
        batch.slots,
        pools.state,
        F.linear(x, w.gate.flatten(0, 1)).view(by_head),
        w.norm,
        query_start_loc=batch.starts,
        num_accepted_tokens=batch.accepted,
    )
    return output[0].flatten(1)


@dataclass
class Sequence:
    """One text: its checkpoints, how many tokens of the last call were right, what came out."""

    prompt: list[int]
    wanted: int
    slots: list[int]
    draft_slot: int
    accepted: int = 1
    generated: list[int] = field(default_factory=list)
    rounds: int = 0


class Speculation:
    """A model, its draft, and the pools of both.

    Args:
        model: whose text is wanted.
        draft: guesses; its own states go token by token.
        spec: of the model's cache; ``spec.tokens`` is T.
        sequences: how many at a time.
        device: of both models.
    """

    def __init__(
        self, model: DeltaModel, draft: DeltaModel, spec: StateSpec, sequences: int, device: str
    ) -> None:
        self.model, self.draft, self.tokens = model, draft, spec.tokens
        self.cache = StateCache(spec, slots=1 + sequences * spec.tokens, device=device)
        small = replace(spec, layers=len(draft.layers), tokens=1)
        self.draft_cache = StateCache(small, slots=1 + sequences, device=device)

    def admit(self, prompt: list[int], wanted: int) -> Sequence:
        """Give a text its slots: T for the model, one for the draft."""
        [slot] = self.draft_cache.allocate()
        return Sequence(prompt, wanted, self.cache.allocate(self.tokens), slot)

    def check(self, batch: list[Sequence], lines: list[list[int]]) -> list[list[int]]:
        """Run a line of tokens a sequence through the model; return what comes after each token."""
        ends = torch.tensor([len(line) for line in lines]).cumsum(0).tolist()
        drafts = Drafts(
            self.cache.indices([sequence.slots for sequence in batch]),
            self.numbers([0, *ends], torch.int32),
            self.numbers([sequence.accepted for sequence in batch], torch.int32),
        )
        tokens = self.numbers([token for line in lines for token in line])
        said = self.model(drafts, tokens, self.cache, attention_of_drafts).argmax(-1).tolist()
        return [said[end - len(line) : end] for end, line in zip(ends, lines, strict=True)]

    def run_draft(self, batch: list[Sequence], tokens: list[int]) -> list[int]:
        """Move the draft on by one token a sequence and return its guesses of the next."""
        slots = self.draft_cache.indices([sequence.draft_slot for sequence in batch])
        return self.draft(slots, self.numbers(tokens), self.draft_cache).argmax(-1).tolist()

    def numbers(self, given: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Put whole numbers where the model is."""
        return torch.tensor(given, dtype=dtype, device=self.cache.device)

    def read(self, sequence: Sequence) -> None:
        """Take in a prompt, up to T tokens at a call; all of them are right."""
        for start in range(0, len(sequence.prompt), self.tokens):
            line = sequence.prompt[start : start + self.tokens]
            [said] = self.check([sequence], [line])
            sequence.accepted = len(line)
            for token in line:
                self.run_draft([sequence], [token])
        sequence.generated.append(said[-1])

    def round(self, batch: list[Sequence]) -> None:
        """Guess, check, and keep what was right of every sequence."""
        lines = [[sequence.generated[-1]] for sequence in batch]
        # The draft's states before each of its tokens, to come back to.
        before = []
        for _ in range(self.tokens - 1):
            before.append(self.draft_cache.snapshot(s.draft_slot for s in batch))
            guesses = self.run_draft(batch, [line[-1] for line in lines])
            for line, guess in zip(lines, guesses, strict=True):
                line.append(guess)
        before.append(self.draft_cache.snapshot(s.draft_slot for s in batch))
        self.run_draft(batch, [line[-1] for line in lines])
        for sequence, line, said in zip(batch, lines, self.check(batch, lines), strict=True):
            right = 1
            while right < self.tokens and line[right] == said[right - 1]:
                right += 1
            sequence.accepted = right
            sequence.generated += said[:right]
            sequence.rounds += 1
            if right < self.tokens:
                self.draft_cache.rollback(before[right], [sequence.draft_slot])

    def finish(self, sequence: Sequence) -> None:
        """Give a text's slots back, and cut what is more than was wanted."""
        self.cache.release(sequence.slots)
        self.draft_cache.release([sequence.draft_slot])
        del sequence.generated[sequence.wanted :]


def models(spec: StateSpec) -> tuple[DeltaModel, DeltaModel]:
    """Make a model and its draft: the same weights without the last layer."""
    model = DeltaModel(VOCABULARY, HIDDEN, spec)
    draft = DeltaModel(VOCABULARY, HIDDEN, replace(spec, layers=spec.layers - 1))
    draft.load_state_dict(model.state_dict(), strict=False)
    return model, draft


def main(arguments: list[str] | None = None) -> list[Sequence]:
    """Continue random prompts and say how many tokens a round brought."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--wanted", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=4, help="T, tokens of a round")
    options = parser.parse_args(arguments)

    spec = StateSpec(layers=3, heads=2, tokens=options.tokens, window_dtype=torch.float32)
    model, draft = (one.to(options.device) for one in models(spec))
    speculation = Speculation(model, draft, spec, options.sequences, options.device)
    generator = torch.Generator().manual_seed(0)
    texts = []
    for number in range(options.sequences):
        prompt = torch.randint(0, VOCABULARY, (3 + number,), generator=generator).tolist()
        texts.append(speculation.admit(prompt, options.wanted))
        speculation.read(texts[-1])
    running = list(texts)
    while running:
        speculation.round(running)
        for sequence in [s for s in running if len(s.generated) >= s.wanted]:
            speculation.finish(sequence)
            running.remove(sequence)
    made, rounds = sum(len(s.generated) for s in texts), sum(s.rounds for s in texts)
    print(f"{made} tokens in {rounds} rounds of {options.tokens}: {made / rounds:.2f} a round")
    return texts


if __name__ == "__main__":
    main()
