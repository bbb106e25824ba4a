"""Router: many replicas behind the interface of one server, with placement by prefix and resume after a loss."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rl_rollout.base import ServerGroup
from rl_rollout.errors import (
    ConfigError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    ServerLostError,
    WeightUpdateError,
)
from rl_rollout.receiver import CkptReceiver
from rl_rollout.types import FinishReason, ServerAddress, StoppedRequests, TokenChunk, TokenOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence

    from rl_rollout.base import PauseMode, RolloutServer, WeightReceiver
    from rl_rollout.types import Capabilities, GenerateRequest

K = TypeVar("K")

BLOCK_TOKENS = 16
"""Block size of prefixes, tokens: servers cache prefixes by whole blocks."""
MAX_BLOCKS = 65_536
"""Most prefix blocks that are remembered; least recently used ones are dropped."""
MAX_SESSIONS = 65_536
"""Most sessions that are remembered; least recently used ones are dropped."""
_HOLD_POLL_S = 0.01
MAX_IMBALANCE = 8
"""Most requests that a replica may have above the least loaded one and still be chosen for its prefix."""


class Turns:
    """Turns of requests on replicas: each waits until one has room, and goes to the one that holds its prefix.

    Args:
        servers: Replicas.
        max_in_flight: See `Router`.
        max_waiting: See `Router`.
    """

    def __init__(self, servers: Sequence[RolloutServer], *, max_in_flight: int, max_waiting: int) -> None:
        self.loads: dict[RolloutServer, int] = dict.fromkeys(servers, 0)
        """Requests in flight of each replica in use."""
        self.lost: dict[RolloutServer, ServerLostError] = {}
        """Replicas that were lost, in order."""
        self.placement: Placement[RolloutServer] = Placement()
        self.aborted: set[str] = set()
        """Ids of requests that are to end."""
        self.held: set[str] = set()
        """Ids of requests that were in flight at a `hold`, and have not continued since."""
        self.is_held = False
        """Whether no replica gets a request."""
        self.changed = asyncio.Condition()
        """Notified where a replica has room, comes or goes, or a request is aborted."""
        self._max_in_flight, self._max_waiting, self._num_waiting = max_in_flight, max_waiting, 0

    async def take(self, request: GenerateRequest, deadline: float | None) -> RolloutServer | None:
        """Choose a replica that has room, waiting until one has; None if the request is aborted meanwhile."""
        async with self.changed:
            if not self._room() and self.loads:
                if self._max_waiting and self._num_waiting >= self._max_waiting and not self.is_held:
                    raise OverloadedError(
                        f"request {request.request_id!r}: {len(self.loads)} replicas are given {self._max_in_flight} "
                        f"requests each, and {self._num_waiting} wait already; ask again later, or add replicas"
                    )
                self._num_waiting += 1
                try:
                    async with asyncio.timeout_at(deadline):
                        await self.changed.wait_for(
                            lambda: self._room() or not self.loads or request.request_id in self.aborted
                        )
                except asyncio.CancelledError:
                    self.changed.notify(1)  # this one may have consumed the notification that another needs
                    raise
                except TimeoutError as error:
                    self.changed.notify(1)
                    raise RequestTimeoutError(
                        f"request {request.request_id!r} got no replica in its time: {len(self.loads)} are given "
                        f"{self._max_in_flight} requests each, and {self._num_waiting} wait"
                    ) from error
                finally:
                    self._num_waiting -= 1
            if request.request_id in self.aborted:
                return None
            room = self._room()
            if not room:
                last = next(reversed(self.lost.values()))
                raise ServerLostError(f"all {len(self.lost)} replicas are lost; the last one: {last}") from last
            server = self.placement.choose(room, request.prompt_token_ids, request.session_id)
            self.loads[server] += 1
            return server

    def _room(self) -> dict[RolloutServer, int]:
        """Number of requests in flight of the replicas that have room for another."""
        if self.is_held:
            return {}
        if not self._max_in_flight:
            return self.loads
        return {server: load for server, load in self.loads.items() if load < self._max_in_flight}

    async def give_back(self, server: RolloutServer) -> None:
        """End a turn."""
        async with self.changed:
            if server in self.loads:
                self.loads[server] -= 1
            self.changed.notify(1)  # there is room for one waiting request

    async def leave_out(self, server: RolloutServer, error: ServerLostError) -> None:
        """Use a replica no more that was lost."""
        async with self.changed:
            if server in self.loads:
                del self.loads[server]
                self.lost[server] = error
            self.changed.notify_all()

    def is_over(self, request: GenerateRequest, reason: FinishReason | None, server: RolloutServer) -> bool:
        """Whether a finish reason of a replica ends the request, and not just a part: held, or the replica leaves."""
        was_held = reason is not None and request.request_id in self.held
        self.held.difference_update([request.request_id] if was_held else [])
        is_cut_short = reason is FinishReason.ABORT and (was_held or server not in self.loads)
        return reason is not None and (not is_cut_short or request.request_id in self.aborted)


class Router(ServerGroup):
    """Router over replicas, which may join and leave while it serves.

    A request goes to the replica that holds its session, else to one that has its prefix, else to the least loaded. A
    replica whose connection is lost is not used any more; its unfinished requests continue on other replicas from the
    tokens received so far, each token counted once. Everything else (pause, update_weights, ...) goes to all replicas.

    Args:
        servers: Replicas, started or not.
        max_in_flight: Most requests in flight on one replica; further ones wait here. 0: no limit.
        max_waiting: Most requests that wait here; one more is refused with `OverloadedError`. 0: no limit.
        health_check_s: Seconds between health checks of every replica. 0: none, so that a loss is noticed by the next
            request.
    """

    def __init__(
        self,
        servers: Sequence[RolloutServer],
        *,
        max_in_flight: int = 0,
        max_waiting: int = 0,
        health_check_s: float = 0.0,
    ) -> None:
        if not servers:
            raise ConfigError("a router needs at least one server")
        for name, value in (
            ("max_in_flight", max_in_flight),
            ("max_waiting", max_waiting),
            ("health_check_s", health_check_s),
        ):
            if value < 0:
                raise ConfigError(f"{name}={value} must be 0 (off) or above")
        self._turns = Turns(servers, max_in_flight=max_in_flight, max_waiting=max_waiting)
        self._joining: dict[RolloutServer, asyncio.Future[None]] = {}
        self._receivers: dict[tuple[int, str], CkptReceiver] = {}
        self._health_check_s = health_check_s
        self._health: asyncio.Task[None] | None = None
        self._members = asyncio.Lock()
        """Held during a weight update and while a replica joins: it must not serve before it has the weights."""
        self._version: int | None = None
        self._in_flight: set[str] = set()
        self.stopped = StoppedRequests()
        self._pause_mode: PauseMode | None = None

    @property
    def servers(self) -> tuple[RolloutServer, ...]:
        """See `ServerGroup`."""
        return tuple(self._turns.loads)

    @property
    def lost(self) -> tuple[ServerLostError, ...]:
        """Errors of the replicas that were lost, in order."""
        return tuple(self._turns.lost.values())

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the first replica; all replicas must be alike."""
        return next(iter([*self._turns.loads, *self._turns.lost])).capabilities

    async def start(self) -> ServerAddress:
        """Start every replica; if one fails, the others are stopped and its error is raised."""
        try:
            addresses = await asyncio.gather(*(server.start() for server in self._turns.loads))
        except BaseException:
            await self.stop()
            raise
        if self._health_check_s and self._health is None:
            self._health = asyncio.create_task(self._watch())
        return ServerAddress(url="inproc:router", model=addresses[0].model, pid=os.getpid())

    # ---- membership

    async def add(self, server: RolloutServer, receive: WeightReceiver | None = None) -> None:
        """See `ServerGroup`."""
        try:
            await server.start()
            async with self._members:
                if self._version is not None and receive is not None:
                    await server.update_weights(self._receiver(server, receive), self._version)
                if self._version is None or receive is not None:
                    await self._use(server)
                    return
                self._joining[server] = asyncio.get_running_loop().create_future()
            await self._joining[server]
        except BaseException:
            self._joining.pop(server, None)
            await server.stop()
            raise

    async def _use(self, server: RolloutServer) -> None:
        if self._pause_mode is not None:
            await server.pause("keep")
        async with self._turns.changed:
            self._turns.loads[server] = 0
            self._turns.changed.notify_all()

    async def remove(self, server: RolloutServer) -> None:
        """See `ServerGroup`."""
        if server not in self._turns.loads:
            raise ConfigError("the server to remove is not one of the router's")
        if len(self._turns.loads) == 1:
            raise ConfigError("the last replica cannot be removed; add another one first, or stop the router")
        del self._turns.loads[server]
        if server.capabilities.pauses:
            await server.abort([*self._in_flight])  # not those of other routers over the same replica
        await server.stop()

    async def _watch(self) -> None:
        """Health check of every replica, every `health_check_s` seconds."""
        while True:
            await asyncio.sleep(self._health_check_s)
            await asyncio.gather(*(_look_at(server, self._turns) for server in self.servers))

    # ---- requests

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Generate on one replica, and continue on another if that one is lost or removed.

        Raises:
            ServerLostError: every replica is gone; the last loss is chained.
            OverloadedError: all replicas are busy, and too many wait already.
        """
        deadline = deadline_of(request)
        with self._entered(request):
            done = self.stopped.begun(request)
            if done.token_ids and done.finish_reason is not FinishReason.ABORT:
                return done
            left = rest_of(request, done) if done.token_ids else request
            while left is not None:
                part, is_last = await self._generate_part(left, deadline)
                done = joined(done, part, num_prompt_tokens=len(request.prompt_token_ids))
                if is_last:
                    return done
                self.stopped.note(request, done)
                left = rest_of(request, done)
            return replace(done, finish_reason=FinishReason.LENGTH)  # lost after the last token, before its reason

    async def _generate_part(self, request: GenerateRequest, deadline: float | None) -> tuple[TokenOutput, bool]:
        """Output of one replica, and whether it is complete."""
        server = await self._turns.take(request, deadline)
        if server is None:
            return TokenOutput.empty(request), True
        try:
            output = await server.generate(due(request, deadline))
        except ServerLostError as error:
            await self._turns.leave_out(server, error)
            check_due(request, deadline, error)
            return error.partial or TokenOutput.empty(request), False
        finally:
            await self._turns.give_back(server)
        return output, self._turns.is_over(request, output.finish_reason, server)

    async def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `RolloutServer.generate_stream`. Continues on another replica as `generate` does.

        Raises:
            ServerLostError, OverloadedError: as `generate`.
        """
        request.check_streamable()
        deadline = deadline_of(request)
        with self._entered(request):
            left: GenerateRequest | None = request
            done = TokenOutput.empty(request)
            while left is not None:
                server = await self._turns.take(left, deadline)
                if server is None:
                    break
                try:
                    async with aclosing(server.generate_stream(due(left, deadline))) as chunks:
                        async for chunk in chunks:
                            done = done.extended(chunk)
                            if self._turns.is_over(request, chunk.finish_reason, server):
                                yield chunk
                                return
                            yield replace(chunk, finish_reason=None)
                except ServerLostError as error:
                    await self._turns.leave_out(server, error)
                    check_due(request, deadline, error)
                finally:
                    await self._turns.give_back(server)
                left = rest_of(request, done)
            reason = FinishReason.ABORT if left is not None else FinishReason.LENGTH
            yield TokenChunk(token_ids=(), logprobs=(), weight_versions=(), finish_reason=reason)

    @contextmanager
    def _entered(self, request: GenerateRequest) -> Generator[None]:
        """Context in which a request is in flight here."""
        if request.request_id in self._in_flight:
            raise RequestError(f"request id {request.request_id!r} is in flight already")
        self._in_flight.add(request.request_id)
        try:
            yield
        finally:
            self._in_flight.discard(request.request_id)
            self.stopped.end(request)
            self._turns.aborted.discard(request.request_id)
            self._turns.held.discard(request.request_id)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort requests on all replicas. See `RolloutServer.abort`."""
        self._turns.aborted.update(
            self._in_flight if request_ids is None else self._in_flight.intersection(request_ids)
        )
        async with self._turns.changed:
            self._turns.changed.notify_all()  # requests that wait for a replica
        await self._on_all(lambda server: server.abort(request_ids))

    # ---- control

    async def hold(self) -> None:
        """See `ServerGroup`."""
        self.stopped.forget()
        self._turns.is_held = True
        self._turns.held.update(self._in_flight)
        while busy := [s for s, load in self._turns.loads.items() if load and s.capabilities.pauses]:
            # Again, until all have returned: an abort may arrive before the request that it is for.
            ended = await asyncio.gather(*(s.abort([*self._in_flight]) for s in busy), return_exceptions=True)
            if failed := [e for e in ended if isinstance(e, BaseException) and not isinstance(e, ServerLostError)]:
                raise failed[0]
            await asyncio.sleep(_HOLD_POLL_S)

    async def release(self) -> None:
        """See `ServerGroup`."""
        async with self._turns.changed:
            self._turns.is_held = False
            self._turns.changed.notify_all()

    async def pause(self, mode: PauseMode) -> None:
        """Pause all replicas. See `RolloutServer.pause`."""
        self._pause_mode = mode
        await self._on_all(lambda server: server.pause(mode))

    async def resume(self) -> None:
        """Resume all replicas. See `RolloutServer.resume`."""
        self._pause_mode = None
        await self._on_all(lambda server: server.resume())

    async def update_weights(self, receive: WeightReceiver, version: int) -> None:
        """Update all replicas at the same time, joining ones included, in one sync of the session.

        Several replicas cannot read one receiver: each opens its own by `receive.address`. A single replica is given
        `receive` itself.

        Raises:
            WeightUpdateError: replicas failed; says how many, and chains the first failure.
        """
        async with self._members:
            joining = dict(self._joining)
            servers = (*self._turns.loads, *joining)
            receivers = [receive] if len(servers) == 1 else [self._receiver(server, receive) for server in servers]
            results = await asyncio.gather(
                *(server.update_weights(each, version) for server, each in zip(servers, receivers, strict=True)),
                return_exceptions=True,
            )
            self._turns.placement.forget_prefixes()
            for server, result in zip(servers, results, strict=True):
                if server in joining:
                    await self._settle(server, result)
            failed = [result for result in results if isinstance(result, BaseException)]
            if not failed:
                self._version = version
        if len(servers) == 1 and failed:
            raise failed[0]
        if failed:
            raise WeightUpdateError(
                f"{len(failed)} of {len(servers)} replicas did not install version {version}: {failed[0]}"
            ) from failed[0]

    async def _settle(self, server: RolloutServer, result: BaseException | None) -> None:
        """Finish the `add` that waits for a joining replica's first update."""
        waiting = self._joining.pop(server)
        if result is None:
            await self._use(server)
        if waiting.done():
            return
        if result is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(result)

    async def sleep(self, level: int = 1) -> None:
        """Put all replicas to sleep. See `RolloutServer.sleep`."""
        await self._on_all(lambda server: server.sleep(level))

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Wake all replicas. See `RolloutServer.wake`."""
        await self._on_all(lambda server: server.wake(tags))

    async def stop(self) -> None:
        """Stop all replicas, lost ones included."""
        if self._health is not None:
            self._health.cancel()
            self._health = None
        everyone = [*self._turns.loads, *self._turns.lost, *self._joining]
        closing = [receiver.close() for receiver in self._receivers.values()]
        results = await asyncio.gather(*(server.stop() for server in everyone), *closing, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _receiver(self, server: RolloutServer, receive: WeightReceiver) -> WeightReceiver:
        """Receiver of one replica by the session's address, cached for later syncs."""
        key = (id(server), receive.address)
        if key not in self._receivers:
            self._receivers[key] = CkptReceiver(receive.address)
        return self._receivers[key]

    async def _on_all(self, call: Callable[[RolloutServer], Awaitable[Any]]) -> None:
        await asyncio.gather(*(call(server) for server in self._turns.loads))


async def _look_at(server: RolloutServer, turns: Turns) -> None:
    try:
        await server.check_health()
    except ServerLostError as error:
        await turns.leave_out(server, error)
        # Requests that wait for its answer may never hear of the loss; stopping it ends them, and they are resumed.
        await asyncio.gather(server.stop(), return_exceptions=True)


def deadline_of(request: GenerateRequest) -> float | None:
    """Deadline of a request by the event loop's clock; None if it has none."""
    return None if request.timeout_s is None else asyncio.get_running_loop().time() + request.timeout_s


def due(request: GenerateRequest, deadline: float | None) -> GenerateRequest:
    """Copy of the request whose `timeout_s` is the time left."""
    if deadline is None:
        return request
    return replace(request, timeout_s=max(round(deadline - asyncio.get_running_loop().time(), 3), 0.001))


def check_due(request: GenerateRequest, deadline: float | None, loss: ServerLostError) -> None:
    """Check that there is time left to resume a request after a loss.

    Raises:
        RequestTimeoutError: its deadline is over; the loss is chained.
    """
    if deadline is not None and asyncio.get_running_loop().time() >= deadline:
        raise RequestTimeoutError(
            f"request {request.request_id!r} was not done when its time was over, and its server was lost: {loss}"
        ) from loss


def rest_of(request: GenerateRequest, done: TokenOutput) -> GenerateRequest | None:
    """Request that continues where `done` ended; None if nothing is left to generate.

    Its prompt is the old prompt plus the tokens generated so far. Outputs about the prompt came with the first part.
    """
    left = request.sampling_params.max_new_tokens - len(done.token_ids)
    if left <= 0:
        return None
    num_known = len(request.prompt_token_ids) + len(done.token_ids)
    return replace(
        request,
        prompt_token_ids=request.prompt_token_ids + done.token_ids,
        sampled_spans=(*request.sampled_spans, (len(request.prompt_token_ids), num_known)),
        sampling_params=replace(request.sampling_params, max_new_tokens=left),
        returns_prompt_logprobs=request.returns_prompt_logprobs and not done.prompt_logprobs,
    )


def joined(done: TokenOutput, rest: TokenOutput, *, num_prompt_tokens: int) -> TokenOutput:
    """Join two parts of an output; the finish reason is that of the second.

    Args:
        done: The first part.
        rest: Output of the request that `rest_of` made.
        num_prompt_tokens: Prompt length of the first request.
    """
    # If the first part came without prompt log-probs, the second's cover the first part's tokens too.
    prompt_logprobs = done.prompt_logprobs or rest.prompt_logprobs[: max(num_prompt_tokens - 1, 0)]
    return replace(
        rest,
        token_ids=done.token_ids + rest.token_ids,
        logprobs=done.logprobs + rest.logprobs,
        weight_versions=done.weight_versions + rest.weight_versions,
        top_logprobs=done.top_logprobs + rest.top_logprobs,
        prompt_logprobs=prompt_logprobs,
        # The second part has the experts of its whole prompt, the first part's tokens included.
        routed_experts=done.routed_experts + rest.routed_experts[len(done.routed_experts) :],
    )


class Placement(Generic[K]):
    """Placement of requests on replicas: by session, then by cached prefix, then by load. No I/O."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, K] = OrderedDict()
        self._blocks: OrderedDict[int, K] = OrderedDict()

    def choose(self, loads: Mapping[K, int], token_ids: Sequence[int], session_id: str | None) -> K:
        """Choose a replica of `loads` (requests in flight by replica, not empty), and remember the choice."""
        blocks = block_keys(token_ids)
        chosen = self._sessions.get(session_id) if session_id is not None else None
        if chosen is None or chosen not in loads:
            chosen = self._by_prefix(loads, blocks)
        if session_id is not None:
            remember(self._sessions, session_id, chosen, MAX_SESSIONS)
        for block in blocks:
            remember(self._blocks, block, chosen, MAX_BLOCKS)
        return chosen

    def _by_prefix(self, loads: Mapping[K, int], blocks: Sequence[int]) -> K:
        least = min(loads, key=lambda each: loads[each])
        holders = (self._blocks.get(block) for block in reversed(blocks))
        longest = next((holder for holder in holders if holder is not None and holder in loads), None)
        if longest is not None and loads[longest] <= loads[least] + MAX_IMBALANCE:
            return longest
        return least

    def forget_prefixes(self) -> None:
        """Forget all prefixes, after caches were dropped."""
        self._blocks.clear()


def block_keys(token_ids: Sequence[int]) -> list[int]:
    """Hash of every full block of a prompt, chained with the blocks before it."""
    keys: list[int] = []
    key = 0
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, *token_ids[start : start + BLOCK_TOKENS]))
        keys.append(key)
    return keys


def remember(known: OrderedDict[str, K] | OrderedDict[int, K], key: str | int, value: K, limit: int) -> None:
    """Set an entry of an LRU mapping of at most `limit` entries."""
    entries: OrderedDict[str | int, K] = known  # pyright: ignore[reportAssignmentType]  # both are of one kind of key
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > limit:
        entries.popitem(last=False)
