"""Decodes a batch of texts with the small model and says how far two decodings are apart.

Lives here: texts and tokens, the decode loop, the comparison with its budget. Not here: the model
(model.py), what the pass did (rewrite.py), printing (report.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kda_kernels.numerics import BUDGET_FACTOR, BUDGET_FLOOR
from kda_ops.demo.progress import Progress

Step = Callable[[Tensor, Tensor], Tensor]
"""Tokens [B] and slots [B] to logits [B, vocabulary]; the pools move on by one position."""

TEXT = (
    "A state is a small memory: it forgets a little at every word, looks up what it already says "
    "about the key, and writes down only the difference."
)
FIRST, LAST = 32, 126
VOCABULARY = LAST - FIRST + 1
"""Tokens are the printable bytes of ASCII, so that whatever a model says can be shown."""


def prompts(count: int) -> list[str]:
    """Pieces of one sentence, of different lengths."""
    words = TEXT.split()
    starts = (5 * row % len(words) for row in range(count))
    return [" ".join(words[start : start + 2 + start % 4]) for start in starts]


def encode(text: str) -> list[int]:
    """Token numbers of a text of printable ASCII."""
    return [byte - FIRST for byte in text.encode("ascii")]


def decode_text(tokens: Tensor) -> str:
    """The text of tokens [n]."""
    return bytes(token + FIRST for token in tokens.tolist()).decode("ascii")


@dataclass(frozen=True)
class Batch:
    """Texts to go on with: tokens [B, longest], zeros behind their ends; lengths and slots [B]."""

    tokens: Tensor
    lengths: Tensor
    slots: Tensor

    @classmethod
    def of(cls, texts: list[str], slots: Tensor, device: torch.device) -> Batch:
        """Pad texts to one rectangle; row i lives in slot slots[i]."""
        rows = [torch.tensor(encode(text)) for text in texts]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        return cls(tokens.to(device), lengths.to(device), slots.to(device))


@dataclass(frozen=True)
class Decoded:
    """What one way of running the model gave.

    `tokens` [positions, B] are those chosen after each position, `logits` [positions, B, V] what
    they were chosen by, `pools` the pools afterwards, `seconds` what each position took.
    """

    tokens: Tensor
    logits: Tensor
    pools: Mapping[str, Tensor]
    seconds: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        """Rows over the median time of a position: other work on the machine hardly shows."""
        return self.tokens.shape[1] / statistics.median(self.seconds)


def decode(
    step: Step,
    model: nn.Module,
    batch: Batch,
    positions: int,
    *,
    pools: Mapping[str, Tensor],
    progress: Progress,
    forced: Tensor | None = None,
) -> Decoded:
    """Run every text through the model, one token at a time, and go on greedily behind its end.

    Args:
        step: the model or a compiled form of it, called before: compiling is not to be timed.
        model: owns the pools that `step` moves on.
        batch: the texts and their slots.
        positions: tokens to run, prompt included.
        pools: what the model's pools hold before the first token.
        progress: counts the positions.
        forced: tokens [positions, B] to choose instead of the greedy ones.
    """
    restore(model, pools)
    chosen: list[Tensor] = []
    logits: list[Tensor] = []
    seconds: list[float] = []
    for position in range(positions):
        started = time.perf_counter()
        scores = step(tokens_at(batch, position, chosen), batch.slots)
        chosen.append(scores.argmax(-1) if forced is None else forced[position])
        synchronize(batch.tokens.device)
        seconds.append(time.perf_counter() - started)
        logits.append(scores)
        progress.step()
    after = {name: pool.clone() for name, pool in model.named_buffers()}
    return Decoded(torch.stack(chosen), torch.stack(logits), after, tuple(seconds))


def tokens_at(batch: Batch, position: int, chosen: list[Tensor]) -> Tensor:
    """The tokens [B] at a position: those of the prompt, behind its end those chosen before.

    Contiguous at every position: another stride would be another graph, compiled again.
    """
    if position >= batch.tokens.shape[1]:
        return chosen[-1]
    given = batch.tokens[:, position].contiguous()
    return torch.where(position < batch.lengths, given, chosen[-1]) if position else given


def restore(model: nn.Module, pools: Mapping[str, Tensor]) -> None:
    """Put the pools back to what they held."""
    for name, pool in model.named_buffers():
        pool.copy_(pools[name])


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference of logits and of pools between two decodings."""

    logits: float
    pools: float

    def within(self, budget: Difference) -> bool:
        """Whether neither is larger; NaN never is within."""
        return self.logits <= budget.logits and self.pools <= budget.pools


def difference(one: Decoded, other: Decoded) -> Difference:
    """Compare every logit and every pool element, in float64."""
    return Difference(
        largest(one.logits, other.logits),
        max(largest(pool, other.pools[name]) for name, pool in one.pools.items()),
    )


def largest(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference, NaN if there is one anywhere."""
    return (one.double() - other.double()).abs().max().item()


def budget(eager: Decoded, exact: Decoded) -> Difference:
    """How far a float32 decoding may be from the float64 one, given how far eager PyTorch is.

    The rule of kda_kernels.numerics: a factor times the error of eager PyTorch, and a few units in
    the last place of the largest value.
    """
    own = difference(eager, exact)
    logits = BUDGET_FLOOR * spacing(exact.logits, eager.logits.dtype)
    pools = max(
        BUDGET_FLOOR * spacing(pool, eager.pools[name].dtype) for name, pool in exact.pools.items()
    )
    return Difference(BUDGET_FACTOR * own.logits + logits, BUDGET_FACTOR * own.pools + pools)


def spacing(values: Tensor, dtype: torch.dtype) -> float:
    """The unit in the last place of a type at the largest of some values."""
    return torch.finfo(dtype).eps * values.abs().max().item()


def untouched(after: Decoded, before: Mapping[str, Tensor], batch: Batch) -> bool:
    """Whether every slot that no row lives in kept its bits."""
    idle = torch.ones(next(iter(before.values())).shape[0], dtype=torch.bool)
    idle[batch.slots.cpu()] = False
    return all(
        torch.equal(after.pools[name][idle].view(torch.uint8), pool[idle].view(torch.uint8))
        for name, pool in before.items()
    )
