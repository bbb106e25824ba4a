"""Parked requests: puts, admissions and claims that wait until a change makes them possible."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rl_tq.errors import TransferQueueError
from rl_tq.metadata.requests import Admission, Batch, Claim, Outcome, Put, Request, batch_of

if TYPE_CHECKING:
    from rl_tq.metadata.admission import Admissions
    from rl_tq.metadata.leasing import Claims
    from rl_tq.metadata.ledger import Timers
    from rl_tq.metadata.state import State


class Waiting:
    """Parked requests by partition, in order of arrival, each with a timer for its deadline."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._lines: dict[str, dict[Any, Request]] = {}
        self._where: dict[Any, str] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self._where

    def keys(self) -> list[Any]:
        """Keys of all parked requests."""
        return list(self._where)

    def line(self, partition: str) -> dict[Any, Request]:
        """Parked requests of one partition; a live mapping while it is not empty."""
        return self._lines.get(partition, {})

    def find(self, key: Any) -> Request:
        """Parked request by key."""
        return self._lines[self._where[key]][key]

    def park(self, request: Request) -> None:
        """Park a request."""
        self._lines.setdefault(request.partition, {})[request.key] = request
        self._where[request.key] = request.partition
        self._timers.set(("wait", request.key), request.deadline)

    def leave(self, key: Any) -> Request:
        """Remove a parked request."""
        partition = self._where.pop(key)
        self._timers.cancel(("wait", key))
        line = self._lines[partition]
        request = line.pop(key)
        if not line:
            del self._lines[partition]
        return request

    def counts(self) -> Counter[str]:
        """Number of parked requests, by partition."""
        return Counter({name: len(line) for name, line in self._lines.items()})


class Parking:
    """Requests that are answered at once or wait, and the results of those that waited."""

    def __init__(self, state: State, admissions: Admissions, claims: Claims, timers: Timers) -> None:
        self._state, self._admissions, self._claims = state, admissions, claims
        self.waiting = Waiting(timers)
        """Requests that wait."""
        self.resolved: list[tuple[Request, Outcome]] = []
        """Results of those that waited, until the host has taken them."""

    def answer(self, request: Any, now: float) -> Any:
        """Answer a request, or park it and return None."""
        parked = self.waiting.line(request.partition)
        if parked and self._admissions.must_wait(request, parked.values()):
            if isinstance(request, Put):
                self._admissions.check(request)
        elif (answer := self._try(request, now)) is not None:
            if isinstance(request, Put):
                self.resolve(request.partition, now)
            return answer
        self.waiting.park(request)
        return None

    def end(self, request: Request, outcome: Outcome) -> None:
        """End a parked request."""
        self.waiting.leave(request.key)
        if isinstance(request, Put) and not isinstance(outcome, Batch):
            self._state.freed.append(request.extent)
        self.resolved.append((request, outcome))

    def resolve(self, partition: str, now: float) -> None:
        """Answer parked requests that the last change made possible, in order of arrival; puts before claims."""
        parked = self.waiting.line(partition)
        self._claims.has_made_room = bool(parked)
        while parked and self._claims.has_made_room:  # once, and again after a claim made room
            self._claims.has_made_room = False
            for request in [r for r in parked.values() if not isinstance(r, Claim)]:
                if not self._resolve_one(request, now):
                    break  # requests behind it must not overtake
            for request in [r for r in parked.values() if isinstance(r, Claim)]:
                self._resolve_one(request, now)

    def _resolve_one(self, request: Request, now: float) -> bool:
        try:
            answer: Outcome | None = self._try(request, now)
        except TransferQueueError as error:
            answer = error
        if answer is None:
            return False
        self.end(request, answer)
        return True

    def _try(self, request: Request, now: float) -> Any:
        match request:
            case Put():
                rows = self._admissions.put(request)
                if rows is None:
                    return None
                columns = request.schema.names.union(request.shared)
                return batch_of(self._state.partitions[request.partition], rows, columns)
            case Admission():
                return self._admissions.admit(request)
            case Claim():
                return self._claims.answer(request, now)
            case _:
                raise TypeError(request)
