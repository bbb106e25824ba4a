"""Waits for answers of host processes on Ray, which end at once when one of them dies."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rl_trainer.errors import WorkerDiedError, WorkerHungError, WorkerTimeoutError
from rl_trainer.runtime.ray_host import last_lines, last_seen, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rl_trainer.runtime.heartbeat import Heartbeat, PlacedHost

LOOK_S = 1.0
"""Seconds between two looks of a wait at whether the run has been ended."""
_GATHER_S = 0.005
"""Seconds that answers are gathered for once the first is there: a failure is noticed so much later at most."""


class Answers:
    """Answers of host processes: every wait has a deadline, and ends when a worker group's process dies."""

    def __init__(self, heartbeat: Heartbeat, timeout_s: float) -> None:
        self._heartbeat, self.timeout_s = heartbeat, timeout_s
        self.hosts: dict[str, list[PlacedHost]] = {}
        """Host processes of worker groups by pool, whose death ends every wait."""
        self._waiting = threading.Condition()
        self._num_waiting = 0
        self.is_over = False
        """Whether every process is being ended: nothing waits any more."""

    def get(
        self, references: list[Any], hosts: Sequence[PlacedHost], what: str, timeout_s: float | None = None
    ) -> list[Any]:
        """Wait for one answer of each of `hosts`; the first failure of any, or the death of any group's, ends it.

        Raises:
            WorkerTimeoutError, WorkerDiedError: with the last lines of the process.
        """
        host_of, answers = dict(zip(references, hosts, strict=True)), dict[Any, Any]()
        limit = timeout_s or self.timeout_s

        def late(pending: list[Any]) -> str:
            ranks, pool = [host_of[reference].rank for reference in pending], host_of[pending[0]].pool.name
            seen = last_seen([host_of[reference].where for reference in pending])
            return f"rank {ranks} of pool {pool!r} did not finish {what} within {limit:.0f} s; {seen}"

        for done in self.completed(references, what, limit, late):
            for reference in done:
                try:
                    answers[reference] = ray.get(reference)
                except RayTaskError as error:
                    raise reason_of(error) from error
                except RayActorError as error:
                    raise self.death_of(host_of[reference], what) from error
        return [answers[reference] for reference in references]

    def completed(
        self, references: list[Any], what: str, timeout_s: float, late: Callable[[list[Any]], str]
    ) -> Generator[list[Any]]:
        """Yield references as they complete, all that are complete at a time: the work is not quadratic in them.

        Raises:
            WorkerTimeoutError: `late` names those that are late.
            WorkerDiedError: a group's process died, or the runtime was stopped, meanwhile.
        """
        deadline, watched, pending = time.monotonic() + timeout_s, self.watched(), references
        with self.waiting():
            while pending:
                first = self.first_of([*pending, *watched], deadline, what)
                if first is None:
                    raise WorkerTimeoutError(late(pending))
                if first in watched:
                    raise self.death_of(watched[first], what)
                done, pending = ray.wait(pending, num_returns=len(pending), timeout=_GATHER_S)
                yield done

    @contextmanager
    def waiting(self) -> Generator[None]:
        """While a thread is in calls of Ray's, which must not be shut down then: that ends the process by a signal."""
        with self._waiting:
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._waiting:
                self._num_waiting -= 1
                self._waiting.notify_all()

    def first_of(self, references: list[Any], deadline: float, what: str) -> Any | None:
        """First completed reference; None after the deadline.

        Raises:
            WorkerDiedError: the runtime was stopped meanwhile.
        """
        while not self.is_over:
            left_s = deadline - time.monotonic()
            done, _ = ray.wait(references, num_returns=1, timeout=min(max(left_s, 0), LOOK_S))
            if done or left_s <= 0:
                return done[0] if done else None
        raise WorkerDiedError(f"the run was ended during {what}")

    def death(self, within_s: float) -> Exception | None:
        """See `Runtime.death`."""
        watched = self.watched()
        over, _ = ray.wait([*watched], num_returns=1, timeout=within_s) if watched else ([], [])
        return self.death_of(watched[over[0]], "the run") if over else None

    def wait_until_quiet(self, timeout_s: float) -> None:
        """Wait until no thread is in calls of Ray's."""
        with self._waiting:
            self._waiting.wait_for(lambda: not self._num_waiting, timeout_s)

    def watched(self) -> dict[Any, PlacedHost]:
        """Host processes of worker groups by the reference that completes when they end."""
        return {host.watch: host for hosts in self.hosts.values() for host in hosts}

    def death_of(self, host: PlacedHost, what: str) -> WorkerDiedError:
        """Error of a wait for `what` during which a group's process died."""
        return self.death_named(host, f"a worker of pool {host.pool.name!r}, rank {host.rank},", f"during {what}")

    def death_named(self, host: PlacedHost, name: str, when: str) -> WorkerDiedError:
        """Error of a process's death: a sentence with its last lines, and for one that hung its description."""
        finding, wrote = self._heartbeat.finding(host), last_lines(host.where)
        if finding is not None:
            return WorkerHungError(f"{name} hung {when}: it {finding}; {wrote}")
        return WorkerDiedError(f"{name} died {when}; {wrote}")
