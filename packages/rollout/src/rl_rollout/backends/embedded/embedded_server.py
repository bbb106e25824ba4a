"""Embedded server: a `RolloutServer` with an event loop in front, the engine thread behind, and HTTP on the side."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rl_csrc.inference.audio import takes_audio
from rl_csrc.inference.videos import video_columns
from rl_rollout.backends.embedded.decode_engine import Engine
from rl_rollout.backends.embedded.grammar import Grammars
from rl_rollout.backends.embedded.model.model_runner import choose_device, choose_num_threads, load_model
from rl_rollout.backends.embedded.model.weights import WeightStore
from rl_rollout.backends.embedded.output_processor import last_chunk
from rl_rollout.backends.embedded.requests import RequestsInFlight
from rl_rollout.backends.embedded.updates import WeightUpdates
from rl_rollout.base import RolloutServer
from rl_rollout.errors import RequestError, RequestTimeoutError, RolloutError, ServerLostError, WeightUpdateError
from rl_rollout.http.endpoint import Endpoint
from rl_rollout.types import Capabilities, FinishReason, ServerAddress, TokenChunk, TokenOutput
from rl_rollout.validation import check_adapter, check_extras, check_limits, check_request, read_model_config

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from concurrent.futures import Future

    from rl_rollout.backends.embedded.decode_engine import Event
    from rl_rollout.backends.embedded.grammar import Matcher
    from rl_rollout.backends.embedded.image_prompt import ImagePrompt
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
        values = read_model_config(config.model_path)
        self._capabilities = Capabilities(
            takes_slices=True,
            updates_adapters=True,
            structured="model",
            takes_videos=bool(video_columns(values)),
            takes_audio=takes_audio(values),
        )
        self._is_stopped = False
        self._seeing: set[asyncio.Future[Any]] = set()
        """Preparations of images under way."""
        self._update_lock = asyncio.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """See `RolloutServer.capabilities`: routed experts, adapters and images depend on the loaded model."""
        return self._capabilities

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, tokens."""
        return self.model.max_model_len

    # ---- start and stop

    async def start(self) -> ServerAddress:
        """Load the model and bind the HTTP endpoint; returns its address. Idempotent."""
        if self._address is not None:
            return self._address
        if self._is_stopped:
            raise ServerLostError("this server was stopped; create another")
        await self._endpoint.check_port()
        self._loop = asyncio.get_running_loop()
        self.requests = RequestsInFlight(self._loop, self._build)
        self.engine = await asyncio.wrap_future(self.requests.thread.start())
        self.model = self.engine.model
        self._capabilities = Capabilities(
            gives_routed_experts=self.model.experts.reports_choice,
            has_adapters=bool(self.model.adapters.max_adapters),
            takes_images=self.model.image_reader is not None,
            takes_videos=self.model.image_reader is not None and self.model.image_reader.takes_videos,
            takes_audio=self.model.image_reader is not None and self.model.image_reader.takes_audio,
            takes_slices=True,
            updates_adapters=True,
            structured="model",
        )
        self._grammars = Grammars(self.config.model_path, self.model.vocab_size, self.model.eos_token_ids)
        if self.model.fused is not None:
            # New threads start with the number of torch threads that was set last, which was the engine's 1.
            torch.set_num_threads(torch.get_num_threads())
        try:
            url = await self._endpoint.start()
        except BaseException:
            self.requests.thread.stop(self.config.timeout_s)
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
        self._updates = WeightUpdates(model, WeightStore(model.module, keeps_places=is_cuda, memory=memory))
        return Engine(model, self.config)

    async def stop(self) -> None:
        """End requests with `ServerLostError`, close the endpoint and free the model. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._address is None:
            return
        ended = await asyncio.to_thread(self.requests.thread.stop, self.config.timeout_s)
        await self._endpoint.stop()
        if not ended:
            raise RequestTimeoutError(f"the engine's thread did not end within {self.config.timeout_s} s")
        self.engine.close()
        self._updates.close()

    # ---- requests

    async def generate(
        self, request: GenerateRequest, on_progress: Callable[[TokenChunk], None] | None = None
    ) -> TokenOutput:
        """See `RolloutServer.generate`. `on_progress` gets new tokens every `PROGRESS_TOKENS`, except the last ones."""
        request, seen, matcher = await self._see(request)
        if on_progress is not None:
            self.requests.listeners[request.request_id] = on_progress
        future: asyncio.Future[TokenOutput] = self._loop.create_future()
        self.requests.futures[request.request_id] = future
        self.requests.submit(request, seen, matcher, report_every=0 if on_progress is None else PROGRESS_TOKENS)
        try:
            done, _ = await asyncio.wait([future], timeout=request.timeout_s)
            return future.result() if done else await self._cut(request, future)
        except asyncio.CancelledError:
            self.requests.abandon(request)
            raise
        finally:
            future.cancel()
            del self.requests.futures[request.request_id]
            self.requests.listeners.pop(request.request_id, None)

    async def _cut(self, request: GenerateRequest, future: asyncio.Future[TokenOutput]) -> TokenOutput:
        """End a request whose own deadline is over; returns the tokens that it has."""
        self.requests.end(request, FinishReason.TIMEOUT)
        done, _ = await asyncio.wait([future], timeout=GRACE_S)
        if not done or not (output := future.result()).token_ids:
            raise self._late(request)
        return output

    async def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `RolloutServer.generate_stream`: token by token."""
        request.check_streamable()
        request, seen, matcher = await self._see(request)
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self.requests.streams[request.request_id] = queue
        self.requests.submit(request, seen, matcher, report_every=1)
        # The deadline applies to every wait for a chunk, but not to the time that the caller takes over one.
        deadline = None if request.timeout_s is None else self._loop.time() + request.timeout_s
        num_reported, is_over = 0, False
        try:
            while not is_over:
                try:
                    async with asyncio.timeout_at(deadline):
                        event = await queue.get()
                except TimeoutError:
                    self.requests.end(request, FinishReason.TIMEOUT)
                    async with asyncio.timeout(GRACE_S):
                        event = await queue.get()
                    if isinstance(event, TokenOutput) and not event.token_ids:
                        is_over = True
                        raise
                is_over = not isinstance(event, TokenChunk)
                if isinstance(event, Exception):
                    raise event
                chunk = event if isinstance(event, TokenChunk) else last_chunk(event, num_reported)
                num_reported += len(chunk.token_ids)
                yield chunk
        except TimeoutError as error:
            if isinstance(error, RolloutError):
                raise
            raise self._late(request) from error
        finally:
            del self.requests.streams[request.request_id]
            if not is_over:
                self.requests.abandon(request)

    async def _see(self, request: GenerateRequest) -> tuple[GenerateRequest, ImagePrompt | None, Matcher | None]:
        """Validate a request, fill in the default adapter, prepare its images, and compile its structure."""
        if request.adapter is None and (adapter := self.config.options.get("default_adapter")) is not None:
            request = replace(request, adapter=adapter)
        self._check(request)
        image_reader, seen = self.model.image_reader, None
        if image_reader is not None:
            image_reader.check_blind(request)
            if request.images:
                work = asyncio.ensure_future(asyncio.to_thread(image_reader.see, request))
                self._seeing.add(work)
                work.add_done_callback(self._seeing.discard)
                request, seen = await work
                self._check(request)  # it is longer now, and time has passed
        matcher = None
        if request.sampling_params.is_structured:
            matcher = await asyncio.to_thread(self._grammars.matcher, request)
            self._check(request)
        return request, seen, matcher

    def _check(self, request: GenerateRequest) -> None:
        self._need_running()
        check_request(request, vocab_size=self.model.vocab_size, max_model_len=self.model.max_model_len)
        check_limits(request, self.config)
        check_extras(request, self.capabilities)
        check_adapter(request, self.model.adapters.names)
        if not self.engine.has_weights:
            raise WeightUpdateError("the weights were released by sleep(level=2); wake the server and update them")
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is in flight already")

    def _late(self, request: GenerateRequest) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"request {request.request_id!r} did not finish within {request.timeout_s} s, its own timeout_s, and has "
            f"no token, on {self._address and self._address.url}; give it more time, or none to count its turn alone"
        )

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
            await self._wait(self.requests.thread.drained(), "finish the requests in flight; new ones are held")

    async def resume(self) -> None:
        """See `RolloutServer.resume`."""
        await self._command(lambda engine: engine.resume())

    async def update_weights(self, receive: WeightReceiver, version: int) -> None:
        """See `RolloutServer.update_weights`. Decoding goes on while tensors arrive."""
        async with self._update_lock:
            self._need_running()
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    await self._updates.stage(receive, version)
            except Exception as error:
                why = f"{receive.address!r}: {str(error) or type(error).__name__}; {self._who_serves()}"
                raise WeightUpdateError(f"version {version} was not installed from {why}") from error
            await self._command(lambda engine: self._updates.install(engine, version))

    def _who_serves(self) -> str:
        if self.engine.has_weights:
            return f"version {self.engine.weight_version} still serves"
        return "the server has no weights and refuses requests until an update succeeds"

    async def sleep(self, level: int = 1) -> None:
        """See `RolloutServer.sleep`. Requests in flight are frozen and go on after `wake`."""
        if level not in (1, 2):
            raise RequestError(f"sleep level {level!r} is not 1 (KV cache) or 2 (KV cache and weights)")
        async with self._update_lock:
            await self._command(lambda engine: self._updates.fall_asleep(engine, level))

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """See `RolloutServer.wake`. Decoding starts again with the tag `kv_cache`, and with an update after level 2."""
        unknown = sorted(set(tags) - {"weights", "kv_cache"})
        if unknown or not tags:
            raise RequestError(f"wake tags {list(tags)} must be some of weights, kv_cache")
        await self._command(lambda engine: self._updates.wake_up(engine, tags))

    def status(self) -> dict[str, Any]:
        """Status for `/health`: requests, prompt tokens so far, weight version, and the model's CPU threads."""
        engine = self.engine
        return {
            "status": "ok" if engine.has_weights else "no weights",
            "model": self._name,
            "pid": os.getpid(),
            "weight_version": engine.weight_version,
            "num_running": engine.num_running,
            "num_waiting": engine.num_waiting,
            "num_prompt_tokens": engine.scheduler.num_prompt_tokens,
            "num_cached_prompt_tokens": engine.scheduler.num_cached_tokens,
            "num_passes": engine.steps.num_passes,
            "num_draft_tokens": engine.steps.num_drafted,
            "num_accepted_draft_tokens": engine.steps.num_accepted,
            "is_paused": engine.is_paused,
            "is_asleep": engine.is_asleep,
            "num_threads": self._num_threads,
        }

    def _need_running(self) -> None:
        if self._address is not None and not self._is_stopped and not self.requests.thread.is_alive:
            raise ServerLostError(f"the engine of {self._name!r} (pid {os.getpid()}) has ended; see its log")
        if self._address is None or self._is_stopped:
            raise ServerLostError(f"the embedded server of {self._name!r} is not running; call start()")

    async def _command(self, command: Callable[[Engine], T]) -> T:
        """Run a command in the engine's thread, after everything that was asked before it."""
        self._need_running()
        if self._seeing:
            await asyncio.wait(self._seeing)
        self.requests.flush()
        return await self._wait(self.requests.thread.call(command), "take a command")

    async def _wait(self, future: Future[T], what: str) -> T:
        try:
            async with asyncio.timeout(self.config.timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            message = f"the engine of {self._name!r} (pid {os.getpid()}) did not {what}"
            raise RequestTimeoutError(f"{message}, within {self.config.timeout_s} s") from error
