"""Runner: runs many rollouts at a time on one event loop, alone or in groups; each ends as a result, never an error."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rl_agent.base import AgentLoop, RolloutRunner
from rl_agent.chat_template import ROWS_AT_ONCE, tokenize_prompt, tokenize_prompts
from rl_agent.errors import (
    AgentError,
    FailureError,
    LoopError,
    OutputError,
    PluginError,
    RowError,
    SandboxError,
    TemplateError,
    TokenizerError,
    ToolDefinitionError,
    contained,
    described,
)
from rl_agent.types import AgentLoopOutput, Failure, FailureKind, GroupResult, OnFailure, RolloutResult, well_formed
from rl_agent.validation import validate_output
from rl_rollout.errors import OverloadedError, RolloutError, WeightUpdateError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence

_RAISED = (LoopError, OutputError, PluginError, SandboxError, TemplateError, TokenizerError, ToolDefinitionError)
"""Exceptions that all rollouts would end with, or that make what was generated unusable; any other is a failure."""

_log = logging.getLogger(__name__)

_Outcome = tuple[AgentLoopOutput, ...] | Failure

T = TypeVar("T")


@dataclass(slots=True)
class _Group:
    """State of a group in progress."""

    num_refills: int
    """Replacements that are still allowed."""
    num_started: int
    """Number of seeds used."""
    num_left: int
    """Number of rollouts of the group that have not ended."""
    ended: dict[int, tuple[AgentLoopOutput, ...]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


class AgentRunner(RolloutRunner):
    """Runner of rollouts: runs every row of a batch `group_size` times, concurrently; yields results as they finish.

    A rollout that fails is tried again up to `max_attempts` times where that can help; after that, or when its deadline
    passes, it ends as a `Failure`, while the others go on. A failure is never a reward of zero, and says the type of
    its exception. An error of the set-up (an output that is not valid, an agent loop that is not installed, a
    tokenizer without chat template) is raised from the iteration, and the rollouts still running are cancelled.

    One event loop; an instance may run several batches at the same time, each with its own bound.

    Args:
        loop_factory: Creates a loop by name, for example `lambda name: create_loop(name, server, tokenizer)`. Called
            once per name.
        default_loop: Loop of the rows that have no `agent_name`.
        max_concurrent: Most rollouts at the same time.
        timeout_s: Deadline of one rollout with all its attempts, seconds.
        max_attempts: Most attempts of a rollout.
        retry_delay_s: Pause before the second attempt, seconds; doubles for each further one.

    Raises:
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        loop_factory: Callable[[str], AgentLoop],
        *,
        default_loop: str = "single_turn",
        max_concurrent: int = 256,
        timeout_s: float = 600.0,
        max_attempts: int = 2,
        retry_delay_s: float = 0.2,
    ) -> None:
        limits = {"max_concurrent": max_concurrent, "timeout_s": timeout_s, "max_attempts": max_attempts}
        for name, value in limits.items():
            if value <= 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        self._loop_factory = loop_factory
        self._default_loop = default_loop
        self._max_concurrent = max_concurrent
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts
        self._retry_delay_s = retry_delay_s
        self._loops: dict[str, AgentLoop] = {}

    async def run(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampling_params: Mapping[str, Any],
        *,
        group_size: int = 1,
        positions: Sequence[int] | None = None,
    ) -> AsyncGenerator[RolloutResult, None]:
        """Run a batch; yields `len(rows) * group_size` results in the order in which they finish.

        Leaving the iteration early cancels what is running; close it at once with `contextlib.aclosing`.

        Args:
            rows: Dataset rows; `agent_name` chooses a row's loop.
            sampling_params: Fields of `rl_rollout.types.SamplingParams`. A `seed` among them seeds the batch: every
                rollout gets its own, derived from it and the row's position in the batch.
            group_size: Rollouts per row.
            positions: Position of each row in the batch, where these are a part of one, so that seeds do not depend on
                how it is divided. None: as given.

        Raises:
            LoopError: a row's loop is not installed; raised before anything starts.
            ValueError: `group_size` is not positive, or there is not one position per row.
        """
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}; it must be positive")
        positions = _checked_positions(positions, rows)
        loops = [self._loop_of(row) for row in rows]
        rollouts = (
            self._rollout(loops[i], rows[i], seeded(sampling_params, positions[i], k), row_index=i, rollout_index=k)
            for i in range(len(rows))
            for k in range(group_size)
        )
        async with aclosing(as_finished(rollouts, self._max_concurrent)) as results:
            async for result in results:
                yield result

    async def run_groups(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampling_params: Mapping[str, Any],
        *,
        group_size: int,
        on_failure: OnFailure | str = OnFailure.DROP,
        max_refills: int = 2,
        min_group_size: int = 2,
        grade: Callable[[RolloutResult], Awaitable[RolloutResult]] | None = None,
        complete: Callable[[GroupResult], Awaitable[GroupResult]] | None = None,
        positions: Sequence[int] | None = None,
    ) -> AsyncGenerator[GroupResult, None]:
        """See `RolloutRunner`."""
        on_failure, min_group_size = OnFailure(on_failure), min(min_group_size, group_size)
        if group_size < 1 or max_refills < 0 or min_group_size < 1:
            raise ValueError(
                f"group_size={group_size} and min_group_size={min_group_size} must be positive, and "
                f"max_refills={max_refills} not negative"
            )
        positions = _checked_positions(positions, rows)
        loops = [self._loop_of(row) for row in rows]
        groups = [_Group(num_refills=max_refills, num_started=group_size, num_left=group_size) for _ in rows]

        async def fill(row: int, index: int) -> GroupResult | None:
            """Run one rollout of a group, and replacements while it fails; the last one returns the group."""
            group, seed_index = groups[row], index
            while not (group.failures and on_failure is OnFailure.DROP):
                params = seeded(sampling_params, positions[row], seed_index)
                result = await self._rollout(loops[row], rows[row], params, row_index=row, rollout_index=index)
                if grade is not None and not isinstance(result.outputs, Failure):
                    result = await grade(result)
                if not isinstance(result.outputs, Failure):
                    group.ended[index] = result.outputs
                    break
                group.failures.append(result.outputs)
                if on_failure is not OnFailure.REFILL or not group.num_refills:
                    break
                group.num_refills -= 1
                seed_index, group.num_started = group.num_started, group.num_started + 1
            group.num_left -= 1
            if group.num_left:
                return None
            whole = sorted(group.ended.items()) if len(group.ended) >= needed else ()
            rollouts = tuple(outputs for _, outputs in whole)
            found = GroupResult(row_index=row, rollouts=rollouts, failures=tuple(group.failures))
            return found if complete is None or not rollouts else await complete(found)

        needed = min_group_size if on_failure is OnFailure.MASK else group_size
        work = (fill(row, index) for row in range(len(rows)) for index in range(group_size))
        async with aclosing(as_finished(work, self._max_concurrent)) as finished:
            async for group in finished:
                if group is not None:
                    yield group

    async def close(self) -> None:
        """See `RolloutRunner`."""
        for loop in self._loops.values():
            try:
                await contained(loop.close())
            except Exception as error:  # noqa: BLE001 - tools and environments of others; the other loops are closed
                _log.warning("%s could not be closed: %s", type(loop).__name__, described(error), exc_info=error)

    async def prompts(
        self, rows: Sequence[Mapping[str, Any]]
    ) -> list[tuple[tuple[int, ...], tuple[str, ...]] | Failure]:
        """See `RolloutRunner`."""
        loops = [self._loop_of(row) for row in rows]
        plain = [i for i, loop in enumerate(loops) if type(loop).prompt is AgentLoop.prompt]
        found: dict[int, Any] = {}
        for start in range(0, len(plain), ROWS_AT_ONCE):
            chunk = plain[start : start + ROWS_AT_ONCE]
            try:
                prompts = list(tokenize_prompts(loops[chunk[0]].tokenizer, [well_formed(rows[i]) for i in chunk]))
            except RowError:
                continue  # one by one, below
            found |= zip(chunk, prompts, strict=True)

        async def find(index: int) -> None:
            loop, row = loops[index], well_formed(rows[index])
            try:
                async with asyncio.timeout(self._timeout_s):
                    found[index] = await _shielded(_prompt(loop, row))
            except _RAISED:
                raise
            except Exception as error:  # noqa: BLE001 - as of a rollout
                found[index] = to_failure(error)

        left = [i for i in range(len(rows)) if i not in found]
        async with aclosing(as_finished(map(find, left), self._max_concurrent)) as finished:
            async for _ in finished:
                pass
        return [found[i] for i in range(len(rows))]

    def _loop_of(self, row: Mapping[str, Any]) -> AgentLoop:
        name = row.get("agent_name") or self._default_loop
        if name not in self._loops:
            self._loops[name] = self._loop_factory(name)
        return self._loops[name]

    async def _rollout(
        self, loop: AgentLoop, row: Mapping[str, Any], params: dict[str, Any], *, row_index: int, rollout_index: int
    ) -> RolloutResult:
        start, num_attempts = time.perf_counter(), 0
        outcome: _Outcome | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    num_attempts += 1
                    outcome = await _attempt(loop, row, params)
                    is_final = not isinstance(outcome, Failure) or not outcome.is_retryable
                    if is_final or num_attempts == self._max_attempts:
                        break
                    await asyncio.sleep(self._retry_delay_s * 2 ** (num_attempts - 1))
        except TimeoutError:  # the deadline's own: a loop's ends as a value in _attempt
            outcome = _deadline_failure(self._timeout_s, num_attempts, outcome)
        except Exception as error:
            error.add_note(f"in rollout {rollout_index} of row {row_index}, agent loop {type(loop).__name__}")
            if isinstance(error, AgentError):
                error.row_index = row_index
            raise
        return RolloutResult(
            row_index=row_index,
            rollout_index=rollout_index,
            outputs=outcome,
            num_attempts=num_attempts,
            wall_s=time.perf_counter() - start,
        )


def _checked_positions(positions: Sequence[int] | None, rows: Sequence[Any]) -> Sequence[int]:
    positions = range(len(rows)) if positions is None else positions
    if len(positions) != len(rows):
        raise ValueError(f"there are {len(positions)} positions for {len(rows)} rows")
    return positions


def seeded(sampling_params: Mapping[str, Any], row_index: int, rollout_index: int) -> dict[str, Any]:
    """Sampling parameters of one rollout: the batch's, with its own seed if the batch is seeded.

    One seed for all would make the rollouts of a group equal, token for token.
    """
    params = dict(sampling_params)
    if params.get("seed") is not None:
        key = f"{params['seed']}/{row_index}/{rollout_index}".encode()
        params["seed"] = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest()) >> 1
    return params


def to_failure(error: Exception) -> Failure:
    """Failure for an exception of a loop."""
    if isinstance(error, FailureError):
        return error.failure
    message = (str(error) if isinstance(error, (RowError, RolloutError)) else "") or described(error)
    stage = "generate" if isinstance(error, RolloutError) else "loop"
    is_retryable = True
    if isinstance(error, ConnectionError):
        kind = FailureKind.TRANSPORT
    elif isinstance(error, TimeoutError):
        kind = FailureKind.TIMEOUT
    elif isinstance(error, RowError):
        kind, stage, is_retryable = FailureKind.ENVIRONMENT, "row", False
    elif isinstance(error, RolloutError):
        kind, is_retryable = FailureKind.GENERATION, isinstance(error, OverloadedError | WeightUpdateError)
    else:
        kind, is_retryable = FailureKind.LOOP, False
    return Failure(kind=kind, stage=stage, message=message, is_retryable=is_retryable)


async def _prompt(loop: AgentLoop, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return await loop.prompt(row) or tokenize_prompt(loop.tokenizer, row)


async def _shielded(work: Coroutine[Any, Any, T]) -> T:
    """Await a loop in its own task, so that foreign code which cancels its task does not cancel the runner."""
    return await contained(asyncio.ensure_future(contained(work)))


async def _attempt(loop: AgentLoop, row: Mapping[str, Any], params: dict[str, Any]) -> _Outcome:
    """Run a loop once; returns its validated trajectories, or its failure."""
    try:
        given = await _shielded(loop.run(dict(params), well_formed(row)))
    except _RAISED:
        raise
    except Exception as error:  # noqa: BLE001 - loops run tools, environments, parsers and tokenizers of others
        failure = to_failure(error)
        if failure.kind is FailureKind.LOOP:
            _log.warning("a rollout of %s failed: %s", type(loop).__name__, failure.message, exc_info=error)
        return failure
    outputs = (given,) if isinstance(given, AgentLoopOutput) else tuple(given)
    if not outputs:
        raise OutputError("the agent loop gave no trajectory; give one, or raise FailureError to fail the rollout")
    for output in outputs:
        validate_output(output)
    return outputs


def _deadline_failure(timeout_s: float, num_attempts: int, last: _Outcome | None) -> Failure:
    before = f"; the attempt before failed: {last.message}" if isinstance(last, Failure) else ""
    return Failure(
        kind=FailureKind.TIMEOUT,
        stage="rollout",
        message=f"no result within {timeout_s:g} s, in attempt {num_attempts}{before}",
        is_retryable=True,
    )


async def as_finished(work: Iterator[Coroutine[Any, Any, T]], limit: int) -> AsyncGenerator[T, None]:
    """Run coroutines, at most `limit` at a time; yields their results in the order in which they finish.

    The next coroutine is taken as soon as one ends, whether or not the results are being read. The first error is
    raised, and leaving for whatever reason cancels the rest and waits for it to end.
    """
    running: set[asyncio.Task[T]] = set()
    finished: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    is_open = True

    def start_next() -> None:
        coroutine = next(work, None) if is_open else None
        if coroutine is not None:
            task = asyncio.create_task(coroutine)
            running.add(task)
            task.add_done_callback(on_done)

    def on_done(task: asyncio.Task[T]) -> None:
        running.discard(task)
        finished.put_nowait(task)
        start_next()

    try:
        for _ in range(limit):
            start_next()
        while running or not finished.empty():
            yield (await finished.get()).result()
    finally:
        is_open = False
        unread = [finished.get_nowait() for _ in range(finished.qsize())]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *unread, return_exceptions=True)
