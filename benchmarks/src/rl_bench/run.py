"""One run of one benchmark: samples in, rows out.

Knows how to sample and how to compare; knows nothing of what is measured, of files, or of the screen.
"""

from __future__ import annotations

import importlib.util
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

T = TypeVar("T")

Work = Callable[[], object]
"""What is timed: called without arguments, its result dropped."""

_GOAL = re.compile(r"(?P<op><=|>=) (?P<value>\d+(?:\.\d+)?) (?:of (?P<base>limit|best peer)|(?P<unit>\S+))")


class Role(StrEnum):
    """What a system is to the comparison."""

    OURS = "ours"
    PEER = "peer"
    """Somebody else's way of doing the same work."""
    LIMIT = "limit"
    """The fastest that this machine can go in this run, for example a memcpy."""


T_95 = {2: 12.706, 3: 4.303}
"""Student's t of a 95% interval, by the number of samples."""


def half_width_95(samples: Sequence[float]) -> float | None:
    """Half width of the 95% interval of the mean of two or three samples; None of one, which has no interval."""
    if len(samples) == 1:
        return None
    return T_95[len(samples)] * statistics.stdev(samples) / len(samples) ** 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: one system on one metric. All numbers are None for a system that is missing here."""

    system: str
    """Who."""
    metric: str
    """Which work. Rows of one metric are compared with one another."""
    unit: str
    """Of median, min and max. A unit ending in `/s` is a rate, where more is better; of any other, less is."""
    role: Role
    """Ours, a peer, or the limit."""
    median: float | None = None
    """Over the samples."""
    min: float | None = None
    """Smallest sample."""
    max: float | None = None
    """Largest sample."""
    n: int = 0
    """Number of samples."""
    wall_s: float | None = None
    """Median wall-clock seconds of one call."""
    cpu_s: float | None = None
    """Median CPU seconds of one call, all threads of the measuring process."""
    ratio_to_limit: float | None = None
    """Speed over the limit's speed: 1 is at the limit."""
    ratio_to_best_peer: float | None = None
    """Speed over the fastest peer's speed: above 1 is faster than all of them. Only for ours."""
    goal: str | None = None
    """`<= 0.5 ms`, `>= 0.9 of limit` or `>= 1.5 of best peer`."""
    met: bool | None = None
    """Whether the goal was met; None where this machine cannot tell, or there is none."""
    note: str = ""
    """Why a system is missing, or what to know of it."""


def missing(*modules: str) -> str | None:
    """A sentence naming those of `modules` that are not installed, or None when all are there."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def speed_ratio(value: float | None, base: float | None, unit: str) -> float | None:
    """How many times as fast `value` is as `base`: above 1 is better, whether the unit is a rate or a duration."""
    if not value or not base:
        return None
    return value / base if unit.endswith("/s") else base / value


def parse_goal(goal: str, unit: str) -> tuple[str, float, str | None]:
    """Operator, number, and what the number is a ratio to: `limit`, `best peer`, or None for the median itself.

    Raises:
        ValueError: the goal cannot be read, or is in another unit than the samples.
    """
    found = _GOAL.fullmatch(goal)
    if found is None or (found["base"] is None and found["unit"] != unit):
        raise ValueError(
            f"goal {goal!r} cannot be read; write '<= 0.5 {unit}' (or >=), '>= 0.9 of limit' or '>= 1 of best peer'"
        )
    return found["op"], float(found["value"]), found["base"]


def is_goal_met(row: Row) -> bool | None:
    """Judge a row whose ratios are filled in; None where there is no goal, or nothing to hold it against."""
    if row.goal is None:
        return None
    operator, bound, base = parse_goal(row.goal, row.unit)
    value = row.median if base is None else row.ratio_to_limit if base == "limit" else row.ratio_to_best_peer
    if value is None:
        return None
    return value <= bound if operator == "<=" else value >= bound


@dataclass(slots=True)
class Run:
    """What a benchmark's `main(run)` measures with. Not thread-safe: one thing is measured at a time."""

    quick: bool = False
    """Asked for a short run: use smaller inputs. Figures of quick runs are not quoted."""
    repetitions: int = 7
    """Samples of each system, after the warm-up."""
    inputs: dict[str, Any] = field(default_factory=dict[str, Any])
    """What `parameters` was told."""
    _rows: list[Row] = field(default_factory=list[Row])
    _untold: set[int] = field(default_factory=set[int])
    """Rows whose goal this machine cannot judge."""

    def parameters(self, **values: Any) -> None:
        """Write down what the figures depend on: sizes, dtypes, thread counts, model shapes. JSON values only."""
        self.inputs.update(values)

    def compare(
        self,
        metric: str,
        ours: Mapping[str, Work],
        *,
        peers: Mapping[str, Work | str] | None = None,
        limit: Mapping[str, Work] | None = None,
        unit: str = "ms",
        amount: float | None = None,
        inner: int = 1,
        before: Work | None = None,
        sync: Work | None = None,
        goal: str | None = None,
        can_tell: bool = True,
        peer_repetitions: int | None = None,
    ) -> None:
        """Time the same work done by several systems, in turns (A B A B), and record a row for each.

        Args:
            metric: Names the work.
            ours: Our system, by name; several variants may be measured side by side.
            peers: Others. A string instead of a callable says why one is missing, and becomes a row that says so.
            limit: At most one: the same bytes or flops without any of the work around them.
            unit: `s`, `ms` or `us` per call; or with `amount` a rate such as `GB/s`, `tokens/s`.
            amount: How much one call does, in the rate's numerator (`GB/s`: gigabytes).
            inner: Calls per sample, for work too short to time once.
            before: Untimed, ahead of every sample: poison outputs, rotate inputs.
            sync: Timed, at the end of every sample: `torch.cuda.synchronize` where work is queued.
            goal: For ours; see `Row.goal`.
            can_tell: False records the goal and leaves `met` null: this machine cannot judge it.
            peer_repetitions: Samples of each peer, where they are slow; None: as many as of ours and the limit.

        Raises:
            ValueError: unit and amount do not fit, the goal cannot be read, or two systems share a name.
        """
        scale = {"s": 1.0, "ms": 1e3, "us": 1e6}.get(unit)
        if (amount is None) != (scale is not None) or (scale is None and not unit.endswith("/s")):
            raise ValueError(f"unit {unit!r} with amount {amount!r}: use s, ms or us alone, or a rate with an amount")
        if goal is not None:
            parse_goal(goal, unit)
        rivals, limits = peers or {}, limit or {}
        if len({*ours, *rivals, *limits}) < len(ours) + len(rivals) + len(limits):
            raise ValueError(f"two systems of {metric!r} share a name: {[*ours, *rivals, *limits]}")
        systems = {**limits, **ours, **{name: work for name, work in rivals.items() if not isinstance(work, str)}}
        fewer = self.repetitions if peer_repetitions is None else min(peer_repetitions, self.repetitions)
        turns = [fewer if name in rivals else self.repetitions for name in systems]
        samples = self._sample(list(systems.values()), turns, inner=inner, before=before, sync=sync)
        for name, taken in zip(systems, samples, strict=True):
            is_ours = name in ours
            self.record(
                metric,
                name,
                [amount / wall if amount is not None else wall * (scale or 1.0) for wall, _ in taken],
                unit=unit,
                role=Role.OURS if is_ours else Role.PEER if name in rivals else Role.LIMIT,
                wall_s=statistics.median(wall for wall, _ in taken),
                cpu_s=statistics.median(cpu for _, cpu in taken),
                goal=goal if is_ours else None,
                can_tell=can_tell,
            )
        for name, work in rivals.items():
            if isinstance(work, str):
                self.record(metric, name, [], unit=unit, role=Role.PEER, note=work)

    def collect(self, works: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
        """Call each in turns, as `compare` does, and return what they returned: for work that times itself."""
        returned: dict[str, list[T]] = {name: [] for name in works}
        for turn in range(self.repetitions + 1):
            for name, work in works.items():
                value = work()
                if turn:
                    returned[name].append(value)
        return returned

    def record(
        self,
        metric: str,
        system: str,
        samples: Sequence[float],
        *,
        unit: str,
        role: Role = Role.OURS,
        wall_s: float | None = None,
        cpu_s: float | None = None,
        goal: str | None = None,
        can_tell: bool = True,
        note: str = "",
    ) -> None:
        """Write down samples that the benchmark took itself: of several processes, percentiles, sizes in bytes.

        Without samples the row stands for a missing system, and `note` says why.

        Raises:
            ValueError: the goal cannot be read, or the metric has a limit already.
        """
        if goal is not None:
            parse_goal(goal, unit)
        if role is Role.LIMIT and any((row.metric, row.role) == (metric, role) for row in self._rows):
            raise ValueError(f"{metric!r} has a limit already, so {system!r} cannot be another")
        if not can_tell:
            self._untold.add(len(self._rows))
        self._rows.append(
            Row(
                system=system,
                metric=metric,
                unit=unit,
                role=role,
                median=statistics.median(samples) if samples else None,
                min=min(samples, default=None),
                max=max(samples, default=None),
                n=len(samples),
                wall_s=wall_s,
                cpu_s=cpu_s,
                goal=goal,
                note=note,
            )
        )

    def rows(self) -> list[Row]:
        """Every row so far, with ratios and verdicts."""
        judged = [self._with_ratios(row) for row in self._rows]
        return [row if i in self._untold else replace(row, met=is_goal_met(row)) for i, row in enumerate(judged)]

    def _with_ratios(self, row: Row) -> Row:
        limits = list(self._medians(row, Role.LIMIT))
        peers = list(self._medians(row, Role.PEER))
        best_peer = (max if row.unit.endswith("/s") else min)(peers) if peers and row.role is Role.OURS else None
        return replace(
            row,
            ratio_to_limit=speed_ratio(row.median, limits[0], row.unit)
            if limits and row.role is not Role.LIMIT
            else None,
            ratio_to_best_peer=speed_ratio(row.median, best_peer, row.unit),
        )

    def _medians(self, like: Row, role: Role) -> Iterator[float]:
        same = (row for row in self._rows if (row.metric, row.unit, row.role) == (like.metric, like.unit, role))
        return (row.median for row in same if row.median is not None)

    def _sample(
        self, works: Sequence[Work], turns: Sequence[int], *, inner: int, before: Work | None, sync: Work | None
    ) -> list[list[tuple[float, float]]]:
        """(wall, CPU) seconds per call: one warm-up round, then rounds that take the systems in turns, each `turns`."""
        taken: list[list[tuple[float, float]]] = [[] for _ in works]
        for turn in range(self.repetitions + 1):
            for work, wanted, samples in zip(works, turns, taken, strict=True):
                if turn > wanted:
                    continue
                if before is not None:
                    before()
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(inner):
                    work()
                if sync is not None:
                    sync()
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                if turn:
                    samples.append((wall / inner, cpu / inner))
        return taken
