"""Fakes of a run for tests and benchmarks."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import rl_tq.registry
from rl_ckpt.types import SyncReport
from rl_engine.types import digest_files, write_manifest
from rl_tq.errors import QueueFullError, StaleVersionError
from rl_tq.types import BatchMeta
from rl_trainer.checkpoints import RunState
from rl_trainer.data import PromptOrder
from rl_trainer.metrics import Evaluation, HeldGroup
from rl_trainer.pipeline.components import Components
from rl_trainer.pipeline.rollout_source import Generated, RolloutSource
from rl_trainer.pipeline.staleness import create_schedule
from rl_trainer.workers.agent import EvalReport, GroupReport
from rl_trainer.workers.engine_worker import AdvantageReport, UpdateReport
from rl_trainer.workers.grading import GradedGroup, group_filter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_tq.base import TransferQueue
    from rl_trainer.config import Config
    from rl_trainer.data import Row
    from rl_trainer.pipeline.replay_buffer import Replay
    from rl_trainer.workers.agent import Job


class FakeJob:
    """Fake of every component: answers at once with references of the right size, and records the calls.

    Args:
        config: Sizes of the batches.
        accuracy: Accuracy and reward that every evaluation gives.
        lag: Weight versions that the generated tokens are behind; 0 is on-policy.
    """

    def __init__(self, config: Config, *, accuracy: float = 0.5, lag: int = 0) -> None:
        self._config, self._accuracy, self._lag = config, accuracy, lag
        self._version = 0
        self.position, self.num_too_long = 0, 0
        self.pending: tuple[int, ...] = ()
        self.held: tuple[HeldGroup, ...] = ()
        self.calls: list[str] = []

    def components(self) -> Components:
        """Components of which each is this fake."""
        fake = cast("Any", self)
        reference = fake if self._config.algorithm.kl_coef > 0 else None
        return Components(
            actor=fake, reference=reference, source=fake, weights=fake, queue=fake, agents=fake, eval_rows=[]
        )

    def resume(self, groups: Sequence[HeldGroup]) -> None:
        """Nothing is held."""
        assert not groups, "a fake holds none"

    def release(self, version: int) -> None:
        """Nothing is made before it is asked for."""

    def collect(self) -> None:
        """Nothing comes by itself."""

    def settle(self) -> None:
        """Nothing is under way."""

    def finish(self, generated: Generated, step: int) -> None:
        """Forget nothing."""
        del step
        self.calls.append(f"clear {len(generated.batch)}")

    def take(self, step: int, num_groups: int | None = None) -> Generated:
        """A batch of references."""
        assert num_groups is None, "the fake has whole batches"
        self.calls.append(f"generate {step}")
        version = self._version - self._lag
        num_groups, group_size = self._config.batch.batch_size, self._config.batch.group_size
        common = {
            "weight_version_min": version,
            "weight_version_max": version,
            "finish_reason": "stop",
            "num_tokens": 4,
        }
        batch = BatchMeta(
            partition="train",
            sample_ids=tuple(f"{step}-{i}" for i in range(num_groups * group_size)),
            columns=("prompt_token_ids", "completion_token_ids"),
            tags=tuple(
                {**common, "attempt": 0, "group_id": i // group_size, "reward": float(i % 2)}
                for i in range(num_groups * group_size)
            ),
        )
        groups = tuple(
            HeldGroup(group_id=i, row_index=self.position + i, place=i, released=version) for i in range(num_groups)
        )
        self.position += num_groups
        return Generated(batch=batch, groups=groups, reward=0.5, failures={}, dropped_groups=0)

    @property
    def progress(self) -> tuple[int, int]:
        """No groups."""
        return 0, 0

    def evaluate(self, rows: Sequence[Row]) -> Evaluation:
        """The accuracy that was asked for."""
        self.calls.append(f"evaluate {len(rows)}")
        return Evaluation(reward=self._accuracy, accuracy=self._accuracy)

    def compute_log_prob(self, batch: BatchMeta, column: str = "old_logprobs") -> BatchMeta:
        """The batch with one more column."""
        self.calls.append(column)
        return BatchMeta(partition=batch.partition, sample_ids=batch.sample_ids, columns=(column,))

    def compute_advantage(self, batch: BatchMeta, kl_coef: float = 0.0, seed: int = 0) -> AdvantageReport:
        """The batch with one more column."""
        self.calls.append("advantage")
        batch = BatchMeta(partition=batch.partition, sample_ids=batch.sample_ids, columns=("advantages",))
        return AdvantageReport(batch=batch)

    def update_actor(self, batch: BatchMeta) -> UpdateReport:
        """An update that changed nothing."""
        self.calls.append(f"update {len(batch)}")
        return UpdateReport(metrics={"policy_loss": 0.0, "kl": 0.0}, grad_norm=1.0, lr=1e-3)

    def yield_memory(self) -> None:
        """Nothing is shared."""

    def sync(self, version: int) -> SyncReport:
        """A sync of nothing."""
        self.calls.append(f"sync {version}")
        self._version = version
        return SyncReport(
            version=version, num_tensors=0, num_bytes=0, export_s=0.0, pack_s=0.0, wire_s=0.0, verify_s=0.0, wall_s=0.0
        )


class FakeAgents:
    """Fake agent workers: groups finish in a seeded random order, some at every poll, with real rows in the queue.

    Args:
        config: Sizes of the batches.
        queue: Gets the rows; None: one of its own, in this process.
        seed: Seed of the order in which groups finish.
        per_poll: Groups that finish at every poll.
        fails: Ids of groups that fail.
        slow: Ids of groups that finish only when no other group is left.
    """

    def __init__(
        self,
        config: Config,
        queue: TransferQueue | None = None,
        *,
        seed: int = 0,
        per_poll: int = 1,
        fails: Sequence[int] = (),
        slow: Sequence[int] = (),
    ) -> None:
        self.queue = rl_tq.registry.serve("inproc://") if queue is None else queue
        self._config, self._draw = config, random.Random(seed)
        self._per_poll, self._fails, self._slow = per_poll, set(fails), set(slow)
        self._running: dict[int, tuple[Job, int]] = {}
        self._is_kept = group_filter(config.batch)
        self.version, self.is_held = 0, False
        self.submitted: list[tuple[Job, int]] = []

    def submit(self, jobs: list[Job], sampling_params: dict[str, Any], partition: str, group_size: int) -> None:
        """Submit groups, whose first tokens are of the current version."""
        del partition, group_size
        for job in jobs:
            self.submitted.append((job, sampling_params["seed"]))
            self._running[job.group_id] = (job, self.version)

    def finish(self, group: int) -> None:
        """Nothing dies here."""

    def poll(self) -> list[GroupReport]:
        """Finish some groups and put those that are kept into the queue."""
        if self.is_held:
            return []
        quick = [group for group in self._running if group not in self._slow]
        done = self._draw.sample(sorted(quick or self._running), min(self._per_poll, len(quick or self._running)))
        ended = {group: self._running.pop(group) for group in done}
        reports = [self.put(*job_and_version) for group, job_and_version in ended.items() if group not in self._fails]
        if failed := tuple(group for group in done if group in self._fails):
            why = "the tool broke"
            reports.append(GroupReport(failed=failed, failures={"tool": len(failed)}, last_failure=why))
        return reports

    def rewards_of(self, group: int) -> list[float]:
        """Rewards of a group, one per completion."""
        del group
        return [float(rollout % 2) for rollout in range(self._config.batch.group_size)]

    def put(self, job: Job, version: int) -> GroupReport:
        """Put the rows of a job's group whose oldest token is of weight version `version`, as an agent worker does."""
        names = ("prompt_token_ids", "completion_token_ids", "loss_mask", "rewards", "rollout_logprobs", "group_id")
        tags = [
            {
                "group_id": job.group_id,
                "attempt": 0,
                "reward": reward,
                "num_tokens": 4,
                "finish_reason": "stop",
                "weight_version_min": version,
                "weight_version_max": self.version,
                **({"columns": names} if rollout == 0 else {}),
            }
            for rollout, reward in enumerate(self.rewards_of(job.group_id))
        ]
        graded = GradedGroup.of(tags)
        if not self._is_kept(tags):
            return GroupReport(dropped=(graded,))
        columns: dict[str, Any] = dict.fromkeys(names, [[1, 2]] * len(tags))
        columns["group_id"] = [tag["group_id"] for tag in tags]
        try:
            self.queue.put(columns, partition="train", tags=tags, credit=job.credit)
        except StaleVersionError:
            return GroupReport(late=(job.group_id,))
        except QueueFullError:  # it was given up meanwhile
            return GroupReport()
        return GroupReport(finished=(graded,))

    def hold(self) -> None:
        """Stop: no group finishes until `release`."""
        self.is_held = True

    def release(self) -> None:
        """Continue."""
        self.is_held = False

    def evaluate(self, jobs: Sequence[Job], sampling_params: dict[str, Any]) -> list[EvalReport]:
        """Report that every completion is right."""
        del sampling_params
        return [EvalReport(rewards=(1.0,) * len(jobs), num_right=len(jobs), num_failed=0)]


class QueueJob(FakeJob):
    """Fake run with a real queue: a real source over fake agents, a fake engine, checkpoints with real digests.

    Args:
        config: Configuration of the run.
        agents: Fake agents, with their queue; that of `state` where the job goes on.
        state: Where the job begins.
        num_rows: Prompts of one epoch.
        replay: Groups that may be learned from again.
        poll_s: See `RolloutSource`.
    """

    def __init__(
        self,
        config: Config,
        agents: FakeAgents,
        state: RunState | None = None,
        *,
        num_rows: int = 1000,
        replay: Replay | None = None,
        poll_s: float = 0.0,
    ) -> None:
        super().__init__(config)
        state = RunState(seed=0, num_rows=num_rows) if state is None else state
        self.agents = agents
        order = PromptOrder(num_rows=num_rows, seed=0, position=state.position, returned=list(state.pending))
        self.held = state.held
        self.source = RolloutSource(
            cast("Any", agents),
            cast("Any", [{"row": row} for row in range(num_rows)]),
            order,
            agents.queue,
            config,
            create_schedule(config).policy,
            replay=replay,
            first_step=state.step + 1,
            num_groups=max((group.group_id for group in self.held), default=0),
            poll_s=poll_s,
        )

    def components(self) -> Components:
        """Components: the real source and queue, the rest fake."""
        real: dict[str, Any] = {"agents": self.agents, "source": self.source, "queue": self.agents.queue}
        return replace(super().components(), held=self.held, **real)

    def sync(self, version: int) -> SyncReport:
        """Sync nothing but the version number, to the fake agents."""
        self.agents.version = version
        return super().sync(version)

    def save_checkpoint(self, path: str, step: int) -> float:
        """A folder with one file and its digest."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "step").write_text(str(step))
        write_manifest(folder / "manifest.json", {"step": step}, digest_files(folder, ["step"]))
        return 0.0

    def save_model(self, path: str) -> None:
        """A folder with one file."""
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "config.json").write_text("{}")
