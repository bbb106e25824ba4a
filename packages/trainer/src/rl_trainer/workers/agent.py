"""Agent worker: runs agent loops on the rollout servers, scores the trajectories, puts groups into the queue."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import rl_agent.registry
import rl_rollout.registry
import rl_tq.registry
from rl_agent.base import Policy
from rl_agent.errors import AgentError, RowError
from rl_agent.types import AgentLoopOutput, Failure, GroupResult, RolloutResult
from rl_engine.registry import describe_model, describe_tokens
from rl_rollout.errors import ServerLostError
from rl_rollout.types import FinishReason, TokenOutput
from rl_tq.errors import QueueFullError, StaleVersionError
from rl_trainer.errors import DataError, TrainerError
from rl_trainer.pipeline.roles import ONE_GENERATION
from rl_trainer.plugins import loop_named
from rl_trainer.rewards import Scorer, Thinking
from rl_trainer.rewards.scorer import unusable_truth
from rl_trainer.runtime.base import Dispatch, register
from rl_trainer.runtime.network import server_token
from rl_trainer.runtime.tracing import trace_requests
from rl_trainer.workers.columns import GIVEN, TEACHER_PROMPT, TOOL_ERROR, WHERE, ImageReader, to_columns
from rl_trainer.workers.grading import GradedGroup, Grading, group_filter, overlong_penalty, scored
from rl_trainer.workers.loop_thread import LoopThread
from rl_trainer.workers.queue import write_step
from rl_trainer.workers.teacher import ServedTeacher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from concurrent.futures import Future

    from rl_agent.base import Generator, PromptTokenizer, RolloutRunner
    from rl_agent.types import Tokenizer
    from rl_engine.types import FolderTokens
    from rl_rollout.base import RolloutServer
    from rl_rollout.types import GenerateRequest, ServerAddress
    from rl_tq.types import BatchMeta, Credit
    from rl_trainer.config import Config
    from rl_trainer.config.schema import AgentSection, RewardSection
    from rl_trainer.data import Row
    from rl_trainer.runtime.base import WorkerContext
    from rl_trainer.workers.columns import Group, Sample

_MAX_ATTEMPTS = 3
"""Attempts at a rollout whose failure may be transient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work item of an agent worker: one prompt, to be rolled out as a group."""

    row: Row
    row_index: int
    group_id: int
    """Unique in the run."""
    place: int
    """Its position in the step's batch: seeds its sampling, whichever worker runs it."""
    where: str = ""
    """File and number of the row, for messages."""
    attempt: int = 0
    """Number of workers that died while they ran it."""
    credit: Credit | None = None
    """The queue's credit for the group, which its put spends; None for an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """Completion of a group that was stopped, as a checkpoint keeps it."""

    policy: str
    group_id: int | None
    """Group of one that has ended; None: a request was stopped, whose group is running."""
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weight_versions: Sequence[int]
    finish_reason: str
    """`abort` of one that goes on."""

    @classmethod
    def of(cls, policy: str, prompt: tuple[int, ...], output: TokenOutput, group_id: int | None = None) -> Stopped:
        """The completion of a request's output."""
        return cls(
            policy=policy,
            group_id=group_id,
            prompt_token_ids=prompt,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            weight_versions=output.weight_versions,
            finish_reason=str(output.finish_reason),
        )

    def output(self) -> tuple[tuple[int, ...], TokenOutput]:
        """Prompt and output, as a router restores them."""
        return tuple(self.prompt_token_ids), TokenOutput(
            request_id="",
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            weight_versions=tuple(self.weight_versions),
            finish_reason=FinishReason(self.finish_reason),
        )


def output_of(output: AgentLoopOutput) -> TokenOutput:
    """Output of the request that a trajectory of one generation is."""
    return TokenOutput(
        request_id="",
        token_ids=tuple(output.completion_token_ids),
        logprobs=tuple(output.rollout_logprobs),
        weight_versions=tuple(output.weight_versions),
        finish_reason=FinishReason(output.finish_reason),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """Groups that ended since the worker was last asked."""

    finished: tuple[GradedGroup, ...] = ()
    """Those that are in the queue."""
    dropped: tuple[GradedGroup, ...] = ()
    """Those that `batch.dynamic_sampling` or `batch.filter` leave out."""
    late: tuple[int, ...] = ()
    """Ids of those whose tokens were too old for the queue."""
    failed: tuple[int, ...] = ()
    """Ids of those with a failed rollout."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Failed rollouts per kind."""
    last_failure: str = ""
    """Row, type and message of one failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Evaluation report: scores of held-out rows."""

    rewards: tuple[float, ...]
    """One per completion that ended well."""
    num_right: int | None
    """Number of those that are correct; None: nothing says so."""
    num_failed: int
    """Completions that did not."""
    last_failure: str = ""
    """Row, type and message of one failure."""
    policies: tuple[str, ...] = ()
    """Policy of each of those completions, where there are several."""


class _Outcomes:
    """Buffer of groups that ended, written by the event loop and its threads, and taken from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: list[tuple[Job, Sequence[Failure]]] = []
        self._others: dict[str, list[Any]] = {"finished": [], "dropped": [], "late": []}

    def fail(self, job: Job, failures: Sequence[Failure]) -> None:
        with self._lock:
            self._failed.append((job, failures))

    def end(self, how: str, groups: Sequence[Any]) -> None:
        with self._lock:
            self._others[how] += groups

    def take(self) -> GroupReport:
        with self._lock:
            failed, self._failed = self._failed, []
            others, self._others = self._others, {how: [] for how in self._others}
        return GroupReport(
            **{how: tuple(groups) for how, groups in others.items()},
            failed=tuple(job.group_id for job, _ in failed),
            failures=Counter(failure.kind for _, failures in failed for failure in failures),
            last_failure=_located(failed[-1][0], failed[-1][1][-1].message) if failed else "",
        )


def _located(job: Job, message: str) -> str:
    return f"{job.where}: {message}" if job.where else message


async def _naming_rows(groups: AsyncIterator[GroupResult], jobs: Sequence[Job]) -> AsyncIterator[GroupResult]:
    """The groups; an error of the agent loop itself, which ends the run, is raised with the place of its row."""
    try:
        async for group in groups:
            yield group
    except AgentError as error:
        if error.row_index is None:
            raise
        raise TrainerError(_located(jobs[error.row_index], str(error))) from error


class _GroupWriter:
    """Batching writer of finished groups: one put at a time, with all groups that finished during the last one."""

    def __init__(self, put: Callable[[list[Group]], object]) -> None:
        self._put = put
        self._ready: list[Group] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, group: Group) -> None:
        self._ready.append(group)
        if self._task is not None and self._task.done():
            self._task.result()  # raises what the last call raised
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while self._ready:
            groups, self._ready = self._ready, []
            await asyncio.to_thread(self._put, groups)

    async def finish(self) -> None:
        """Wait until every group is in the queue, also where the caller is cancelled meanwhile."""
        while self._task is not None and not self._task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(self._task)
        if self._task is not None:
            self._task.result()


class PromptMeter:
    """Lengths of prompts, as they are compared with `data.max_prompt_tokens` before the start and by the workers."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        config: Config,
        model_path: str,
    ) -> None:
        self._reward, self._is_by_source = config.reward, config.agent.loop == "single_turn"
        self._tokenizer, self._num_given = tokenizer, config.batch.given
        self._max_new_tokens = config.rollout.max_new_tokens
        self._context = None if config.teacher is None else config.teacher.context
        self.tokens = describe_tokens(model_path)
        """Tokens of the model's folder."""
        self.reader = ImageReader(Path(model_path)) if describe_model(model_path).takes_images else None
        """Reader of images, of a model that takes them."""

    def length(self, row: Row, prompt: tuple[tuple[int, ...], tuple[str, ...]] | Failure) -> int | str:
        """Tokens of the longest prompt of a row, images and the teacher's included; or why it cannot be used."""
        if (why := unusable_truth(self._reward, row, is_by_source=self._is_by_source)) is not None:
            return why
        if isinstance(prompt, Failure):
            return f"the prompt cannot be asked: {prompt.message}"
        ids, images = prompt
        for text in row.get("given", ())[: self._num_given]:
            if (length := len(given_tokens(self._tokenizer, text, self.tokens))) > self._max_new_tokens:
                return (
                    f"a completion that the row gives has {length} tokens, more than rollout.max_new_tokens="
                    f"{self._max_new_tokens}; take it out, or raise that"
                )
        if images and self.reader is None:
            return "the prompt has images, and the model takes none; take it out"
        longest = len(ids)
        try:
            longest = max(longest, len(self.teacher_prompt(row) or ()))
            return longest if self.reader is None else longest + self.reader.num_added(images)
        except (DataError, RowError) as error:
            return str(error)

    def teacher_prompt(self, row: Row) -> tuple[int, ...] | None:
        """Token ids of a row's prompt with the context that the teacher alone sees; None without one."""
        return None if self._context is None else self._tokenizer.prompt(with_context(row, self._context))[0]

    def with_teacher_prompt(self, sample: Sample, row: Row) -> Sample:
        """Sample with the teacher's own prompt, if that has more context.

        Raises:
            TrainerError: the loop has asked something else than the row's prompt.
        """
        output, score = sample
        if self._context is None:
            return sample
        if output.prompt_token_ids != self._tokenizer.prompt(row)[0]:
            raise TrainerError(
                "teacher.context is written below the prompt of a row, and the agent loop has asked something else; "
                "use a loop that asks the prompt as it is, or leave context out"
            )
        fields = {**output.extra_fields, TEACHER_PROMPT: self.teacher_prompt(row)}
        return replace(output, extra_fields=fields), score


class AgentWorker:
    """Agent worker: many rollouts on one event loop; a group enters the queue when its last rollout is scored."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        config: Config,
        has_baseline: bool,
        model_paths: Mapping[str, str],
        servers: Mapping[str, Sequence[ServerAddress]],
        takes_videos: bool,
        queue_address: str,
        timeout_s: float,
    ) -> None:
        """`model_paths` and `servers` are by policy; the first is the default one, the only one has an empty name.

        `takes_videos`: the servers do; otherwise videos of rows are frames, each an image.
        """
        reward, teacher = config.reward, config.teacher
        self._timeout_s, self._config, self._has_baseline = timeout_s, config, has_baseline
        self._num_given, self._is_kept = config.batch.given, group_filter(config.batch)
        self._queue = rl_tq.registry.connect(queue_address, timeout_s=timeout_s)
        self._loop = LoopThread("agent")
        self._streams: list[Future[None]] = []
        self._outcomes = _Outcomes()
        self._ended: dict[int, list[Stopped]] = {}
        """Rollouts that have ended of each group that was not reported yet (`batch.over_sampling`)."""
        self._stopped: list[Stopped] = []
        self._default = next(iter(model_paths))
        make = rl_agent.registry.create_tokenizer
        self._tokenizers = {policy: make(path, takes_videos=takes_videos) for policy, path in model_paths.items()}
        self._tokenizer = self._tokenizers[self._default]
        self._num_evaluated = 0
        self._served_teacher = None
        if teacher is not None and teacher.url is not None:
            self._served_teacher = ServedTeacher(teacher, num_sharing=context.world_size, timeout_s=timeout_s)
        self._scorer = Scorer(
            reward,
            num_sharing=context.world_size,
            thinking=thinking_of(self._tokenizer, reward, config.agent),
            num_steps=config.steps,
        )
        self._meter = PromptMeter(self._tokenizer, config, model_paths[self._default])
        self._tokens, self._reader = self._meter.tokens, self._meter.reader
        self._num_known: Any = self._tokens.num_tokens
        if self._default:
            self._num_known = {policy: describe_tokens(path).num_tokens for policy, path in model_paths.items()}
        self._runner = self._loop.run(self._open(servers), timeout_s)

    async def _open(self, servers: Mapping[str, Sequence[ServerAddress]]) -> RolloutRunner:
        await self._scorer.start()
        if self._served_teacher is not None:
            await self._served_teacher.start()
        self._replicas = {policy: Replicas(addresses) for policy, addresses in servers.items()}
        policies: dict[str, Policy] = {}
        for policy, replicas in self._replicas.items():
            trace_requests(replicas.router)
            asks_experts = self._config.engine.router_replay
            server = ExpertAsking(replicas.router) if asks_experts else replicas.router
            policies[policy] = Policy(server, self._tokenizers[policy])
        return create_runner(self._config.agent, policies)

    def use_servers(
        self, servers: Mapping[str, Sequence[ServerAddress]], rewards: Mapping[str, Sequence[ServerAddress]]
    ) -> None:
        """Set the replicas to generate on and the reward servers to ask: `Replicas.use`, `Scorer.use`."""
        for policy, addresses in servers.items():
            self._loop.run(self._replicas[policy].use(addresses), self._timeout_s)
        self._scorer.use(rewards)

    def prompt_lengths(self, rows: list[Row]) -> list[int | str]:
        """Lengths of the prompts that the rows' loops start with, images included; or why a row cannot be used."""
        prompts = self._loop.run(self._runner.prompts(rows), self._timeout_s)
        return [self._meter.length(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]

    def submit(self, jobs: list[Job], sampling_params: dict[str, Any], partition: str, group_size: int) -> list[None]:
        """Roll every job out `group_size` times, in the background, in parallel with running ones.

        A group is put into `partition` when its last rollout is scored; `poll` reports how each group ended.
        """
        if jobs:
            self._streams.append(self._loop.start(self._roll_out(jobs, sampling_params, partition, group_size)))
        return []

    def poll(self) -> list[GroupReport]:
        """Groups that ended since the last call. Raises what a rollout raised that is no failure."""
        done = [stream for stream in self._streams if stream.done()]
        self._streams = [stream for stream in self._streams if stream not in done]
        for stream in done:
            stream.result()
        report = self._outcomes.take()
        for group in (*report.failed, *report.late, *(each.group_id for each in (*report.finished, *report.dropped))):
            self._ended.pop(group, None)
        return [report]

    def hold(self) -> None:
        """Stop generating; rollouts keep their state and their tokens, and continue at `release`."""
        self._loop.run(self._hold(), self._timeout_s)

    async def _hold(self) -> None:
        for replicas in self._replicas.values():
            await replicas.router.hold()
        if self._config.agent.loop in ONE_GENERATION:
            self._stopped = [each for ended in self._ended.values() for each in ended]
            for policy, replicas in self._replicas.items():
                self._stopped += [Stopped.of(policy, *each) for each in replicas.router.stopped.outputs()]

    def stopped(self) -> list[Stopped]:
        """Completions of the groups that the last `hold` has stopped, finished ones among them; of one generation."""
        return self._stopped

    def restore(self, stopped: Sequence[Stopped]) -> None:
        """Have the next rollouts with these prompts go on with these completions."""
        for policy, replicas in self._replicas.items():
            replicas.router.stopped.restore([each.output() for each in stopped if each.policy == policy])

    def release(self) -> None:
        """Continue the rollouts that `hold` has stopped, with the weights that the servers have now."""
        for replicas in self._replicas.values():
            self._loop.run(replicas.router.release(), self._timeout_s)

    async def _roll_out(
        self, jobs: list[Job], sampling_params: dict[str, Any], partition: str, group_size: int
    ) -> None:
        rows, positions = [job.row for job in jobs], [job.place for job in jobs]
        baselines = asyncio.create_task(self._baselines(jobs, sampling_params)) if self._has_baseline else None
        by_group = {job.group_id: job for job in jobs}
        writer = _GroupWriter(lambda groups: self._put(groups, partition, by_group))
        grading, num_sampled = self._grading(rows), group_size - self._num_given

        async def complete(group: GroupResult) -> GroupResult:
            row = rows[group.row_index]
            group = await grading.complete(group, await self._given(group, grading, row))
            if self._served_teacher is None or group.failures:
                return group
            return await self._served_teacher.complete(group, self._meter.teacher_prompt(row))

        async def grade(result: RolloutResult) -> RolloutResult:
            graded = await grading.grade(result)
            if self._config.batch.over_sampling and not isinstance(graded.outputs, Failure):
                group = jobs[result.row_index].group_id
                made = [(o.policy or self._default, o.prompt_token_ids, output_of(o), group) for o in graded.outputs]
                self._ended.setdefault(group, []).extend(Stopped.of(*each) for each in made)
            return graded

        finished = self._runner.run_groups(
            rows,
            sampling_params,
            group_size=num_sampled,
            positions=positions,
            grade=grade,
            complete=complete,
        )
        try:
            async with aclosing(finished) as groups:
                async for group in _naming_rows(groups, jobs):
                    job = jobs[group.row_index]
                    greedy = None if baselines is None else (await baselines)[job.group_id]
                    if isinstance(greedy, Failure):
                        self._outcomes.fail(job, [*group.failures, greedy])
                    elif group.failures:
                        self._outcomes.fail(job, group.failures)
                    else:
                        made = self._named([sample for rollout in group.rollouts for sample in scored(rollout)], job)
                        samples = [self._meter.with_teacher_prompt(sample, job.row) for sample in made]
                        writer.add((job.group_id, samples, greedy))
        finally:  # also when it is stopped: what is complete is written
            if baselines is not None:
                baselines.cancel()
            await writer.finish()

    def _named(self, samples: list[Sample], job: Job) -> list[Sample]:
        """Samples with the names of their policies, where there are several: those without one are the default's.

        Raises:
            TrainerError: one is of a policy that the run has not.
        """
        for output, _ in samples:
            if output.policy and output.policy not in self._tokenizers:
                there = ", ".join(filter(None, self._tokenizers)) or "one, which has no name"
                why = f"the agent loop gave a trajectory of policy {output.policy!r}; the run's policies are: {there}"
                raise TrainerError(_located(job, why))
        if not self._default:
            return samples
        return [(replace(output, policy=output.policy or self._default), score) for output, score in samples]

    async def _given(self, group: GroupResult, grading: Grading, row: Row) -> list[RolloutResult]:
        """The completions of a group that are taken from its row; they are as new as the sampled ones."""
        found: list[RolloutResult] = []
        prompt, images = self._tokenizer.prompt(row) if self._num_given else ((), ())
        for index in range(self._num_given):
            ids = given_tokens(self._tokenizer, row["given"][index], self._tokens)
            newest = max(max(output.weight_versions) for rollout in group.rollouts for output in rollout)
            output = AgentLoopOutput(
                prompt_token_ids=prompt,
                completion_token_ids=ids,
                loss_mask=(1,) * len(ids),
                rollout_logprobs=(0.0,) * len(ids),
                weight_versions=(newest,) * len(ids),
                finish_reason="stop",
                text=row["given"][index],
                images=images,
                extra_fields={GIVEN: True},
            )
            given = RolloutResult(
                row_index=group.row_index,
                rollout_index=len(group.rollouts) + index,
                outputs=(output,),
                num_attempts=0,
                wall_s=0.0,
            )
            found.append(await grading.grade(given))
        return found

    def _grading(self, rows: Sequence[Row]) -> Grading:
        buffer, longest = self._config.reward.overlong_buffer, self._config.rollout.max_new_tokens
        return Grading(rows, self._scorer, lambda num_tokens: overlong_penalty(num_tokens, longest, buffer))

    async def _baselines(self, jobs: list[Job], sampling_params: dict[str, Any]) -> dict[int, float | Failure]:
        """Reward of one greedy completion per job, by group."""
        found: dict[int, float | Failure] = {}
        rows, params = [job.row for job in jobs], sampling_params | {"temperature": 0.0}
        grading = self._grading(rows)
        async for group in self._runner.run_groups(
            rows, params, group_size=1, grade=grading.grade, complete=grading.complete
        ):
            rewards = [score.reward for rollout in group.rollouts for _, score in scored(rollout)]
            found[jobs[group.row_index].group_id] = fmean(rewards) if rewards else group.failures[-1]
        return found

    def _put(self, groups: list[Group], partition: str, jobs: Mapping[int, Job]) -> None:
        """Put the groups that the filters keep, each under its credit, and note how every group ended."""
        columns, tags = self._columns(groups, jobs)
        graded = {group: [*rows] for group, rows in groupby(tags, itemgetter("group_id"))}
        dropped = [group for group, rows in graded.items() if not self._has_kept(rows)]
        self._outcomes.end("dropped", [GradedGroup.of(graded[group]) for group in dropped])
        if kept := [group for group in groups if group[0] not in dropped]:
            self._write(kept, partition, jobs, *((columns, tags) if not dropped else self._columns(kept, jobs)))

    def _has_kept(self, tags: list[dict[str, Any]]) -> bool:
        """Whether the filters keep a group, or of several policies the rows of one."""
        policies = {tag.get("policy") for tag in tags}
        return any(self._is_kept([tag for tag in tags if tag.get("policy") == policy]) for policy in policies)

    def _write(
        self,
        groups: list[Group],
        partition: str,
        jobs: Mapping[int, Job],
        columns: Mapping[str, Any],
        tags: Sequence[Mapping[str, Any]],
    ) -> None:
        credit = [given for group, *_ in groups if (given := jobs[group].credit) is not None]
        try:
            self._queue.put(columns, partition=partition, tags=tags, credit=credit or None)
        except (StaleVersionError, QueueFullError):  # a group is late, or was given up: its credit has ended
            if len(groups) > 1:
                for each in groups:
                    self._write([each], partition, jobs, *self._columns([each], jobs))
            else:
                self._outcomes.end("late", [groups[0][0]])
        else:
            rows = groupby(tags, itemgetter("group_id"))
            self._outcomes.end("finished", [GradedGroup.of([*each]) for _, each in rows])

    def _columns(self, groups: list[Group], jobs: Mapping[int, Job]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Columns and tags of groups."""
        has_experts = self._config.engine.router_replay
        columns, tags = to_columns(groups, has_experts=has_experts, reader=self._reader, num_known=self._num_known)
        for tag in tags:
            job = jobs[tag["group_id"]]
            tag["attempt"] = job.attempt
            if job.where:
                tag[WHERE] = job.where
            if TOOL_ERROR in tag:
                tag[TOOL_ERROR] = _located(job, tag[TOOL_ERROR])
            if self._config.teacher is not None and self._config.teacher.by_source:
                tag["data_source"] = job.row["data_source"]
        for _, rows in groupby(tags, itemgetter("group_id")):
            next(rows)["columns"] = [*columns]
        return columns, tags

    def evaluate(self, jobs: list[Job], sampling_params: dict[str, Any]) -> list[EvalReport]:
        """Score one completion per row; nothing enters the queue."""
        return [self._loop.run(self._evaluate(jobs, sampling_params), self._timeout_s)]

    @register(Dispatch.GATHER, is_urgent=True)
    def num_evaluated(self) -> int:
        """Completions of the evaluation under way that are graded."""
        return self._num_evaluated

    async def _evaluate(self, jobs: list[Job], sampling_params: dict[str, Any]) -> EvalReport:
        samples: list[Sample] = []
        failures: list[str] = []
        rows = [job.row for job in jobs]
        grading, self._num_evaluated = Grading(rows, self._scorer), 0
        finished = self._runner.run_groups(
            rows, sampling_params, group_size=1, grade=grading.grade, complete=grading.complete
        )
        async for group in _naming_rows(finished, jobs):
            made = [sample for rollout in group.rollouts for sample in scored(rollout)]
            samples += self._named(made, jobs[group.row_index])
            failures += [_located(jobs[group.row_index], failure.message) for failure in group.failures]
            self._num_evaluated += 1
        right = [score.is_right for _, score in samples]
        return EvalReport(
            rewards=tuple(score.reward for _, score in samples),
            policies=tuple(output.policy for output, _ in samples) if self._default else (),
            num_right=None if None in right else right.count(True),
            num_failed=len(failures),
            last_failure=failures[-1] if failures else "",
        )

    def write_samples(self, batch: BatchMeta, step: int, folder: str) -> int:
        """Write samples by `write_step`, with this worker's tokenizer and queue; returns the bytes on disk."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        tokenizer = self._tokenizers[batch.tags[0].get("policy", "")]
        return write_step(self._queue, tokenizer, Path(folder), batch, step)

    def close(self) -> None:
        """Cancel running rollouts, close servers and queue, and stop the event loop."""
        for stream in self._streams:
            stream.cancel()
        self._loop.run(self._runner.close(), 30.0)
        for replicas in self._replicas.values():
            self._loop.run(replicas.router.stop(), 30.0)
        self._loop.run(self._scorer.close(), 30.0)
        if self._served_teacher is not None:
            self._loop.run(self._served_teacher.close(), 30.0)
        self._loop.close()
        self._queue.close()


def create_runner(config: AgentSection, policies: Mapping[str, Policy]) -> RolloutRunner:
    """Runner of the agent loops of `agent.loop`, or of the loops that rows name, on the servers of policies by name."""
    played = {} if config.environment is None else {"environment": config.environment}
    first, make = next(iter(policies.values())), rl_agent.registry.create_loop
    by_name = {name: each for name, each in policies.items() if name}
    return rl_agent.registry.create_runner(
        lambda name: (
            make(loop_named(name), first.server, first.tokenizer, by_name, **config.options, **played)
            if name == config.loop  # a row may name an installed loop alone: data is no code
            else make(name, first.server, first.tokenizer, by_name)
        ),
        default_loop=config.loop,
        max_concurrent=config.max_concurrent,
        timeout_s=config.timeout_s,
        max_attempts=_MAX_ATTEMPTS,
    )


def thinking_of(tokenizer: Tokenizer, reward: RewardSection, config: AgentSection) -> Thinking:
    """Marks of the policy's thinking, by its chat template or `reward.thinking_end`."""
    return Thinking.of(tokenizer, reward.thinking_end, config.options.get("template_kwargs"))


def given_tokens(tokenizer: Tokenizer, text: str, tokens: FolderTokens) -> tuple[int, ...]:
    """Token ids of a completion that a row gives, with the token that ends a turn."""
    return tuple(tokens.ended(tokenizer.encode(text, add_special_tokens=False)))


def with_context(row: Row, context: str) -> Row:
    """The row with `teacher.context` below the last message of its prompt.

    Raises:
        DataError: the context names what the row has not got, or the message is not of text.
    """
    *before, last = row["prompt"]
    values = {**(row.get("extra_info") or {}), "data_source": row["data_source"]}
    values |= {"ground_truth": row["reward_model"].get("ground_truth")}
    try:
        text = context.format_map(values)
    except (KeyError, ValueError, IndexError) as error:
        raise DataError(
            f"teacher.context={context!r} cannot be filled for a row of {row['data_source']!r}, which has "
            f"{', '.join(sorted(values))}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(last["content"], str):
        raise DataError(f"teacher.context goes below a message of text, and one of {row['data_source']!r} has parts")
    return {**row, "prompt": [*before, {**last, "content": f"{last['content']}\n\n{text}"}]}


class ExpertAsking:
    """Generator that asks the server for the routed experts of every token, whatever the loop asks for."""

    def __init__(self, server: Generator) -> None:
        self._server = server

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Generate, with `returns_routed_experts`."""
        return await self._server.generate(replace(request, returns_routed_experts=True))


class Replicas:
    """Rollout replicas behind one router, with a connection per address."""

    def __init__(self, addresses: Sequence[ServerAddress]) -> None:
        self._servers = {address: _connected(address) for address in addresses}
        self.router = rl_rollout.registry.create_router([*self._servers.values()])

    async def use(self, addresses: Sequence[ServerAddress]) -> None:
        """Set the replicas to generate on; requests that run on a removed one go on at others.

        An address that does not answer is left out: the next weight sync finds that too, and sends new addresses. If
        none answers, the last replica in use stays, and the next request raises its loss.
        """
        for address in addresses:
            if address not in self._servers:
                server = _connected(address)
                with suppress(ServerLostError):
                    await self.router.add(server)
                    self._servers[address] = server
        for address in [address for address in self._servers if address not in addresses]:
            server = self._servers[address]
            if self.router.servers == (server,):
                continue
            del self._servers[address]
            if server in self.router.servers:
                with suppress(ServerLostError):  # it is left out because it is lost
                    await self.router.remove(server)


def _connected(address: ServerAddress) -> RolloutServer:
    return rl_rollout.registry.connect_server(address, api_token=server_token())
