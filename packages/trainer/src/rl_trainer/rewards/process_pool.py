"""Process pool of a reward function: many calls, each with a deadline at which its process is killed.

Not under rl-rollout's supervisor (`ChildProcess`), which keeps a process alive and its last lines: a call's answer
comes over a pipe here, and a call that does not end is the end of its process.

Ours rather than pebble's (measured, 5.2.3): what a hung function has started outlives it there, an answer is unpickled,
so that it can run code in the trainer, and coroutine functions cannot be called.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from rl_trainer.errors import RewardError
from rl_trainer.plugins import Serialized
from rl_trainer.rewards.trl import Batch, BatchRewards, batch_rewards
from rl_trainer.rewards.worker import CHECKS, HEADER, MAX_ANSWER_BYTES, OBJECT, checked, decoded, framed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
_START_TIMEOUT_S = 300.0
"""Seconds until a process has started, imports included, on a starved machine."""
_GRACE_S = 5.0
"""A coroutine function is cancelled at its deadline; one that cannot be is killed this much later."""
_MAX_TOGETHER = 256
"""Calls of a coroutine function in one process."""


class _EndedError(Exception):
    """The process ended while the call ran."""


class FunctionPool:
    """Process pool of one reward function: plain calls one at a time per process, coroutine calls side by side.

    A call past its deadline ends with its process and everything that this started. Where several ran in it, any of
    them may have been the one that blocked it: each is called again, alone.

    `gives` is `reward`, or of a judge's function `prompt` or `score`: see `rl_trainer.rewards.worker`.
    """

    def __init__(self, path: str, *, num_processes: int = 1, timeout_s: float = 30.0, gives: str = "reward") -> None:
        self._path, self._num_processes, self._timeout_s, self._gives = path, num_processes, timeout_s, gives
        self.processes: list[_Process] = []
        self._changed = asyncio.Condition()
        self._num_alone = 0
        self._is_closed = False
        self._takes_batch: bool | None = None

    async def start(self) -> None:
        """Start a process now.

        Raises:
            RewardError: the function cannot be loaded.
        """
        process = await self._take()
        self._takes_batch = process.is_batched
        await self._give_back(process)

    async def takes_batch(self) -> bool:
        """Whether the function judges the completions of a prompt together, by `call_batch`.

        Raises:
            RewardError: the function cannot be loaded.
        """
        if self._takes_batch is None:
            await self.start()
        return bool(self._takes_batch)

    async def call(self, text: str, row: Mapping[str, Any]) -> float | dict[str, float]:
        """Call the function on a completion.

        Raises:
            RewardError: it raised, gave something else than numbers, or its process ended.
            TimeoutError: it did not end before its deadline.
        """
        return await self._checked(checked, text, row)

    async def value(self, text: str, row: Mapping[str, Any]) -> Any:
        """Call a function that gives no reward. Raises as `call`."""
        return await self._checked(CHECKS[self._gives], text, row)

    async def call_batch(self, batch: Batch, row: Mapping[str, Any]) -> BatchRewards:
        """Call the function on the completions of a prompt. Raises as `call`."""
        return await self._checked(lambda answer: batch_rewards(answer, len(batch.texts)), asdict(batch), row)

    async def _checked(self, check: Callable[[Any], T], given: Any, row: Mapping[str, Any]) -> T:
        try:
            return check(await self._called(given, row))
        except ValueError as error:
            raise RewardError(
                f"the process of reward {self._path!r} gave an answer that is none; does its function print?"
            ) from error

    async def _called(self, given: Any, row: Mapping[str, Any]) -> Any:
        process = await self._take()
        try:
            return await process.call(given, row, self._timeout_s)
        except _EndedError:
            if process.capacity == 1:
                raise self._ended() from None
        finally:
            await self._give_back(process)
        process = await self._take(is_alone=True)
        try:
            return await process.call(given, row, self._timeout_s)
        except _EndedError:
            raise self._ended() from None
        finally:
            await self._give_back(process)

    def _ended(self) -> RewardError:
        return RewardError(f"the process of reward {self._path!r} ended by itself")

    async def close(self) -> None:
        """Kill the processes; waiting calls raise RewardError. Idempotent."""
        self._is_closed = True
        processes, self.processes = self.processes, []
        for process in processes:
            await process.kill()
        async with self._changed:
            self._changed.notify_all()

    async def _take(self, *, is_alone: bool = False) -> _Process:
        """Take a process with room for a call, or with no other in it."""
        async with self._changed:
            self._num_alone += is_alone
            try:
                self._need_open()
                while (process := self._found(is_alone=is_alone)) is None:
                    await self._changed.wait()
                    self._need_open()
            finally:
                self._num_alone -= is_alone
            process.load += 1
            process.is_taken = is_alone
        if process.is_new:
            try:
                await process.start()
                self._need_open()
            except BaseException:
                await process.kill()
                await self._give_back(process)
                raise
            async with self._changed:  # it may take more than the one call that it was started for
                self._changed.notify_all()
        return process

    def _need_open(self) -> None:
        if self._is_closed:
            raise RewardError(f"reward {self._path!r} was closed before this score was given")

    def _found(self, *, is_alone: bool) -> _Process | None:
        self.processes = [process for process in self.processes if process.is_alive]
        if self._num_alone and not is_alone:
            return None  # or the others would never leave room
        free = [p for p in self.processes if not p.is_taken and p.load < (1 if is_alone else p.capacity)]
        if free:
            return min(free, key=lambda each: each.load)
        if len(self.processes) == self._num_processes:
            return None
        self.processes.append(process := _Process(self._path, self._gives))
        return process

    async def _give_back(self, process: _Process) -> None:
        process.load -= 1
        process.is_taken = False
        async with self._changed:
            self._changed.notify_all()


class _Process:
    """Process of the pool; while it starts, it has room for the one call that it is started for."""

    def __init__(self, path: str, gives: str) -> None:
        self._path, self._gives = path, gives
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[tuple[str, Any]]] = {}
        self._numbers = itertools.count()
        self.load, self.capacity = 0, 1
        """Calls in it, and calls that it takes."""
        self.is_alive = self.is_new = True
        """Whether it has not ended, and has not been started."""
        self.is_taken = False
        """Whether one call has it for itself."""
        self._is_async = self.is_batched = False

    async def start(self) -> None:
        self.is_new = False
        name = OBJECT if isinstance(self._path, Serialized) else self._path
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from rl_trainer.rewards.worker import main; main()", name, self._gives),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        if isinstance(self._path, Serialized):
            assert self._process.stdin is not None, "it is a pipe"
            self._process.stdin.write(framed(self._path.payload))
        first = self._waiting[-1] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                kind, result = await first
        except TimeoutError:
            raise RewardError(
                f"the process of reward {self._path!r} did not start within {_START_TIMEOUT_S:g} s"
            ) from None
        except _EndedError:
            raise RewardError(f"the process of reward {self._path!r} ended while it started; see its output") from None
        if kind != "ok":
            raise RewardError(f"reward {self._path!r} cannot be loaded: {result}")
        self._is_async, self.is_batched = bool(result["is_async"]), bool(result["is_batched"])
        self.capacity = _MAX_TOGETHER if self._is_async else 1

    async def call(self, given: Any, row: Mapping[str, Any], timeout_s: float) -> Any:
        assert self._process is not None, "it was started"
        assert self._process.stdin is not None, "it is a pipe"
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            data = framed((number, given, dict(row), timeout_s))
        except (TypeError, ValueError) as error:
            del self._waiting[number]
            raise RewardError(f"the row of reward {self._path!r} cannot be sent to its process: {error}") from error
        try:
            async with asyncio.timeout(timeout_s + (_GRACE_S if self._is_async else 0.0)):
                self._process.stdin.write(data)
                await self._process.stdin.drain()
                kind, result = await answer
        except TimeoutError:
            is_another_s = self.load > 1 or not self.is_alive
            await self.kill()
            if is_another_s:
                raise _EndedError from None
            raise self._late(given, timeout_s) from None
        except ConnectionError:
            raise _EndedError from None
        except asyncio.CancelledError:
            if not self._is_async:
                await self.kill()  # the call cannot be taken back
            raise
        finally:
            self._waiting.pop(number, None)
        if kind == "timeout":
            raise self._late(given, timeout_s)
        if kind == "error":
            raise RewardError(f"reward {self._path!r} raised {result}")
        if kind != "ok":
            raise ValueError(f"{kind!r} is not a kind of answer")
        return result

    def _late(self, given: Any, timeout_s: float) -> TimeoutError:
        what = f"a text of {len(given)} characters" if isinstance(given, str) else f"{len(given['texts'])} completions"
        return TimeoutError(f"reward {self._path!r} did not score {what} within {timeout_s:g} s")

    async def _read(self) -> None:
        assert self._process is not None, "it was started"
        assert self._process.stdout is not None, "it is a pipe"
        stdout = self._process.stdout
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ValueError, TypeError, RecursionError):
            while True:
                (length,) = HEADER.unpack(await stdout.readexactly(HEADER.size))
                if length > MAX_ANSWER_BYTES:
                    break  # no answer of ours
                number, kind, result = decoded(await stdout.readexactly(length))
                if (waiting := self._waiting.get(number)) is not None and not waiting.done():
                    waiting.set_result((kind, result))
        self.is_alive = False
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it may have said what is no answer, and live
            os.killpg(self._process.pid, signal.SIGKILL)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_EndedError())

    async def kill(self) -> None:
        """Kill the process and its descendants."""
        self.is_alive = False
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.wait([asyncio.ensure_future(self._process.wait())], timeout=_GRACE_S)
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=_GRACE_S)
