"""Continuous batching: requests arrive, share a batch and leave; CUDA graphs replay every step.

    python examples/continuous_batching.py [--device cuda] [--requests 12]

Every request owns one slot of a StateCache. A step takes one token of each running request, its
next prompt token or the one it has just generated, in whatever order they come; DecodeGraphs pads
the batch to a captured size with null rows. On CPU the same loop runs without graphs.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, field

import torch

from kda_model import DeltaModel
from kda_ops import DecodeGraphs, StateCache, StateSpec

VOCABULARY, HIDDEN = 256, 128


@dataclass
class Request:
    """One text: what is given, how much is wanted, what has come out."""

    arrival: int
    prompt: list[int]
    wanted: int
    slot: int = 0
    position: int = 0
    generated: list[int] = field(default_factory=list)

    def next_token(self) -> int:
        """The token to run through the model now."""
        if self.position < len(self.prompt):
            return self.prompt[self.position]
        return self.generated[-1]

    def accept(self, token: int) -> None:
        """Take what the model says comes next; it counts once the prompt is through."""
        self.position += 1
        if self.position >= len(self.prompt):
            self.generated.append(token)

    @property
    def done(self) -> bool:
        """Whether everything wanted has come out."""
        return len(self.generated) >= self.wanted


def serve(requests: list[Request], cache: StateCache, graphs: DecodeGraphs) -> int:
    """Run all requests to their ends and return the number of steps."""
    waiting = deque(sorted(requests, key=lambda request: request.arrival))
    running: list[Request] = []
    steps = 0
    while waiting or running:
        # Admission: a slot is zero when it is handed out, whoever had it before.
        while waiting and waiting[0].arrival <= steps and cache.free:
            request = waiting.popleft()
            [request.slot] = cache.allocate()
            running.append(request)
        if running:
            slots = cache.indices([request.slot for request in running])
            tokens = torch.tensor([request.next_token() for request in running])
            # The host waits here for the GPU: it needs the tokens. Nothing else makes it wait.
            for request, token in zip(running, graphs(slots, tokens).tolist(), strict=True):
                request.accept(token)
            cache.release([request.slot for request in running if request.done])
            running = [request for request in running if not request.done]
        steps += 1
    return steps


def random_requests(count: int, seed: int = 0) -> list[Request]:
    """Requests of different lengths that arrive over time."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    return [
        Request(
            arrival=number(0, 3 * count),
            prompt=[number(0, VOCABULARY) for _ in range(number(1, 9))],
            wanted=number(1, 13),
        )
        for _ in range(count)
    ]


def main(arguments: list[str] | None = None) -> list[Request]:
    """Serve random requests and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=12)
    options = parser.parse_args(arguments)

    dtype = torch.bfloat16 if options.device != "cpu" else torch.float32
    spec = StateSpec(layers=2, heads=2, window_dtype=dtype)
    cache = StateCache(spec, slots=1 + 6, device=options.device)
    model = DeltaModel(VOCABULARY, HIDDEN, spec).to(options.device)
    graphs = DecodeGraphs(model.greedy(cache), batch_sizes=[1, 2, 4, 8], device=cache.device)

    requests = random_requests(options.requests)
    steps = serve(requests, cache, graphs)
    made = sum(len(request.generated) for request in requests)
    print(f"{len(requests)} requests, {made} tokens in {steps} steps on {cache.device}")
    print(f"calls by batch size: {graphs.report.padded_calls}")
    print(f"slots: {cache.memory.slot} bytes each, {len(cache.live)} in use, {cache.free} free")
    return requests


if __name__ == "__main__":
    main()
