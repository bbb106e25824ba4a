"""Schedule simulator: step time, utilisation, staleness and bottleneck of a run, from rates, before any GPU is taken.

The training loop and its source of rollouts run as they are, schedules, staleness policies and plug-ins included, on a
clock that only computes: the queue, the servers and the engine are stand-ins that let time pass. A replica shares its
rate equally among the sequences that it runs at a time, and none is faster than `sequence_tokens_per_s`; the lengths of
completions are drawn from a lognormal distribution that is cut at `rollout.max_new_tokens`, or from those of a run.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import re
from collections import deque
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from rl_ckpt.types import SyncReport
from rl_tq.errors import WaitTimeoutError
from rl_tq.types import AdvanceReport, BatchMeta, Credit
from rl_tq.types.staleness import ADMITTED, Span
from rl_trainer.config import load_config
from rl_trainer.data import PromptOrder
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.loop import run_loop
from rl_trainer.metrics import Evaluation
from rl_trainer.pipeline.components import Components
from rl_trainer.pipeline.rollout_source import PARTITION, RolloutSource
from rl_trainer.pipeline.staleness import create_schedule
from rl_trainer.planning.gpus import gpu_pools, named, placement_facts, pools_of, why_apart
from rl_trainer.planning.memory import memory_facts, memory_of_pools
from rl_trainer.samples import read_samples, steps_of
from rl_trainer.workers.agent import GroupReport
from rl_trainer.workers.engine_worker import AdvantageReport, UpdateReport
from rl_trainer.workers.grading import GradedGroup, group_filter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rl_tq.types import StalenessPolicy
    from rl_trainer.config import Config
    from rl_trainer.metrics import StepRecord
    from rl_trainer.workers.agent import Job

_EDGE, _STEPS = 8, 32
"""Steps before and behind those that count, in which a run that generates ahead gets going and runs dry; and those."""
_REWARDS = -1
_FORWARD = 1 / 3
"""Share of an update's time that a forward pass over the same tokens takes."""
_FORWARDS = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "values")
_UPDATES = ("update", "update_critic")
"""Phases of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of the parts of a run, measured or guessed. Tokens are those of completions."""

    replica_tokens_per_s: float
    """Tokens per second of a replica with as many sequences as it takes."""
    sequence_tokens_per_s: float
    """Tokens per second of a sequence that has a replica for itself."""
    update_tokens_per_s: float
    """Tokens per second that the engine learns from, all ranks together."""
    mean_tokens: float
    """Mean tokens of a completion, before the cut at `rollout.max_new_tokens`."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of a completion's length; 0: all have `mean_tokens`."""
    lengths: tuple[int, ...] = ()
    """Completion lengths of a run to draw from, instead of the distribution."""
    sync_s: float = 0.0
    """Seconds that weights take to the servers; nothing is generated meanwhile."""
    reward_s: float = 0.0
    """Seconds from a group's last token to its rewards; groups do not wait for each other."""
    no_signal: float = 0.0
    """Share of groups whose rewards are all alike, which `batch.dynamic_sampling` replaces."""
    overlap: float = 1.0
    """Speed of the engine, and of the servers, while both are at work, over that of either alone; below 1 where they
    share processors, a device or its memory."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value, is_rate = getattr(self, each.name), each.default is MISSING
            if each.name != "lengths" and (value < 0 or (is_rate and value == 0)):
                raise ConfigError(f"{each.name}={value:g} must be {'above 0' if is_rate else '0 or more'}")
        if not 0 < self.overlap <= 1:
            raise ConfigError(f"overlap={self.overlap:g} is a share of a speed; give one above 0 and up to 1")
        if self.no_signal >= 1:
            raise ConfigError(f"no_signal={self.no_signal:g} leaves no group to learn from; give a share below 1")
        if self.sequence_tokens_per_s > self.replica_tokens_per_s:
            raise ConfigError(
                f"sequence_tokens_per_s={self.sequence_tokens_per_s:g} is more than a whole replica's "
                f"replica_tokens_per_s={self.replica_tokens_per_s:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Forecast of a simulated run: means over its steps, without the first and last ones."""

    step_s: float
    """Seconds of a step, without evaluation and checkpoints."""
    tokens_per_s: float
    """Completion tokens learned from."""
    generation_use: float
    """Tokens generated, of those that the replicas could have; 0 to 1."""
    engine_use: float
    """Share of the time in which the engine scores or learns."""
    staleness_mean: float
    """Age of a sample's oldest token, in weight versions."""
    staleness_max: float
    late_groups: float
    """Groups a step that were thrown away as too old."""
    seconds: Mapping[str, float]
    """Seconds of a step by what they are spent on: `learning`, `generation` (the engine waits, as much as the servers
    are in use), `stragglers` (it waits, as much as they are not), `weight sync`."""

    @property
    def bottleneck(self) -> str:
        """Phase that takes most of a step's time."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    def lines(self) -> Iterator[tuple[str, str]]:
        """Lines for the screen: (name, value)."""
        spent = ", ".join(f"{name} {seconds:.3g}" for name, seconds in self.seconds.items())
        yield "simulated step", f"{self.step_s:.3g} s ({spent}), {self.tokens_per_s:,.0f} tokens/s"
        yield "utilisation", f"servers {self.generation_use:.0%}, engine {self.engine_use:.0%}"
        late = f"; {self.late_groups:.2g} groups a step too late" if self.late_groups else ""
        yield "staleness", f"mean {self.staleness_mean:.2f}, at most {self.staleness_max:.0f} weight versions{late}"
        yield "bottleneck", f"{self.bottleneck}: {_ADVICE[self.bottleneck]}"


_ADVICE = {
    "learning": "more engine ranks, or fewer passes",
    "generation": "more rollout replicas",
    "stragglers": "pipeline=fully_async, batch.stream, batch.over_sampling or a lower rollout.max_new_tokens",
    "weight sync": "a faster transport, or more to learn from in a step",
}


def simulate(config: Config, rates: Rates, *, seed: int = 0) -> Forecast:
    """Run the training loop on a computed clock.

    Raises:
        ConfigError: the configuration has what is not simulated.
    """
    if config.batch.replay is not None:
        raise ConfigError("batch.replay is not simulated; leave it out of the simulated run")
    config = replace(config, steps=_STEPS + 2 * _EDGE, eval_every=0)
    servers = _Servers(config, rates, seed)
    engine = _Engine(servers, rates)
    components = _components(config, servers, engine)
    ends: list[tuple[float, float, dict[str, float]]] = []
    records: list[StepRecord] = []
    for record in run_loop(components, config, []):
        ends.append((servers.now, servers.num_tokens, dict(engine.spent)))
        records.append(record)
    (start, made, before), (end, made_in_all, after) = ends[_EDGE], ends[_EDGE + _STEPS]
    count, wall = _STEPS, end - start
    seconds = {name: (after[name] - before[name]) / count for name in after}
    measured = records[_EDGE + 1 : _EDGE + _STEPS + 1]
    return Forecast(
        step_s=wall / count,
        tokens_per_s=sum(record.num_tokens for record in measured) / wall,
        generation_use=(made_in_all - made) / (wall * servers.full_rate),
        engine_use=seconds["learning"] * count / wall,
        staleness_mean=fmean(record.metrics["staleness_mean"] for record in measured),
        staleness_max=max(record.metrics["staleness_max"] for record in measured),
        late_groups=fmean(record.metrics["late_groups"] for record in measured),
        seconds=seconds,
    )


def _components(config: Config, servers: _Servers, engine: _Engine) -> Components:
    fake: Any = engine
    num_rows = 2**31  # never the same twice: which prompt it is does not matter
    source = RolloutSource(
        cast("Any", servers),
        cast("Any", _NoRows()),
        _InOrder(num_rows=num_rows, seed=0),
        cast("Any", servers.queue),
        config,
        create_schedule(config).policy,
        poll_s=1e-9,
    )
    source.sleep = servers.wait
    source.evaluate = lambda rows: Evaluation(reward=0.0, accuracy=None)  # type: ignore[method-assign]
    has_teacher = config.teacher is not None and config.teacher.url is None
    return Components(
        actor=fake,
        reference=fake if config.algorithm.kl_coef > 0 else None,
        teacher=fake if has_teacher else None,
        critic=fake if config.critic is not None else None,
        source=source,
        weights=fake,
        queue=cast("Any", servers.queue),
        agents=cast("Any", servers),
        eval_rows=[],
    )


class _NoRows:
    """Rows that are not read."""

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"row": index}


class _InOrder(PromptOrder):
    """Sampler that draws prompts in order."""

    def at(self, position: int) -> int:
        return position


@dataclass(slots=True)
class _Replica:
    """Simulated replica: its rate is shared by the sequences that it runs."""

    work: float = 0.0
    """Tokens that a sequence has which runs from the beginning."""
    at: float = 0.0
    """When `work` was that."""
    running: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (`work` at the end, group)."""
    waiting: deque[tuple[float, int]] = field(default_factory=deque)
    """(Tokens, group) of sequences that wait for a place."""
    turn: int = 0
    """Changes with the number that run: what was foreseen before it does not happen."""


class _Queue:
    """Simulated queue: outstanding groups under a staleness policy. `wait` lets time pass until a group ends."""

    def __init__(self, wait: Callable[[float], None]) -> None:
        self._wait, self._num_rows = wait, 0
        self._index: Any = None
        """Outstanding groups, by `configure`."""
        self._in_flight: dict[int, int] = {}

    def configure(self, partition: str, *, staleness: StalenessPolicy, tasks: tuple[str, ...]) -> None:
        """Follow a policy."""
        del partition, tasks
        self._index = staleness.make_index(tuple)
        self._index.in_flight = self._in_flight

    def admit(self, *, partition: str, num_rows: int, group_id: int, timeout_s: float) -> Credit:
        """Admit a group, at once or not at all."""
        del timeout_s
        if not self._index.has_room:
            raise WaitTimeoutError("the policy admits no more groups")
        version = self._in_flight[group_id] = self._index.version
        sizes = {"num_rows": num_rows, "num_bytes": 0, "weight_version": version}
        return Credit(number=group_id, partition=partition, group_id=group_id, **sizes)

    def release(self, credit: Credit) -> None:
        """End a credit."""
        self._in_flight.pop(credit.group_id, None)

    def advance(self, partition: str, weight_version: int) -> AdvanceReport:
        """Set the weight version, and give up what is too old."""
        del partition
        self._index.version = weight_version
        groups = self._index.expired()
        self._index.discard(self._index.rows_of(groups))
        for group in groups:
            self._in_flight.pop(group, None)
        return AdvanceReport(num_cleared=0, groups=tuple(groups))

    def put(self, tags: list[dict[str, Any]]) -> GroupReport:
        """Put a group under its credit."""
        group, oldest = GradedGroup.of(tags), tags[0]["weight_version_min"]
        admitted = self._in_flight.get(group.group_id)
        if admitted is None:  # it was given up meanwhile
            return GroupReport()
        if self._index.is_late(Span(admitted=admitted, oldest=oldest), group.group_id):
            return GroupReport(late=(group.group_id,))
        del self._in_flight[group.group_id]
        for each in tags:
            self._num_rows += 1
            row = {"number": self._num_rows, "group": group.group_id, "version": oldest}
            self._index.add(SimpleNamespace(**row, tags={**each, ADMITTED: admitted}))
        return GroupReport(finished=(group,))

    def get_meta(self, *, batch_size: int, timeout_s: float, **_: Any) -> BatchMeta:
        """Rows of the groups that the policy chooses; unless `timeout_s` is 0 time passes until another group ends."""
        rows = dict(self._index.members)
        taken = self._index.take(batch_size)
        if taken is None:
            self._wait(timeout_s)
            raise WaitTimeoutError("too few groups are complete")
        ids, tags = tuple(map(str, taken)), tuple(rows[number].tags for number in taken)
        return BatchMeta(partition=PARTITION, sample_ids=ids, columns=("group_id",), tags=tags)

    def ack(self, rows: BatchMeta, *, step: int) -> None:
        """Nothing is stored."""

    def clear(self, rows: BatchMeta) -> None:
        """Nothing is stored."""


class _Servers:
    """Simulated replicas and agent workers, on a computed clock, with their queue."""

    def __init__(self, config: Config, rates: Rates, seed: int) -> None:
        self._config, self._rates, self._draw = config, rates, random.Random(seed)
        self._num_slots = config.rollout.max_num_seqs
        self._replicas = [_Replica() for _ in range(config.rollout.num_replicas)]
        self.full_rate = rates.replica_tokens_per_s * config.rollout.num_replicas
        self.now, self.version, self.num_tokens, self._pace = 0.0, 0, 0.0, 1.0
        self._events: list[tuple[float, int, int]] = []
        """Heap of (when, replica, its turn): one of its sequences ends; or (when, _REWARDS, group)."""
        self._reports: list[GroupReport] = []
        self.is_held = False
        self._is_kept = group_filter(config.batch)
        self.queue = _Queue(self.wait)
        self._groups: dict[int, tuple[list[float], int | None, int]] = {}
        """By id: tokens of its completions, the version of its oldest one, completions that are not finished."""

    # as agent workers

    def submit(self, jobs: list[Job], sampling_params: dict[str, Any], partition: str, group_size: int) -> None:
        del sampling_params, partition
        load = [(len(each.running) + len(each.waiting), index) for index, each in enumerate(self._replicas)]
        heapq.heapify(load)
        for job in jobs:
            tokens = [self._length() for _ in range(group_size)]
            self._groups[job.group_id] = (tokens, None, group_size)
            for count in tokens:
                busy, index = load[0]
                self._replicas[index].waiting.append((count, job.group_id))
                heapq.heapreplace(load, (busy + 1, index))
        for index in range(len(self._replicas)):
            self._fill(index)

    def poll(self) -> list[GroupReport]:
        reports, self._reports = self._reports, []
        return reports

    def finish(self, group: int) -> None:
        """Nothing dies here."""

    def hold(self) -> None:
        """Stop generating: `advance` lets no sequence progress until `release`."""
        self.is_held = True

    def release(self) -> None:
        """Continue generating."""
        self.is_held = False

    def wait(self, seconds: float) -> None:
        """Let time pass until a group ends, if it may pass at all."""
        count = len(self._reports)
        while seconds and len(self._reports) == count:
            self._pass_event()

    def _tags(self, group: int) -> list[dict[str, Any]]:
        tokens, oldest, _ = self._groups.pop(group)
        is_alike = self._draw.random() < self._rates.no_signal
        return [
            {
                "group_id": group,
                "attempt": 0,
                "reward": 0.0 if is_alike else float(index % 2),
                "num_tokens": int(count),
                "finish_reason": "length" if count == self._config.rollout.max_new_tokens else "stop",
                "weight_version_min": oldest,
                "weight_version_max": self.version,
                "columns": ("group_id",),
            }
            for index, count in enumerate(tokens)
        ]

    # the clock

    def advance(self, seconds: float) -> None:
        """Let the engine do what takes it `seconds` alone, with whatever is generated meanwhile."""
        if self.is_held:
            self.pause(seconds)
            return
        self._set_pace(self._rates.overlap)
        while True:
            pace = self._pace if any(replica.running for replica in self._replicas) else 1.0
            end, before = self.now + seconds / pace, self.now
            if not self._events or self._events[0][0] > end:
                break
            self._pass_event()
            seconds -= (self.now - before) * pace
        self.now = end
        for replica in self._replicas:
            self._progress(replica)
        self._set_pace(1.0)

    def _set_pace(self, pace: float) -> None:
        """Have the servers generate at a share of their speed from now on."""
        if pace != self._pace:
            for replica in self._replicas:
                self._progress(replica)
            self._pace = pace
            for index in range(len(self._replicas)):
                self._fill(index)

    def pause(self, seconds: float) -> None:
        """Let time pass in which nothing is generated."""
        for replica in self._replicas:
            self._progress(replica)
            replica.at += seconds
        self.now += seconds
        self._events = [(when + seconds * (index != _REWARDS), index, turn) for when, index, turn in self._events]
        heapq.heapify(self._events)

    def wait_use(self) -> float:
        """Seconds of full use so far: tokens generated over the rate of all replicas."""
        for replica in self._replicas:
            self._progress(replica)
        return self.num_tokens / self.full_rate

    def _pass_event(self) -> None:
        if not self._events:
            raise ConfigError("nothing is generated and more is waited for: the schedule's policy releases too little")
        when, index, turn = heapq.heappop(self._events)
        if index == _REWARDS:
            self.now = max(self.now, when)
            tags = self._tags(turn)
            is_kept = self._is_kept(tags)
            self._reports.append(self.queue.put(tags) if is_kept else GroupReport(dropped=(GradedGroup.of(tags),)))
            return
        replica = self._replicas[index]
        if turn != replica.turn:
            return
        self.now = max(self.now, when)
        self._progress(replica)
        end, group = heapq.heappop(replica.running)
        replica.work = max(replica.work, end)
        tokens, oldest, left = self._groups[group]
        self._groups[group] = (tokens, oldest, left - 1)
        if left == 1:
            heapq.heappush(self._events, (self.now + self._rates.reward_s, _REWARDS, group))
        self._fill(index)

    def _fill(self, index: int) -> None:
        """Start what waits, as far as there are places, and foresee the replica's next end."""
        replica = self._replicas[index]
        self._progress(replica)
        while replica.waiting and len(replica.running) < self._num_slots:
            tokens, group = replica.waiting.popleft()
            heapq.heappush(replica.running, (replica.work + tokens, group))
            lengths, oldest, left = self._groups[group]
            self._groups[group] = (lengths, self.version if oldest is None else oldest, left)
        replica.turn += 1
        if replica.running:
            seconds = (replica.running[0][0] - replica.work) / self._speed(replica)
            heapq.heappush(self._events, (self.now + seconds, index, replica.turn))

    def _speed(self, replica: _Replica) -> float:
        shared = self._rates.replica_tokens_per_s / len(replica.running)
        return self._pace * min(self._rates.sequence_tokens_per_s, shared)

    def _progress(self, replica: _Replica) -> None:
        if replica.running and self.now > replica.at:
            tokens = (self.now - replica.at) * self._speed(replica)
            replica.work += tokens
            self.num_tokens += tokens * len(replica.running)
        replica.at = max(replica.at, self.now)

    def _length(self) -> float:
        rates = self._rates
        if rates.lengths:
            return float(self._draw.choice(rates.lengths))
        mu = math.log(rates.mean_tokens) - rates.sigma**2 / 2
        return float(
            min(max(1, round(self._draw.lognormvariate(mu, rates.sigma))), self._config.rollout.max_new_tokens)
        )


class _Engine:
    """Engine and weight sync that let time pass; the waits between their calls are generation."""

    def __init__(self, servers: _Servers, rates: Rates) -> None:
        self._servers, self._rates = servers, rates
        self.spent = {"learning": 0.0, "generation": 0.0, "stragglers": 0.0, "weight sync": 0.0}
        self._since, self._use = 0.0, 0.0

    def compute_log_prob(self, batch: BatchMeta, column: str = "old_logprobs") -> BatchMeta:
        self._learn(batch, _FORWARD)
        return BatchMeta(partition=batch.partition, sample_ids=batch.sample_ids, columns=(column,))

    def compute_teacher_log_prob(self, batch: BatchMeta) -> BatchMeta:
        return self.compute_log_prob(batch, "teacher_logprobs")

    def compute_values(self, batch: BatchMeta) -> BatchMeta:
        return self.compute_log_prob(batch, "values")

    def compute_stage(self, batch: BatchMeta, name: str) -> BatchMeta:
        del name
        return BatchMeta(partition=batch.partition, sample_ids=batch.sample_ids, columns=())

    def compute_advantage(self, batch: BatchMeta, kl_coef: float = 0.0, seed: int = 0) -> AdvantageReport:
        del kl_coef, seed
        self._waited()
        return AdvantageReport(
            batch=BatchMeta(partition=batch.partition, sample_ids=batch.sample_ids, columns=("advantages",))
        )

    compute_whole_advantage = compute_advantage

    def update_actor(self, batch: BatchMeta) -> UpdateReport:
        self._learn(batch, 1.0)
        return UpdateReport(metrics={}, grad_norm=0.0, lr=0.0)

    update_critic = update_actor

    def yield_memory(self) -> None:
        """Do nothing: its time is part of `sync_s`."""

    def sync(self, version: int) -> SyncReport:
        self._waited()
        self._servers.pause(self._rates.sync_s)
        self._servers.version = version
        self._spend("weight sync", self._rates.sync_s)
        return SyncReport(
            version=version, num_tensors=0, num_bytes=0, export_s=0.0, pack_s=0.0, wire_s=0.0, verify_s=0.0, wall_s=0.0
        )

    def _learn(self, batch: BatchMeta, share: float) -> None:
        self._waited()
        seconds = share * sum(tag["num_tokens"] for tag in batch.tags) / self._rates.update_tokens_per_s
        before = self._servers.now
        self._servers.advance(seconds)
        self._spend("learning", self._servers.now - before)

    def _waited(self) -> None:
        """Attribute the time since the last call: the loop waited for the source in it."""
        seconds, used = self._servers.now - self._since, self._servers.wait_use() - self._use
        self.spent["generation"] += min(used, seconds)
        self._spend("stragglers", max(seconds - used, 0.0))

    def _spend(self, name: str, seconds: float) -> None:
        self.spent[name] += seconds
        self._since, self._use = self._servers.now, self._servers.wait_use()


INPUTS = ("cluster", "run", "saturation", *(each.name for each in fields(Rates) if each.name != "lengths"))
"""Inputs of `--simulate` in addition to configuration keys."""


def forecast(config: Config, given: Mapping[str, str]) -> list[tuple[str, str]]:
    """Forecast for `--simulate`, from texts for `INPUTS`, as lines for the screen.

    Raises:
        ConfigError: a value that cannot be used, a rate that is missing, or roles that have no place in `cluster`.
    """
    rates = {name: text for name, text in given.items() if name != "cluster"}
    lines: list[tuple[str, str]] = []
    if "cluster" in given:
        config, lines = _placed(config, given["cluster"])
    return [*lines, *simulate(config, read_rates(rates)).lines()]


def _placed(config: Config, cluster: str) -> tuple[Config, list[tuple[str, str]]]:
    """Settle colocation for a cluster of NODESxGPUS or NODESxGPUSxGIB.

    And who has how many GPUs, and how much of each; with GIB, of a GPU's memory, what does not fit is refused.
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", cluster)
    if found is None:
        raise ConfigError(f"cluster={cluster} is not of the form NODESxGPUS, such as 8x8, or NODESxGPUSxGIB")
    there, apart = int(found[1]) * int(found[2]), gpu_pools(config, colocated=False)
    if config.rollout.colocated is None:
        is_shared = there < sum(apart.values()) and why_apart(config, there) is None
        config = replace(config, rollout=replace(config.rollout, colocated=is_shared))
    taken, names = sum(gpu_pools(config).values()), named(apart)
    if taken > there:
        raise ConfigError(f"cluster={cluster} has {there} GPUs, and the run asks for {taken} ({names})")
    how = "in turn" if config.rollout.colocated else "each its own"
    line = ("GPUs", f"{there} for {names}: {how}; {there - taken} idle")
    per_replica, per_node = config.rollout.parallel.num_ranks, int(found[2])
    if per_replica > per_node:
        raise ConfigError(
            f"a replica of rollout.parallel takes {per_replica} GPUs of one node, and a node of cluster={cluster} has "
            f"{per_node}; make rollout.parallel smaller"
        )
    if config.rollout.colocated and per_node % per_replica and taken > per_node:
        raise ConfigError(
            f"colocated replicas of {per_replica} GPUs do not divide the {per_node} GPUs of a node of cluster={cluster}"
            ", so that one would be on two nodes; choose rollout.parallel by which they do"
        )
    memory = memory_of_pools(config)
    placed = [*placement_facts(config, memory, gpus=there)]
    placed += node_facts(config, memory, num_nodes=int(found[1]), gpus_per_node=per_node)
    return config, [line, *placed, *memory_facts(config, None if found[3] is None else float(found[3]))]


def read_rates(given: Mapping[str, str]) -> Rates:
    """Rates of `NAME=VALUE` texts; with `run=OUTPUT_DIR` those that are not given are taken from that run.

    Of a run: the lengths of the completions that it kept, or else their mean; what an update learns from in a second;
    how long a sync takes. And where it was one with `pipeline=sync`, its servers' rate: the one with which generation,
    simulated, lasts as long as it did. Given one number, that of a single sequence is taken to be
    1 / `saturation` (8) of a replica's.

    Raises:
        ConfigError: a value that is no number, or a rate that is missing.
    """
    values: dict[str, Any] = {}
    for name, text in given.items():
        try:
            values[name] = text if name == "run" else float(text)
        except ValueError:
            raise ConfigError(f"{name}={text} is not a number") from None
    run, saturation = values.pop("run", None), values.pop("saturation", 8.0)
    if run is not None:
        values = _measured(Path(run), values, saturation) | values
    missing = [each.name for each in fields(Rates) if each.default is MISSING and each.name not in values]
    if missing:
        raise ConfigError(
            f"--simulate needs {', '.join(missing)}; give them, or run=OUTPUT_DIR of a run to take them of"
        )
    return Rates(**values)


def _measured(run: Path, given: Mapping[str, float], saturation: float) -> dict[str, Any]:
    """Rates measured by a finished run."""
    if not (run / "config.yaml").is_file() or not (run / "metrics.jsonl").is_file():
        raise ConfigError(f"run={run} is not an output folder of a run: it has no config.yaml or no metrics.jsonl")
    config = load_config(str(run / "config.yaml"))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["num_tokens"]][1:]  # the first one warms up
    if not steps:
        raise ConfigError(f"run={run} has fewer than two training steps")
    tokens = fmean(step["num_tokens"] for step in steps)
    found: dict[str, Any] = {"mean_tokens": tokens / (config.batch.batch_size * config.batch.group_size)}
    found["sync_s"] = fmean(step["phase_s"]["weight_sync"] for step in steps)
    passes = sum(name in steps[0]["phase_s"] for name in _FORWARDS) * _FORWARD
    passes += sum(name in steps[0]["phase_s"] for name in _UPDATES)
    seconds = fmean(sum(step["phase_s"].get(name, 0.0) for name in (*_FORWARDS, *_UPDATES)) for step in steps)
    found["update_tokens_per_s"] = tokens * passes / seconds
    if steps_of(run):
        rows = read_samples(run, columns=["completion_token_ids"])
        found["lengths"] = tuple(len(row) for row in rows["completion_token_ids"].to_pylist())
    if config.pipeline == "sync" and "replica_tokens_per_s" not in given:
        others: dict[str, Any] = {name: given[name] for name in ("sigma", "reward_s", "no_signal") if name in given}
        rates = Rates(replica_tokens_per_s=1.0, sequence_tokens_per_s=1.0, **(found | others))
        low, high = 1.0, 1e9
        wanted = fmean(step["phase_s"]["generate"] for step in steps)
        for _ in range(40):
            middle = math.sqrt(low * high)
            tried = simulate(
                config, replace(rates, replica_tokens_per_s=middle, sequence_tokens_per_s=middle / saturation)
            )
            is_slow = tried.seconds["generation"] + tried.seconds["stragglers"] > wanted
            low, high = (middle, high) if is_slow else (low, middle)
        found |= {"replica_tokens_per_s": low, "sequence_tokens_per_s": low / saturation}
    return found


def node_facts(
    config: Config, memory: Mapping[str, Mapping[str, float]], *, num_nodes: int, gpus_per_node: int
) -> list[tuple[str, str]]:
    """(node, who lives on which of its GPUs), with nodes that are alike in one line.

    Pools are packed in their order, each process on the first node that has room for its GPUs. Ray packs too, and may
    choose other nodes.

    Raises:
        PlanError: no node has room for a process.
    """
    used, busy = [0] * num_nodes, [list[str]() for _ in range(num_nodes)]
    for pool in pools_of(config):
        known, placed = memory.get(pool.name, {}), dict[int, int]()
        num_gpus = round(pool.num_gpus)
        for _ in range(pool.num_workers if num_gpus else 0):
            node = next((n for n in range(num_nodes) if used[n] + num_gpus <= gpus_per_node), None)
            if node is None:
                raise PlanError(
                    f"no node has {num_gpus} GPUs left for a process of pool {pool.name!r}: "
                    f"{', '.join(map(str, used))} of {gpus_per_node} are taken on {num_nodes} nodes; take more nodes, "
                    "or sizes that fill them"
                )
            used[node] += num_gpus
            placed[node] = placed.get(node, 0) + num_gpus
        roles = ", ".join(f"{role} {known[role]:.1f} GiB" if role in known else role for role in pool.roles)
        for node, count in placed.items():
            gpus = f"GPU {used[node] - 1}" if count == 1 else f"GPUs {used[node] - count}-{used[node] - 1}"
            busy[node].append(f"{gpus}: {roles}")
    lines = ["; ".join(each) or "idle" for each in busy]
    alike = [list(group) for _, group in groupby(range(num_nodes), key=lines.__getitem__)]
    return [
        (f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {nodes[0]}-{nodes[-1]}", lines[nodes[0]]) for nodes in alike
    ]
