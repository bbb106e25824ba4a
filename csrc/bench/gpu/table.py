"""What the groups of GPU figures share: rows, the size of the logits, device times by events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_bench import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_bench import Run

ROWS, VOCAB = 8192, 151936
DEVICE = "cuda"


class Table:
    """Rows of a run, printed as they come."""

    def __init__(self, run: Run) -> None:
        self._run, self._limited = run, set[str]()

    def add(
        self,
        metric: str,
        system: str,
        samples: list[float] | None,
        *,
        role: str = "ours",
        unit: str = "ms",
        goal: float | None = None,
        goal_of_limit: float | None = None,
        note: str = "",
    ) -> None:
        """Add one line; `goal` in the row's unit, `goal_of_limit` as a share of the limit's speed."""
        if role == "limit" and metric in self._limited:
            return
        self._limited |= {metric} if role == "limit" else set()
        wanted = f"{'>=' if unit.endswith('/s') else '<='} {goal} {unit}" if goal else None
        wanted = f">= {goal_of_limit:.4f} of limit" if goal_of_limit else wanted
        self._run.record(metric, system, samples or [], unit=unit, role=Role(role), goal=wanted, note=note)
        print(f"{metric:44s} {system:28s} {sorted(samples or [])} {unit} {note}", flush=True)


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
