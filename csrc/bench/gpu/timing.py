"""Device times by events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def measure(
    run: Callable[[], object], *, repeats: int = 15, warmup: int = 3, prepare: Callable[[], object] | None = None
) -> list[float]:
    """Milliseconds of each of `repeats` calls; `prepare` runs before each, untimed."""
    for _ in range(warmup):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, stop in events:
        if prepare is not None:
            prepare()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def measure_graph(runs: Sequence[Callable[[], object]], *, rounds: int = 4, repeats: int = 15) -> list[float]:
    """Milliseconds per short launch: one graph calls each of `runs` (each on its own inputs) `rounds` times."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for run in runs:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for run in runs:
                run()
    return [x / (rounds * len(runs)) for x in measure(graph.replay, repeats=repeats)]
