"""Router: many replicas behind the interface of one."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_rollout.base import RolloutServer
from rl_rollout.errors import (
    ConfigError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    ServerLostError,
    WeightUpdateError,
)
from rl_rollout.receiver import CkptReceiver
from rl_rollout.router.placement import Placement
from rl_rollout.types import FinishReason, ServerAddress, TokenChunk, TokenOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence

    from rl_rollout.base import PauseMode, WeightReceiver
    from rl_rollout.types import Capabilities, GenerateRequest


class Router(RolloutServer):
    """Spreads requests over replicas, which may join and leave while it serves.

    A request goes to the replica that holds its session, else to one that has seen its prefix, else to the least
    loaded. A replica whose connection is lost is left out from then on, and what it had not answered goes on
    elsewhere: from the tokens that had come, where they had, each of them counted once. Everything else (pause,
    update_weights, ...) goes to all replicas at once.

    Args:
        servers: Replicas, started or not.
        max_in_flight: Requests that one replica is given at a time; 0 sets no limit. More wait here.
        max_waiting: Requests that may wait here; one more is refused with `OverloadedError`. 0 sets no limit.
        health_check_s: How often every replica is asked whether it is there, seconds; 0 never asks, so that a loss is
            noticed by the next request.
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
        self._loads: dict[RolloutServer, int] = dict.fromkeys(servers, 0)
        self._placement: Placement[RolloutServer] = Placement()
        self._lost: dict[RolloutServer, ServerLostError] = {}
        self._joining: dict[RolloutServer, asyncio.Future[None]] = {}
        self._receivers: dict[tuple[int, str], CkptReceiver] = {}
        self._max_in_flight = max_in_flight
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._health_check_s = health_check_s
        self._health: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._members = asyncio.Lock()
        """Held while replicas are updated, or one joins: nobody serves before it has the weights of all."""
        self._version: int | None = None
        self._aborted: set[str] = set()
        self._in_flight: set[str] = set()
        self._pause_mode: PauseMode | None = None

    @property
    def servers(self) -> tuple[RolloutServer, ...]:
        """Replicas that are in use; those that were lost, or wait for weights, are left out."""
        return tuple(self._loads)

    @property
    def lost(self) -> tuple[ServerLostError, ...]:
        """Why replicas were left out, in the order in which they were lost."""
        return tuple(self._lost.values())

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the first replica; all replicas must be alike."""
        return next(iter([*self._loads, *self._lost])).capabilities

    async def start(self) -> ServerAddress:
        """Start every replica; if one fails, stop the others and raise its error."""
        try:
            addresses = await asyncio.gather(*(server.start() for server in self._loads))
        except BaseException:
            await self.stop()
            raise
        if self._health_check_s and self._health is None:
            self._health = asyncio.create_task(self._watch())
        return ServerAddress(url="inproc:router", model=addresses[0].model, pid=os.getpid())

    # ---- members

    async def add(self, server: RolloutServer, receive: WeightReceiver | None = None) -> None:
        """Start a replica, and use it when it holds the weights that the others serve.

        It takes them by `receive`, from a sender that resends (rl-ckpt's `resend_current`); without, it takes
        part in the next `update_weights`, and this returns after that.

        Raises:
            WeightUpdateError: it did not get them; it is stopped and not used.
        """
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
        async with self._changed:
            self._loads[server] = 0
            self._changed.notify_all()

    async def remove(self, server: RolloutServer) -> None:
        """Take a replica out and stop it. What it has in flight goes on elsewhere, from the tokens that there are.

        Raises:
            ConfigError: it is not in use, or the last one.
        """
        if server not in self._loads:
            raise ConfigError("the server to remove is not one of the router's")
        if len(self._loads) == 1:
            raise ConfigError("the last replica cannot be removed; add another one first, or stop the router")
        del self._loads[server]
        if server.capabilities.pauses:
            await server.abort()
        await server.stop()

    async def _watch(self) -> None:
        """Ask every replica from time to time whether it is there."""
        while True:
            await asyncio.sleep(self._health_check_s)
            await asyncio.gather(*(self._look_at(server) for server in self.servers))

    async def _look_at(self, server: RolloutServer) -> None:
        try:
            await server.check_health()
        except ServerLostError as error:
            await self._leave_out(server, error)
            # What waits for its answer is told by its own connection, or never: it is ended and goes on elsewhere.
            await asyncio.gather(server.stop(), return_exceptions=True)

    # ---- requests

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Generate on one replica, and go on at another if that one is lost or removed.

        Raises:
            ServerLostError: every replica is gone; the last loss is chained.
            OverloadedError: all replicas are busy, and too many wait already.
        """
        deadline = deadline_of(request)
        with self._entered(request):
            done = TokenOutput.empty(request)
            left: GenerateRequest | None = request
            while left is not None:
                part, is_last = await self._generate_part(left, deadline)
                done = joined(done, part, num_prompt_tokens=len(request.prompt_token_ids))
                if is_last:
                    return done
                left = rest_of(request, done)
            return replace(done, finish_reason=FinishReason.LENGTH)  # lost after its last token, before it said so

    async def _generate_part(self, request: GenerateRequest, deadline: float | None) -> tuple[TokenOutput, bool]:
        """Output of one replica, and whether it is complete."""
        server = await self._take_turn(request, deadline)
        if server is None:
            return TokenOutput.empty(request), True
        try:
            output = await server.generate(due(request, deadline))
        except ServerLostError as error:
            await self._leave_out(server, error)
            check_due(request, deadline, error)
            return error.partial or TokenOutput.empty(request), False
        finally:
            await self._give_back(server)
        return output, self._is_over(request, output.finish_reason, server)

    async def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `RolloutServer.generate_stream`. Goes on at another replica as `generate` does.

        Raises:
            ServerLostError, OverloadedError: like `generate`.
        """
        request.check_streamable()
        deadline = deadline_of(request)
        with self._entered(request):
            left: GenerateRequest | None = request
            done = TokenOutput.empty(request)
            while left is not None:
                server = await self._take_turn(left, deadline)
                if server is None:
                    break
                try:
                    async with aclosing(server.generate_stream(due(left, deadline))) as chunks:
                        async for chunk in chunks:
                            done = done.extended(chunk)
                            if self._is_over(request, chunk.finish_reason, server):
                                yield chunk
                                return
                            yield replace(chunk, finish_reason=None)
                except ServerLostError as error:
                    await self._leave_out(server, error)
                    check_due(request, deadline, error)
                finally:
                    await self._give_back(server)
                left = rest_of(request, done)
            reason = FinishReason.ABORT if left is not None else FinishReason.LENGTH
            yield TokenChunk(token_ids=(), logprobs=(), weight_versions=(), finish_reason=reason)

    def _is_over(self, request: GenerateRequest, reason: FinishReason | None, server: RolloutServer) -> bool:
        """Whether a replica that ends a request with `reason` has ended it for its caller too."""
        is_cut_short = reason is FinishReason.ABORT and server not in self._loads
        return reason is not None and (not is_cut_short or request.request_id in self._aborted)

    @contextmanager
    def _entered(self, request: GenerateRequest) -> Generator[None]:
        """While it is in flight here."""
        if request.request_id in self._in_flight:
            raise RequestError(f"request id {request.request_id!r} is in flight already")
        self._in_flight.add(request.request_id)
        try:
            yield
        finally:
            self._in_flight.discard(request.request_id)
            self._aborted.discard(request.request_id)

    async def _take_turn(self, request: GenerateRequest, deadline: float | None) -> RolloutServer | None:
        """A replica that has room, waiting for one if none has; None if the request is aborted meanwhile."""
        async with self._changed:
            if not self._room() and self._loads:
                if self._max_waiting and self._num_waiting >= self._max_waiting:
                    raise OverloadedError(
                        f"request {request.request_id!r}: {len(self._loads)} replicas are given {self._max_in_flight} "
                        f"requests each, and {self._num_waiting} wait already; ask again later, or add replicas"
                    )
                self._num_waiting += 1
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._changed.wait_for(
                            lambda: self._room() or not self._loads or request.request_id in self._aborted
                        )
                except asyncio.CancelledError:
                    self._changed.notify(1)  # the room that this one may have been told of is another's
                    raise
                except TimeoutError as error:
                    self._changed.notify(1)
                    raise RequestTimeoutError(
                        f"request {request.request_id!r} got no replica in its time: {len(self._loads)} are given "
                        f"{self._max_in_flight} requests each, and {self._num_waiting} wait"
                    ) from error
                finally:
                    self._num_waiting -= 1
            if request.request_id in self._aborted:
                return None
            room = self._room()
            if not room:
                last = next(reversed(self._lost.values()))
                raise ServerLostError(f"all {len(self._lost)} replicas are lost; the last one: {last}") from last
            server = self._placement.choose(room, request.prompt_token_ids, request.session_id)
            self._loads[server] += 1
            return server

    def _room(self) -> dict[RolloutServer, int]:
        """Loads of the replicas that may be given a request."""
        if not self._max_in_flight:
            return self._loads
        return {server: load for server, load in self._loads.items() if load < self._max_in_flight}

    async def _give_back(self, server: RolloutServer) -> None:
        async with self._changed:
            if server in self._loads:
                self._loads[server] -= 1
            self._changed.notify(1)  # of those that wait: there is room for one

    async def _leave_out(self, server: RolloutServer, error: ServerLostError) -> None:
        async with self._changed:
            if server in self._loads:
                del self._loads[server]
                self._lost[server] = error
            self._changed.notify_all()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """On all replicas."""
        self._aborted.update(self._in_flight if request_ids is None else self._in_flight.intersection(request_ids))
        async with self._changed:
            self._changed.notify_all()  # those that wait for a replica
        await self._on_all(lambda server: server.abort(request_ids))

    # ---- control

    async def pause(self, mode: PauseMode) -> None:
        """On all replicas."""
        self._pause_mode = mode
        await self._on_all(lambda server: server.pause(mode))

    async def resume(self) -> None:
        """On all replicas."""
        self._pause_mode = None
        await self._on_all(lambda server: server.resume())

    async def update_weights(self, receive: WeightReceiver, version: int) -> None:
        """On all replicas at the same time, those that wait to join included, as one sync of the session.

        Several replicas cannot read one receiver, so each opens its own by `receive.address`; one replica is given
        `receive` itself.

        Raises:
            WeightUpdateError: names how many replicas failed; the first failure is chained.
        """
        async with self._members:
            joining = dict(self._joining)
            servers = (*self._loads, *joining)
            receivers = [receive] if len(servers) == 1 else [self._receiver(server, receive) for server in servers]
            results = await asyncio.gather(
                *(server.update_weights(each, version) for server, each in zip(servers, receivers, strict=True)),
                return_exceptions=True,
            )
            self._placement.forget_prefixes()
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
        """Tell who waits in `add` how it went."""
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
        """On all replicas."""
        await self._on_all(lambda server: server.sleep(level))

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """On all replicas."""
        await self._on_all(lambda server: server.wake(tags))

    async def stop(self) -> None:
        """Stop every replica, those that were lost included."""
        if self._health is not None:
            self._health.cancel()
            self._health = None
        everyone = [*self._loads, *self._lost, *self._joining]
        closing = [receiver.close() for receiver in self._receivers.values()]
        results = await asyncio.gather(*(server.stop() for server in everyone), *closing, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _receiver(self, server: RolloutServer, receive: WeightReceiver) -> WeightReceiver:
        """One session per replica and address, kept for later syncs."""
        key = (id(server), receive.address)
        if key not in self._receivers:
            self._receivers[key] = CkptReceiver(receive.address)
        return self._receivers[key]

    async def _on_all(self, call: Callable[[RolloutServer], Awaitable[Any]]) -> None:
        await asyncio.gather(*(call(server) for server in self._loads))


def deadline_of(request: GenerateRequest) -> float | None:
    """When its time is over, by the running loop's clock; None where it brings none."""
    return None if request.timeout_s is None else asyncio.get_running_loop().time() + request.timeout_s


def due(request: GenerateRequest, deadline: float | None) -> GenerateRequest:
    """The request with what is left of its time."""
    if deadline is None:
        return request
    return replace(request, timeout_s=max(round(deadline - asyncio.get_running_loop().time(), 3), 0.001))


def check_due(request: GenerateRequest, deadline: float | None, loss: ServerLostError) -> None:
    """See that there is time left to go on elsewhere after a loss.

    Raises:
        RequestTimeoutError: there is none; tells the loss.
    """
    if deadline is not None and asyncio.get_running_loop().time() >= deadline:
        raise RequestTimeoutError(
            f"request {request.request_id!r} was not done when its time was over, and its server was lost: {loss}"
        ) from loss


def rest_of(request: GenerateRequest, done: TokenOutput) -> GenerateRequest | None:
    """The request that goes on where `done` ended; None if there is nothing left to generate.

    Its prompt is the old one and the tokens that there are, each of which is generated, counted, and scored once.
    What is asked about the prompt was told with the first part.
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
    """Two parts as one; the reason is that of the second.

    Args:
        done: The first part.
        rest: What `rest_of` brought.
        num_prompt_tokens: Of the first request.
    """
    # If the first part came without any, the second's are of the first's tokens too.
    prompt_logprobs = done.prompt_logprobs or rest.prompt_logprobs[: max(num_prompt_tokens - 1, 0)]
    return replace(
        rest,
        token_ids=done.token_ids + rest.token_ids,
        logprobs=done.logprobs + rest.logprobs,
        weight_versions=done.weight_versions + rest.weight_versions,
        top_logprobs=done.top_logprobs + rest.top_logprobs,
        prompt_logprobs=prompt_logprobs,
        # The second part tells the experts of all tokens that it was given, those of the first included.
        routed_experts=done.routed_experts + rest.routed_experts[len(done.routed_experts) :],
    )
