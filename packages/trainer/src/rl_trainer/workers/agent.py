"""Runs agent loops against the rollout servers, scores what they made, and puts it into the queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

import rl_agent
import rl_rollout
import rl_tq
from rl_agent.types import AgentLoopOutput, Failure, FailureKind
from rl_trainer.base import Dispatch, WorkerContext, register
from rl_trainer.rewards import Scorer
from rl_trainer.workers._loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_agent.types import Message
    from rl_rollout.types import ServerAddress
    from rl_tq.types import BatchMeta
    from rl_trainer.config import AgentSection
    from rl_trainer.data import Row

Sample = tuple[AgentLoopOutput, float]
"""A trajectory and its reward."""
Group = tuple[int, list[Sample]]
"""A group's id, and its samples in the order of its rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to roll out as a group."""

    row: Row
    """The dataset row."""
    group_id: int
    """Unique in the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReport:
    """What one worker made of its jobs."""

    batch: BatchMeta | None
    """The complete groups, in the queue; None if there is none."""
    complete_groups: tuple[int, ...]
    """Ids of the groups in `batch`."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Failed rollouts per kind. Their groups are not in `batch`."""
    last_failure: str = ""
    """One failure's sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Scores of held-out rows."""

    rewards: tuple[float, ...]
    """One per completion that ended well."""
    num_failed: int
    """Completions that did not."""


class _GroupWriter:
    """Writes groups as they finish: one call at a time, with all that became ready during the last one."""

    def __init__(self, put: Callable[[list[Group]], BatchMeta]) -> None:
        self._put = put
        self._ready: list[Group] = []
        self._written: list[BatchMeta] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, group_id: int, samples: list[Sample]) -> None:
        self._ready.append((group_id, samples))
        if self._task is not None and self._task.done():
            self._task.result()  # raises what the last call raised
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while self._ready:
            groups, self._ready = self._ready, []
            self._written.append(await asyncio.to_thread(self._put, groups))

    async def finish(self) -> list[BatchMeta]:
        if self._task is not None:
            await self._task
        return self._written


class AgentWorker:
    """Many rollouts at a time on one event loop; a group enters the queue as soon as its last rollout is scored."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        config: AgentSection,
        model_path: str,
        servers: Sequence[ServerAddress],
        queue_address: str,
        timeout_s: float,
    ) -> None:
        del context
        self._timeout_s = timeout_s
        self._queue = rl_tq.connect(queue_address, timeout_s=timeout_s)
        self._loop = LoopThread("agent")
        self._scorer = Scorer()
        self._tokenizer = rl_agent.load_tokenizer(model_path)
        self._runner = self._loop.run(self._open(config, servers), timeout_s)

    async def _open(self, config: AgentSection, servers: Sequence[ServerAddress]) -> rl_agent.AgentRunner:
        self._router = rl_rollout.Router([rl_rollout.connect_server(address) for address in servers])
        return rl_agent.AgentRunner(
            lambda name: rl_agent.create_loop(
                name, self._router, self._tokenizer, **(config.options if name == config.loop else {})
            ),
            default_loop=config.loop,
            max_concurrent=config.max_concurrent,
            timeout_s=config.timeout_s,
            max_attempts=config.max_attempts,
        )

    @register(Dispatch.SPLIT)
    def prompt_lengths(self, prompts: list[list[Message]]) -> list[int]:
        """Tokens of each prompt as the chat template renders it."""
        return [
            len(self._tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=True, return_dict=False))
            for p in prompts
        ]

    @register(Dispatch.SPLIT)
    def generate(
        self, jobs: list[Job], sampling_params: dict[str, Any], partition: str, group_size: int
    ) -> list[GenerateReport]:
        """Roll every job out `group_size` times and put the complete groups into `partition`."""
        if not jobs:
            return []
        return [self._loop.run(self._generate(jobs, sampling_params, partition, group_size), self._timeout_s)]

    async def _generate(
        self, jobs: list[Job], sampling_params: dict[str, Any], partition: str, group_size: int
    ) -> GenerateReport:
        samples: dict[int, dict[int, list[Sample]]] = {}  # by group and rollout
        finished: Counter[int] = Counter()
        failures: Counter[str] = Counter()
        failed_groups: set[int] = set()
        last_failure = ""
        writer = _GroupWriter(lambda groups: self._put(groups, partition))
        done: list[int] = []
        async for result in self._runner.run([job.row for job in jobs], sampling_params, group_size=group_size):
            job = jobs[result.row_index]
            scored = await score(result.outputs, job.row, self._scorer)
            finished[job.group_id] += 1
            if isinstance(scored, Failure):
                failures[scored.kind] += 1
                failed_groups.add(job.group_id)
                last_failure = scored.message
            else:
                samples.setdefault(job.group_id, {})[result.rollout_index] = scored
            if finished[job.group_id] == group_size and job.group_id not in failed_groups:
                rollouts = samples.pop(job.group_id)
                writer.add(job.group_id, [sample for index in sorted(rollouts) for sample in rollouts[index]])
                done.append(job.group_id)
        metas = await writer.finish()
        batch = type(metas[0]).concat(metas) if metas else None
        return GenerateReport(
            batch=batch, complete_groups=tuple(done), failures=dict(failures), last_failure=last_failure
        )

    def _put(self, groups: list[Group], partition: str) -> BatchMeta:
        columns, tags = to_columns(groups)
        return self._queue.put(columns, partition=partition, tags=tags)

    @register(Dispatch.SPLIT)
    def evaluate(self, rows: list[Row], sampling_params: dict[str, Any]) -> list[EvalReport]:
        """Score one completion per row; nothing enters the queue."""
        return [self._loop.run(self._evaluate(rows, sampling_params), self._timeout_s)]

    async def _evaluate(self, rows: list[Row], sampling_params: dict[str, Any]) -> EvalReport:
        rewards: list[float] = []
        num_failed = 0
        async for result in self._runner.run(rows, sampling_params):
            scored = await score(result.outputs, rows[result.row_index], self._scorer)
            if isinstance(scored, Failure):
                num_failed += 1
            else:
                rewards += [reward for _, reward in scored]
        return EvalReport(rewards=tuple(rewards), num_failed=num_failed)

    def close(self) -> None:
        """Leave the servers and the queue, and stop the loop."""
        self._loop.run(self._runner.close(), 30.0)
        self._loop.run(self._router.stop(), 30.0)
        self._loop.close()
        self._scorer.close()
        self._queue.close()


async def score(outputs: tuple[AgentLoopOutput, ...] | Failure, row: Row, scorer: Scorer) -> list[Sample] | Failure:
    """The reward of each trajectory: the loop's own, or the data source's rule. A scorer that raises is a failure."""
    if isinstance(outputs, Failure):
        return outputs
    try:
        return [(o, await scorer.score(o.text, row) if o.reward is None else o.reward) for o in outputs]
    except Exception as error:  # noqa: BLE001 - a scorer is a plug-in: whatever it raises is a counted failure
        message = f"the reward of {row['data_source']!r} raised {type(error).__name__}: {error}"
        return Failure(kind=FailureKind.GRADER, stage="reward", message=message, is_retryable=False)


def to_columns(groups: Sequence[Group]) -> tuple[TensorDict, list[dict[str, Any]]]:
    """Queue columns and tags of groups. Ragged ones are jagged tensors; per token means per completion token."""
    samples = [sample for _, group in groups for sample in group]
    group_ids = [group_id for group_id, group in groups for _ in group]
    outputs = [output for output, _ in samples]
    versions = [[v for v in o.weight_versions if v >= 0] for o in outputs]
    completion = _jagged([o.completion_token_ids for o in outputs], torch.int64)
    columns = TensorDict(
        {
            "prompt_token_ids": _jagged([o.prompt_token_ids for o in outputs], torch.int64),
            "completion_token_ids": completion,
            "loss_mask": _jagged([o.loss_mask for o in outputs], torch.int64),
            "rollout_logprobs": _jagged([o.rollout_logprobs for o in outputs], torch.float32),
            "rewards": _jagged([_place_reward(o, reward) for o, reward in samples], torch.float32),
            "weight_version_min": torch.tensor([min(v) for v in versions]),
            "weight_version_max": torch.tensor([max(v) for v in versions]),
            "group_id": torch.tensor(group_ids),
            "num_turns": torch.tensor([o.num_turns for o in outputs]),
        },
        batch_size=[len(samples)],
    )
    tags = [
        {
            "group_id": group_id,
            "reward": reward,
            "num_tokens": len(o.completion_token_ids),
            "weight_version_min": min(v),
            "weight_version_max": max(v),
            "finish_reason": str(o.finish_reason),
        }
        for group_id, (o, reward), v in zip(group_ids, samples, versions, strict=True)
    ]
    return columns, tags


def _place_reward(output: AgentLoopOutput, reward: float) -> list[float]:
    """Turn rewards on the last token of their turns; what they leave of the reward on the last the model wrote."""
    mask = output.loss_mask
    placed = [0.0] * len(mask)
    ends = [i for i, m in enumerate(mask) if m and not any(mask[i + 1 : i + 2])]
    if output.turn_rewards:
        if len(ends) != len(output.turn_rewards):
            raise ValueError(f"{len(output.turn_rewards)} turn rewards for {len(ends)} runs of model tokens")
        for end, turn_reward in zip(ends, output.turn_rewards, strict=True):
            placed[end] = turn_reward
    placed[ends[-1]] += reward - sum(output.turn_rewards)
    return placed


def _jagged(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    values = torch.tensor([value for row in rows for value in row], dtype=dtype)
    offsets = torch.tensor([0, *[len(row) for row in rows]]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets)
