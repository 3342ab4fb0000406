"""Decodes with the small model in three ways and judges whether they agree.

Lives here: the model's sizes, the order of the runs, what counts as a fault. Not here: the options
of the command (command.py), how a result is printed (report.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kda_ops.demo.decode import (
    VOCABULARY,
    Batch,
    Decoded,
    Difference,
    Step,
    budget,
    decode,
    difference,
    prompts,
    tokens_at,
    untouched,
)
from kda_ops.demo.model import DeltaLM
from kda_ops.demo.progress import Progress
from kda_ops.demo.rewrite import Compilation, first_call

EAGER = "eager"
PLAIN = "torch.compile"
REWRITTEN = 'torch.compile, "kda"'
EXACT = "float64"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sizes:
    """What is built and how long it runs; `steps` are the tokens behind the longest prompt."""

    layers: int = 3
    heads: int = 4
    hidden: int = 128
    rows: int = 16
    steps: int = 64
    state_dtype: torch.dtype = torch.float32
    seed: int = 0
    device: torch.device = CPU

    @property
    def slots(self) -> int:
        """Slots of the pools: half of them stay idle, and must keep what is in them."""
        return 2 * self.rows


@dataclass(frozen=True)
class Setting:
    """A model, the texts it goes on with, and what its pools hold before the first token."""

    sizes: Sizes
    model: DeltaLM
    batch: Batch
    prompts: list[str]
    pools: Mapping[str, Tensor]

    @classmethod
    def of(cls, sizes: Sizes) -> Setting:
        """Build everything from one seed, the same on every device."""
        torch.manual_seed(sizes.seed)
        model = DeltaLM(
            VOCABULARY,
            layers=sizes.layers,
            heads=sizes.heads,
            slots=sizes.slots,
            hidden=sizes.hidden,
            state_dtype=sizes.state_dtype,
        )
        model = model.eval().requires_grad_(False)
        slots = torch.randperm(sizes.slots)[: sizes.rows]
        for pool in model.buffers():
            pool.normal_()
            pool[slots] = 0
        model = model.to(sizes.device)
        texts = prompts(sizes.rows)
        batch = Batch.of(texts, slots, sizes.device)
        pools = {name: pool.clone() for name, pool in model.named_buffers()}
        return cls(sizes, model, batch, texts, pools)

    @property
    def positions(self) -> int:
        """Tokens to run: the longest prompt and the steps behind it."""
        return self.batch.tokens.shape[1] + self.sizes.steps - 1

    def run(self, name: str, step: Step, forced: Tensor | None = None) -> Decoded:
        """Decode from the start with a step of this setting's own model."""
        with Progress(name, self.positions) as progress:
            return decode(
                step,
                self.model,
                self.batch,
                self.positions,
                pools=self.pools,
                progress=progress,
                forced=forced,
            )

    def exactly(self, forced: Tensor) -> Decoded:
        """Decode in float64, choosing given tokens."""
        model = copy.deepcopy(self.model).double()
        double = Setting(self.sizes, model, self.batch, self.prompts, self.pools)
        return double.run(EXACT, model, forced)


@dataclass(frozen=True)
class Comparison:
    """Three decodings of one setting, the float64 one, and what compiling showed."""

    setting: Setting
    decoded: Mapping[str, Decoded]
    compiled: Mapping[str, Compilation]
    exact: Decoded

    @property
    def budget(self) -> Difference:
        """How far each may be from float64."""
        return budget(self.decoded[EAGER], self.exact)

    def same_tokens(self, name: str) -> bool:
        """Whether a way chose what eager PyTorch chose, everywhere."""
        return torch.equal(self.decoded[name].tokens, self.decoded[EAGER].tokens)

    def faults(self) -> list[str]:
        """Everything that is not as it must be, in sentences; empty if all is well."""
        found = []
        for name, decoded in self.decoded.items():
            if not self.same_tokens(name):
                found.append(f"{name}: greedy tokens differ from those of eager PyTorch")
            elif not difference(decoded, self.exact).within(self.budget):
                found.append(f"{name}: further from float64 than the budget allows")
            if not untouched(decoded, self.setting.pools, self.setting.batch):
                found.append(f"{name}: a slot that no row lives in was written")
        compiled, layers = self.compiled[REWRITTEN], self.setting.sizes.layers
        if compiled.rewritten != layers:
            found.append(f"{REWRITTEN}: {compiled.rewritten} of {layers} layers were rewritten")
        elif compiled.operator_calls != layers:
            calls = compiled.operator_calls
            found.append(f"{REWRITTEN}: {calls} operator calls in the code of {layers} layers")
        for pool in compiled.copied(self.setting.pools):
            found.append(f"{REWRITTEN}: the generated code still copies the pool {pool}")
        return found


def compare(
    setting: Setting, finished: Callable[[str, Decoded, Compilation], None] | None = None
) -> Comparison:
    """Decode eagerly, compiled, compiled with the pass, and in float64.

    Args:
        setting: what to decode.
        finished: called after each of the three ways.
    """
    steps: dict[str, Step] = {
        EAGER: setting.model,
        PLAIN: torch.compile(setting.model),
        REWRITTEN: torch.compile(setting.model, backend="kda"),
    }
    decoded: dict[str, Decoded] = {}
    compiled: dict[str, Compilation] = {}
    with torch.no_grad():
        for name, step in steps.items():
            with Progress("first call" if step is setting.model else f"compiling: {name}", 0):
                first = tokens_at(setting.batch, 0, [])
                compiled[name] = first_call(step, first, setting.batch.slots)
            decoded[name] = setting.run(name, step)
            if finished is not None:
                finished(name, decoded[name], compiled[name])
        exact = setting.exactly(decoded[EAGER].tokens)
    return Comparison(setting, decoded, compiled, exact)
