"""Embedded server: a `RolloutServer` with an event loop in front, the engine thread behind, HTTP beside."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rl_rollout.backends.embedded.engine import Engine
from rl_rollout.backends.embedded.engine_thread import EngineThread
from rl_rollout.backends.embedded.model.lora import UPDATE_PREFIX
from rl_rollout.backends.embedded.model.model_runner import choose_device, choose_num_threads, load_model
from rl_rollout.backends.embedded.model.weights import WeightStore
from rl_rollout.backends.embedded.output_processor import last_chunk
from rl_rollout.base import RolloutServer
from rl_rollout.errors import RequestError, RequestTimeoutError, RolloutError, ServerLostError, WeightUpdateError
from rl_rollout.http.server import Endpoint
from rl_rollout.receiver import CkptReceiver
from rl_rollout.types import Capabilities, FinishReason, ServerAddress, TokenChunk, TokenOutput
from rl_rollout.validation import check_adapter, check_extras, check_limits, check_request, check_version

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from collections.abc import Set as AbstractSet
    from concurrent.futures import Future

    from rl_rollout.backends.embedded.engine import Event
    from rl_rollout.backends.embedded.multimodal import ImagePrompt
    from rl_rollout.base import PauseMode, WeightReceiver
    from rl_rollout.types import GenerateRequest, ServerConfig

T = TypeVar("T")

GRACE_S = 5.0
"""Seconds that the engine has to end a request whose deadline is over."""
PROGRESS_TOKENS = 32
"""New tokens after which `on_progress` is called."""


class EmbeddedServer(RolloutServer):
    """Rollout server with a continuous-batching engine in a thread of this process.

    Given its seed, a request's tokens do not depend on when it is served or which requests share its batch. New weights
    are staged while decoding goes on, and swapped in between two steps; the cache of requests in flight is recomputed.
    """

    tells_progress = True

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._name = Path(config.model_path).resolve().name
        self._endpoint = Endpoint(self, config, model_name=self._name)
        self._address: ServerAddress | None = None
        self._capabilities = Capabilities(takes_slices=True, updates_adapters=True)
        self._is_stopped = False
        self._outbox: list[tuple[GenerateRequest, int]] = []
        self._forgotten: list[str] = []
        """Ids of requests whose callers have left; aborted after the outbox is handed over."""
        self._seen: dict[str, ImagePrompt] = {}
        """Prepared images of the requests in the outbox."""
        self._seeing: set[asyncio.Future[Any]] = set()
        """Preparations of images under way."""
        self._listeners: dict[str, Callable[[TokenChunk], None]] = {}
        self._futures: dict[str, asyncio.Future[TokenOutput]] = {}
        self._streams: dict[str, asyncio.Queue[Event]] = {}
        self._owed: Counter[str] = Counter()
        """Number of final events due by request id: above 1 where a caller gave up and the id was used again."""
        self._update_lock = asyncio.Lock()
        self._may_hold_weights = True
        self._keeps_staged = False
        """Whether the update under way keeps its staging copy as the base of differences."""

    @property
    def capabilities(self) -> Capabilities:
        """See `RolloutServer.capabilities`: routed experts, adapters and images depend on the loaded model."""
        return self._capabilities

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, tokens."""
        return self._model.max_model_len

    # ---- start and stop

    async def start(self) -> ServerAddress:
        """Load the model and bind the HTTP endpoint; returns its address. Idempotent."""
        if self._address is not None:
            return self._address
        if self._is_stopped:
            raise ServerLostError("this server was stopped; create another")
        await self._endpoint.check_port()
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(self._build, self._post)
        self._engine = await asyncio.wrap_future(self._thread.start())
        self._model = self._engine.model
        self._capabilities = Capabilities(
            gives_routed_experts=self._model.experts.does_tell,
            has_adapters=bool(self._model.adapters.names),
            takes_images=self._model.image_reader is not None,
            takes_slices=True,
            updates_adapters=True,
        )
        if self._model.fused is not None:
            # New threads start with the number of torch threads that was set last, which was the engine's 1.
            torch.set_num_threads(torch.get_num_threads())
        try:
            url = await self._endpoint.start()
        except BaseException:
            self._thread.stop(self.config.timeout_s)
            raise
        self._address = ServerAddress(url=url, model=self._name, pid=os.getpid())
        return self._address

    def _build(self) -> Engine:
        most, chosen = torch.get_num_threads(), self.config.num_threads
        is_cuda = choose_device(self.config.device).type == "cuda"
        if not is_cuda:
            # OpenMP keeps a team of threads for every thread that ever ran a parallel operation. With more of them than
            # cores, those of others in this process, such as a trainer, sleep and wake between any two operations.
            torch.set_num_threads(1)
        model = load_model(self.config)
        if is_cuda:  # the current device is a property of the thread, and this is the engine's
            torch.cuda.set_device(torch.empty(0, device=model.device).device)  # its number, which may not be given
        elif not chosen:
            num_parameters = sum(parameter.numel() for parameter in model.module.parameters())
            chosen = choose_num_threads(num_parameters, most, is_fused=model.fused is not None)
        if model.fused is not None:
            model.fused.num_threads = chosen  # its own pool, not OpenMP's
        elif chosen:
            torch.set_num_threads(chosen)
        self._num_threads = chosen or most
        memory = None if model.memory is None else model.memory.memory
        self._weights = WeightStore(model.module, keeps_places=is_cuda, memory=memory)
        return Engine(model, self.config)

    async def stop(self) -> None:
        """End requests with `ServerLostError`, close the endpoint and free the model. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._address is None:
            return
        ended = await asyncio.to_thread(self._thread.stop, self.config.timeout_s)
        await self._endpoint.stop()
        if not ended:
            raise RequestTimeoutError(f"the engine's thread did not end within {self.config.timeout_s} s")
        self._engine.close()
        self._weights.release()
        if self._model.memory is not None:
            self._model.memory.memory.close()

    # ---- requests

    async def generate(
        self, request: GenerateRequest, on_progress: Callable[[TokenChunk], None] | None = None
    ) -> TokenOutput:
        """See `RolloutServer.generate`. `on_progress` gets new tokens every `PROGRESS_TOKENS`, except the last ones."""
        request, seen = await self._see(request)
        if on_progress is not None:
            self._listeners[request.request_id] = on_progress
        future: asyncio.Future[TokenOutput] = self._loop.create_future()
        self._futures[request.request_id] = future
        self._submit(request, seen, told_every=0 if on_progress is None else PROGRESS_TOKENS)
        try:
            done, _ = await asyncio.wait([future], timeout=request.timeout_s)
            return future.result() if done else await self._cut(request, future)
        except asyncio.CancelledError:
            self._forget(request)
            raise
        finally:
            future.cancel()
            del self._futures[request.request_id]
            self._listeners.pop(request.request_id, None)

    async def _cut(self, request: GenerateRequest, future: asyncio.Future[TokenOutput]) -> TokenOutput:
        """End a request whose own deadline is over; returns the tokens that it has."""
        self._end(request, FinishReason.TIMEOUT)
        done, _ = await asyncio.wait([future], timeout=GRACE_S)
        if not done or not (output := future.result()).token_ids:
            raise self._late(request)
        return output

    async def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `RolloutServer.generate_stream`: token by token."""
        request.check_streamable()
        request, seen = await self._see(request)
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self._streams[request.request_id] = queue
        self._submit(request, seen, told_every=1)
        # The deadline applies to every wait for a chunk, but not to the time that the caller takes over one.
        deadline = None if request.timeout_s is None else self._loop.time() + request.timeout_s
        num_told, is_over = 0, False
        try:
            while not is_over:
                try:
                    async with asyncio.timeout_at(deadline):
                        event = await queue.get()
                except TimeoutError:
                    self._end(request, FinishReason.TIMEOUT)
                    async with asyncio.timeout(GRACE_S):
                        event = await queue.get()
                    if isinstance(event, TokenOutput) and not event.token_ids:
                        is_over = True
                        raise
                is_over = not isinstance(event, TokenChunk)
                if isinstance(event, Exception):
                    raise event
                chunk = event if isinstance(event, TokenChunk) else last_chunk(event, num_told)
                num_told += len(chunk.token_ids)
                yield chunk
        except TimeoutError as error:
            if isinstance(error, RolloutError):
                raise
            raise self._late(request) from error
        finally:
            del self._streams[request.request_id]
            if not is_over:
                self._forget(request)

    async def _see(self, request: GenerateRequest) -> tuple[GenerateRequest, ImagePrompt | None]:
        """Validate a request, fill in the default adapter, and prepare its images."""
        if request.adapter is None and (adapter := self.config.options.get("default_adapter")) is not None:
            request = replace(request, adapter=adapter)
        self._check(request)
        image_reader, seen = self._model.image_reader, None
        if image_reader is not None:
            image_reader.check_blind(request)
            if request.images:
                work = asyncio.ensure_future(asyncio.to_thread(image_reader.see, request))
                self._seeing.add(work)
                work.add_done_callback(self._seeing.discard)
                request, seen = await work
                self._check(request)  # it is longer now, and time has passed
        return request, seen

    def _check(self, request: GenerateRequest) -> None:
        self._need_running()
        check_request(request, vocab_size=self._model.vocab_size, max_model_len=self._model.max_model_len)
        check_limits(request, self.config)
        check_extras(request, self.capabilities)
        check_adapter(request, self._model.adapters.names)
        if not self._engine.has_weights:
            raise WeightUpdateError("the weights were released by sleep(level=2); wake the server and update them")
        if request.request_id in self._futures or request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is in flight already")

    def _submit(self, request: GenerateRequest, seen: ImagePrompt | None, *, told_every: int) -> None:
        """Queue a request for the engine; all requests of one turn of the event loop are handed over in one call."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append((request, told_every))
        self._owed[request.request_id] += 1
        if seen is not None:
            self._seen[request.request_id] = seen

    def _flush(self) -> None:
        if self._forgotten:
            ids, self._forgotten = self._forgotten, []
            self._thread.call(lambda engine: engine.abort(ids))
        if self._outbox:
            batch, self._outbox = self._outbox, []
            images, self._seen = self._seen, {}
            submitted = self._thread.call(lambda engine: engine.submit(batch, images))
            submitted.add_done_callback(lambda done: self._refuse(batch, done.exception()))

    def _refuse(self, batch: list[tuple[GenerateRequest, int]], error: BaseException | None) -> None:
        """Fail requests that never reached the engine, for example because it had been stopped."""
        if isinstance(error, Exception):
            self._post([(request.request_id, error) for request, _ in batch])

    def _forget(self, request: GenerateRequest) -> None:
        """Abort a request whose caller has left; one command per turn of the event loop."""
        if self._outbox:
            self._flush()
        if not self._forgotten:
            self._loop.call_soon(self._flush)
        self._forgotten.append(request.request_id)

    def _end(self, request: GenerateRequest, reason: FinishReason) -> None:
        self._flush()
        self._thread.call(lambda engine: engine.abort([request.request_id], reason=reason))

    def _late(self, request: GenerateRequest) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"request {request.request_id!r} did not finish within {request.timeout_s} s, its own timeout_s, and has "
            f"no token, on {self._address and self._address.url}; give it more time, or none to count its turn alone"
        )

    def _post(self, events: list[tuple[str, Event]]) -> None:
        """Post events to the event loop in one call; runs in the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._hand_out, events)

    def _hand_out(self, events: list[tuple[str, Event]]) -> None:
        for request_id, event in events:
            is_of_another = self._owed[request_id] > 1
            if not isinstance(event, TokenChunk):
                self._owed[request_id] -= 1
                if not self._owed[request_id]:
                    del self._owed[request_id]
            if is_of_another:
                continue
            stream, future = self._streams.get(request_id), self._futures.get(request_id)
            if stream is not None:
                stream.put_nowait(event)
            elif isinstance(event, TokenChunk):
                if request_id in self._listeners:
                    self._listeners[request_id](event)
            elif future is not None and not future.done():
                if isinstance(event, Exception):
                    future.set_exception(event)
                else:
                    future.set_result(event)
            # Otherwise its caller gave up (deadline, cancelled), and nobody waits.

    # ---- control

    async def check_health(self) -> None:
        """See `RolloutServer.check_health`."""
        self._need_running()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `RolloutServer.abort`."""
        await self._command(lambda engine: engine.abort(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutServer.pause`."""
        if mode not in ("abort", "wait", "keep"):
            raise RequestError(f"pause mode {mode!r} is not one of abort, wait, keep")
        await self._command(lambda engine: engine.pause(mode))
        if mode == "wait":
            await self._wait(self._thread.drained(), "finish the requests in flight; new ones are held")

    async def resume(self) -> None:
        """See `RolloutServer.resume`."""
        await self._command(lambda engine: engine.resume())

    async def update_weights(self, receive: WeightReceiver, version: int) -> None:
        """See `RolloutServer.update_weights`. Decoding goes on while tensors arrive."""
        async with self._update_lock:
            self._need_running()
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    await self._stage(receive, version)
            except Exception as error:
                why = f"{receive.address!r}: {str(error) or type(error).__name__}; {self._who_serves()}"
                raise WeightUpdateError(f"version {version} was not installed from {why}") from error
            await self._command(lambda engine: self._install(engine, version))

    async def _stage(self, receive: WeightReceiver, version: int) -> None:
        if not self._may_hold_weights:
            raise WeightUpdateError("the server sleeps without weights; call wake(['weights']) first")
        check_version(version)
        self._weights.begin()
        self._model.adapters.begin()
        self._keeps_staged = isinstance(receive, CkptReceiver) and receive.takes_differences
        if isinstance(receive, CkptReceiver) and receive.takes_slices:
            await self._stage_slices(receive, version)
            return
        self._weights.forget_targets()
        iterator = receive.receive_weights()
        try:
            async for name, tensor in iterator:
                self._check_version(receive, version)
                (self._model.adapters if name.startswith(UPDATE_PREFIX) else self._weights).stage(name, tensor)
        finally:
            # Closed at once, so that the sender learns that this end stopped reading.
            if (aclose := getattr(iterator, "aclose", None)) is not None:
                await aclose()
        self._check_version(receive, version)
        self._check_complete()

    async def _stage_slices(self, receive: CkptReceiver, version: int) -> None:
        """Receive slices into the store's targets, where they are read back (digest) before the vote."""

        def on_landed(names: AbstractSet[str]) -> None:  # in a thread of the receiver's
            self._check_version(receive, version)
            self._weights.note_arrived(names)
            self._check_complete()

        await receive.receive_slices(self._weights.targets(), on_landed)

    def _check_complete(self) -> None:
        self._model.adapters.check_complete()
        if self._weights.has_arrived or not self._model.adapters.has_staged:
            self._weights.check_complete()

    def _check_version(self, receive: WeightReceiver, version: int) -> None:
        if receive.version not in (None, version):
            raise WeightUpdateError(f"version {receive.version} arrived instead")

    def _install(self, engine: Engine, version: int) -> None:
        has_moved = False
        if self._weights.has_arrived:
            has_moved = self._weights.swap(keeps_staged=self._keeps_staged)
            self._model.note_new_weights()
        self._model.adapters.swap()
        engine.set_version(version, has_moved=has_moved)

    def _who_serves(self) -> str:
        if self._engine.has_weights:
            return f"version {self._engine.weight_version} still serves"
        return "the server has no weights and refuses requests until an update succeeds"

    async def sleep(self, level: int = 1) -> None:
        """See `RolloutServer.sleep`. Requests in flight are frozen and go on after `wake`."""
        if level not in (1, 2):
            raise RequestError(f"sleep level {level!r} is not 1 (KV cache) or 2 (KV cache and weights)")
        async with self._update_lock:
            await self._command(lambda engine: self._fall_asleep(engine, level))

    def _fall_asleep(self, engine: Engine, level: int) -> None:
        engine.is_asleep = True
        engine.drop_cache()
        self._weights.release_staging()
        if level == 2:
            self._may_hold_weights = False
            engine.has_weights = False
            self._weights.release()
            self._model.note_new_weights()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()  # another process cannot use what torch's allocator keeps

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """See `RolloutServer.wake`. Decoding starts again with the tag `kv_cache`, and with an update after level 2."""
        unknown = sorted(set(tags) - {"weights", "kv_cache"})
        if unknown or not tags:
            raise RequestError(f"wake tags {list(tags)} must be some of weights, kv_cache")
        await self._command(lambda engine: self._wake_up(engine, tags))

    def _wake_up(self, engine: Engine, tags: Sequence[str]) -> None:
        # Memory is allocated when it is first needed: weights by the next update, the cache by the next step.
        if "weights" in tags:
            self._may_hold_weights = True
        if "kv_cache" in tags:
            engine.is_asleep = False

    def status(self) -> dict[str, Any]:
        """Status for `/health`: numbers of requests, weight version, and the model's CPU threads."""
        engine = self._engine
        return {
            "status": "ok" if engine.has_weights else "no weights",
            "model": self._name,
            "pid": os.getpid(),
            "weight_version": engine.weight_version,
            "num_running": engine.num_running,
            "num_waiting": engine.num_waiting,
            "is_paused": engine.is_paused,
            "is_asleep": engine.is_asleep,
            "num_threads": self._num_threads,
        }

    def _need_running(self) -> None:
        if self._address is not None and not self._is_stopped and not self._thread.is_alive:
            raise ServerLostError(f"the engine of {self._name!r} (pid {os.getpid()}) has ended; its log tells why")
        if self._address is None or self._is_stopped:
            raise ServerLostError(f"the embedded server of {self._name!r} is not running; call start()")

    async def _command(self, command: Callable[[Engine], T]) -> T:
        """Run a command in the engine's thread, after everything that was asked before it."""
        self._need_running()
        if self._seeing:
            await asyncio.wait(self._seeing)
        self._flush()
        return await self._wait(self._thread.call(command), "take a command")

    async def _wait(self, future: Future[T], what: str) -> T:
        try:
            async with asyncio.timeout(self.config.timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            message = f"the engine of {self._name!r} (pid {os.getpid()}) did not {what}"
            raise RequestTimeoutError(f"{message}, within {self.config.timeout_s} s") from error
