"""Base class of backends that run a third-party server (vLLM, SGLang) as a subprocess and talk to it over HTTP.

The subprocess listens on a UNIX socket or on loopback, known to this process alone. In front of it is the same HTTP
endpoint as that of every other server here, so that clients need not know which engine serves them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
import tempfile
import uuid
from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_csrc.inference.images import takes_images
from rl_rollout.backends.external.upstream import Upstream
from rl_rollout.base import RolloutServer
from rl_rollout.errors import (
    ConfigError,
    GenerationError,
    RequestError,
    RequestTimeoutError,
    RolloutError,
    ServerLostError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_rollout.http.server import Endpoint
from rl_rollout.multimodal import load_preparer
from rl_rollout.process import STOP_TIMEOUT_S, ChildProcess
from rl_rollout.types import FinishReason, ServerAddress, TensorPart, TokenChunk, TokenOutput
from rl_rollout.validation import (
    check_adapter,
    check_answer,
    check_extras,
    check_finite,
    check_length,
    check_limits,
    check_request,
    check_version,
    folder_tokens,
    read_adapter_config,
    read_model_config,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import aiohttp

    from rl_rollout.base import PauseMode, WeightReceiver
    from rl_rollout.multimodal import ImagePreparer, PreparedImages
    from rl_rollout.types import GenerateRequest, ServerConfig


IMAGE_MODELS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types whose images are prepared here, for third-party servers."""
COMMON_OPTIONS = {
    "args": "further arguments of the server, a list or a line",
    "env": "environment variables of the server beside those of this process",
}
"""Options of all third-party backends."""
ADAPTER_OPTIONS = {
    "adapters": "name to folder of each LoRA adapter, in peft's format",
    "default_adapter": "the adapter of requests that ask for none",
}
"""Options of the backends that serve adapters."""


def has_vision(model_config: Mapping[str, Any]) -> bool:
    """Whether a model, by its `config.json`, takes images."""
    return "vision_config" in model_config


def find_preparer(model_path: str, model_config: Mapping[str, Any]) -> ImagePreparer | None:
    """Image preprocessor for third-party servers; None where the model's image interface is not supported."""
    if model_config.get("model_type") not in IMAGE_MODELS or not takes_images(model_config):
        return None
    num_merged = int(model_config["vision_config"]["spatial_merge_size"]) ** 2
    return load_preparer(model_path, token_id=int(model_config["image_token_id"]), num_merged=num_merged)


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA adapter that a server is started with."""

    name: str
    folder: str
    """Absolute path of its folder."""
    rank: int
    config: Mapping[str, Any]
    """Contents of its `adapter_config.json`."""


def read_adapters(found: Any, model_name: str) -> dict[str, Adapter]:
    """Read the adapters of the option `adapters`, by name.

    Raises:
        ConfigError: it is no object of names and folders, or a name is the model's.
        ModelFolderError: a folder holds no LoRA adapter.
    """
    if not isinstance(found, dict) or not all(isinstance(folder, str) for folder in found.values()):
        raise ConfigError(f"option adapters={found!r} must be an object of names and folders")
    if model_name in found:
        raise ConfigError(f"option adapters: {model_name!r} is the name of the model; call the adapter something else")
    return {name: _read_adapter(name, folder) for name, folder in found.items()}


def _read_adapter(name: str, folder: str) -> Adapter:
    config = read_adapter_config(name, folder)
    return Adapter(name, str(Path(folder).resolve()), int(config["r"]), config)


def read_default(found: Any, adapters: Mapping[str, Adapter]) -> str | None:
    """Validate the option `default_adapter`.

    Raises:
        ConfigError: it is none of the adapters.
    """
    if found is not None and found not in adapters:
        names = ", ".join(adapters) or "none"
        raise ConfigError(f"option default_adapter={found!r} is none of the adapters: {names}")
    return found


def read_environment(found: Any) -> dict[str, str]:
    """Validate the option `env`: environment variables of the subprocess.

    Raises:
        ConfigError: it is no object.
    """
    if not isinstance(found, dict):
        raise ConfigError(f"option env={found!r} must be an object of names and values")
    return {str(name): str(value) for name, value in found.items()}


def words(found: Any, name: str) -> list[str]:
    """Words of an option that is a list of strings, or one command line.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(found, str):
        return shlex.split(found)
    if not isinstance(found, list | tuple) or (not found and name == "command"):
        raise ConfigError(f"option {name}={found!r} must be a list of words, or a line of them")
    return [str(word) for word in found]


def check_arguments(arguments: Sequence[str], given: Mapping[str, str]) -> None:
    """Check that the option `args` has no argument that `ServerConfig.parallel` sets and could contradict.

    Args:
        arguments: Words of the option `args`.
        given: By argument, the field of `ServerParallel` that writes it.

    Raises:
        ConfigError: names the argument and the field.
    """
    for word in arguments:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in given:
            raise ConfigError(
                f"args have {word}, which the layout of the replica gives: leave it out, and set parallel "
                f"{given[flag]} (rollout.parallel={{{given[flag]}: N}} of rl-train, --parallel {given[flag]}=N of "
                "rl-serve), so that GPUs and receivers of weights are counted by it"
            )


def is_quantised(arguments: Sequence[str], model_config: Mapping[str, Any]) -> bool:
    """Whether the server holds weights in another format than they are sent in, so that they cannot be compared.

    By the arguments of vLLM and SGLang, or as the folder's own are.
    """
    flags = ("--quantization", "-q", "--torchao-config")
    asked = any(word.partition("=")[0].replace("_", "-") in flags for word in arguments)
    return asked or model_config.get("quantization_config") is not None


GRACE_S = 5.0
"""Seconds that a request may take to end when its deadline is over."""
WORKERS_S = 0.5
"""Seconds between two looks whether the server's worker processes live."""
LANDING_CHECK_S = 0.02
"""Seconds between two looks whether all slices of a sync have landed."""
CHECK_S = 0.2
"""Seconds between two checks whether a starting server is ready, and between two aborts of a request."""


class Flight:
    """Request in flight.

    Args:
        request: The request.
        on_progress: Called with every chunk but the last, of a server that streams.
    """

    def __init__(self, request: GenerateRequest, on_progress: Callable[[TokenChunk], None] | None = None) -> None:
        self.request = request
        self._on_progress = on_progress
        self.chunks: list[TokenChunk] = []
        """Tokens so far, where the server streams: what is kept of the request if the server is lost."""
        self.upstream_id = uuid.uuid4().hex
        """Id at the server, a fresh one. The request's own may be used again before the server has noticed that this
        connection is closed; and SGLang aborts all requests whose ids begin with the one named."""
        self.is_sent = False
        self.aborted = asyncio.Event()
        self.ended = asyncio.Event()

    def add(self, chunk: TokenChunk) -> None:
        """Keep new tokens, and report them; the last ones are told with the output."""
        self.chunks.append(chunk)
        if self._on_progress is not None and chunk.finish_reason is None:
            self._on_progress(chunk)


class ExternalServer(RolloutServer):
    """Base class of backends that launch a third-party server. A subclass knows its command line and its endpoints.

    A pause also closes a gate on this side: new requests are not sent before `resume`, so that none can overtake the
    pause on its way.
    """

    tells_progress = True
    upstream: Upstream
    """HTTP client of the subprocess, set by `run_as`."""
    worker_title: str = ""
    """Beginning of the titles of the server's worker processes; empty: it has none, or watches them well itself."""

    def __init__(self, config: ServerConfig, *, engine_name: str) -> None:
        self.model_config = model_config = read_model_config(config.model_path)
        self.config = config
        self.engine_name = engine_name
        self.model_name = Path(config.model_path).resolve().name
        self.vocab_size = int(model_config["vocab_size"])
        self.max_position_embeddings = int(model_config.get("max_position_embeddings") or sys.maxsize)
        self.max_model_len = min(config.max_model_len, self.max_position_embeddings)
        self._end_ids = folder_tokens(config.model_path).end_ids
        self.adapters = read_adapters(config.options.get("adapters", {}), self.model_name)
        self._default_adapter = read_default(config.options.get("default_adapter"), self.adapters)
        self.arguments = words(config.options.get("args", []), "args")
        self.weight_version = 0
        self._endpoint = Endpoint(self, config, model_name=self.model_name)
        self._address: ServerAddress | None = None
        self._is_stopped = self._is_paused = self._is_asleep = False
        self._refusal = ""
        """Reason for which nothing is generated until an update succeeds; empty if there is none."""
        self.preparer: ImagePreparer | None = None
        """Image preprocessor, set by a subclass whose model takes images."""
        self._flights: dict[str, Flight] = {}
        self._left: set[asyncio.Task[None]] = set()
        """Tasks that abort requests whose callers have left."""
        self._watch: asyncio.Task[None] | None = None
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._update_lock = asyncio.Lock()

    def run_as(
        self, command: Sequence[str], url: str, connector: Callable[[], aiohttp.BaseConnector], **environment: str
    ) -> None:
        """Set the command that `start` runs, and its URL. The option `env` takes precedence over `environment`."""
        threads = {"OMP_NUM_THREADS": str(self.config.num_threads)} if self.config.num_threads else {}
        process = ChildProcess(
            [sys.executable, "-m", "rl_rollout.process", *command],
            {**threads, **environment, **read_environment(self.config.options.get("env", {}))},
            name=self.engine_name,
            workers=self.worker_title,
        )
        self.upstream = Upstream(
            process, name=self.engine_name, url=url, connector=connector, timeout_s=self.config.timeout_s
        )

    def stop_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Ids at which a request stops: its own, and those that end a turn in the model folder, unless it ignores them.

        Servers read some of them from the folder themselves; which ones differs from server to server.
        """
        params = request.sampling_params
        ends = () if params.ignore_eos else self._end_ids
        return tuple(dict.fromkeys((*params.stop_token_ids, *ends)))

    @property
    def process(self) -> ChildProcess:
        """Subprocess of the server."""
        return self.upstream.process

    # ---- what a subclass knows

    @abstractmethod
    async def post_generate(
        self, request: GenerateRequest, images: PreparedImages | None, flight: Flight
    ) -> TokenOutput:
        """Generate at the server under `flight.upstream_id`. Image placeholders of the prompt are expanded.

        A server that streams adds its chunks to the flight as they come.
        """

    @abstractmethod
    async def post_abort(self, upstream_ids: Sequence[str]) -> None:
        """Abort requests at the server; unknown ids are no error."""

    @abstractmethod
    async def post_pause(self, mode: PauseMode) -> None:
        """Pause the server; mode `wait` is sent when nothing is in flight any more."""

    @abstractmethod
    async def post_resume(self) -> None:
        """Resume the server."""

    async def post_slices(self, address: str) -> None:
        """Wait until weights have landed beside the model, while decoding goes on; `post_update` installs them.

        Nothing where the server does not land them before it installs them.
        """

    async def wait_for_files(self, files: Sequence[Path]) -> None:
        """Wait until the server's workers have made these files, which tell that slices have landed.

        At the deadline it returns: the workers' own passes too, and the update says what did not come.
        """
        deadline = asyncio.get_running_loop().time() + self.config.timeout_s
        while not all(file.exists() for file in files):
            await self.check_health()
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(LANDING_CHECK_S)

    @abstractmethod
    async def post_update(self, address: str, version: int) -> None:
        """Install weights, while nothing is computed.

        Raises:
            RolloutError: the old version serves, unless it is a `TornUpdateError`.
        """

    async def post_layout(self, url: str) -> None:
        """Have every rank answer a request of `rl_ckpt.adapters.layout`, while nothing is computed."""
        raise UnsupportedError(f"{self.engine_name} takes whole tensors")

    async def after_start(self) -> None:
        """Hook: calls to the server before its first request."""

    async def post_sleep(self, level: int) -> None:
        """Free memory of the server, while nothing is computed."""
        raise UnsupportedError(f"{self.engine_name} as it was started cannot sleep at level {level}")

    async def post_wake(self, tags: Sequence[str]) -> None:
        """Take the memory again."""
        raise UnsupportedError(f"{self.engine_name} as it was started cannot sleep, nor wake {list(tags)}")

    # ---- life

    async def start(self) -> ServerAddress:
        """Start the subprocess, wait until it answers, and bind the endpoint. Idempotent."""
        if self._address is not None:
            return self._address
        if self._is_stopped:
            raise ServerLostError("this server was stopped; create another")
        await self._endpoint.check_port()
        self.process.start()
        try:
            await self.process.wait_until(self.upstream.is_ready, timeout_s=self.config.timeout_s, check_s=CHECK_S)
            await self.after_start()
            url = await self._endpoint.start()
        except BaseException:
            await self.stop()
            raise
        if self.worker_title:
            self._watch = asyncio.create_task(self._end_without_workers())
        self._address = ServerAddress(url=url, model=self.model_name, pid=os.getpid())
        return self._address

    async def _end_without_workers(self) -> None:
        """End the server, and with it every request in flight, once one of its worker processes is gone."""
        while not self.process.end_without_workers():  # noqa: ASYNC110  nothing tells of the end of a grandchild
            await asyncio.sleep(WORKERS_S)

    async def stop(self) -> None:
        """End the subprocess and close the endpoint. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._watch is not None:
            self._watch.cancel()
        for task in self._left:
            task.cancel()
        await self._endpoint.stop()
        await self.upstream.close()
        await self.process.end(grace_s=STOP_TIMEOUT_S)

    async def check_health(self) -> None:
        """See `RolloutServer.check_health`. The subprocess must not have ended, nor have been stopped for 10 s."""
        if self.process.returncode is not None:
            raise ServerLostError(self.process.told_end())
        if (told := self.process.told_stopped()) is not None:
            raise ServerLostError(told)

    # ---- requests

    async def generate(
        self, request: GenerateRequest, on_progress: Callable[[TokenChunk], None] | None = None
    ) -> TokenOutput:
        """See `RolloutServer.generate`. `on_progress` gets new tokens as they come, where the server streams."""
        if request.adapter is None and self._default_adapter is not None:
            request = replace(request, adapter=self._default_adapter)
        self._check(request)
        flight = self._flights[request.request_id] = Flight(request, on_progress)
        deadline = None
        if request.timeout_s is not None:
            deadline = asyncio.get_running_loop().time() + request.timeout_s
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    request, images = await self._prepare(request)
                    if not await self._wait_for_gate(flight):
                        return TokenOutput.empty(request)
            except TimeoutError as error:
                raise self._late(request) from error
            if deadline is None:  # the server's counts from here: what waits in its queue cannot be told from here
                deadline = asyncio.get_running_loop().time() + self.config.timeout_s
            flight.is_sent = True
            try:
                output = await self._generate_until(deadline, request, images, flight)
            except RolloutError:
                raise
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise GenerationError(
                    f"request {request.request_id!r}: {self.upstream.where} sent an answer that cannot be read: "
                    f"{type(error).__name__}: {error}"
                ) from error
            check_answer(request, output, self.upstream.where, vocab_size=self.vocab_size)
            check_finite(output)
            check_length(output, self.max_new_tokens(request))
            return output
        except asyncio.CancelledError:
            self._leave(flight)
            raise
        except ServerLostError as error:
            if flight.chunks:
                error.partial = TokenOutput.joined(request.request_id, flight.chunks)
            raise
        finally:
            del self._flights[request.request_id]
            flight.ended.set()

    async def _generate_until(
        self, deadline: float, request: GenerateRequest, images: PreparedImages | None, flight: Flight
    ) -> TokenOutput:
        """Generate; at the deadline the request is aborted, and its tokens are returned with the reason `timeout`."""
        work = asyncio.ensure_future(self.post_generate(request, images, flight))
        try:
            done, _ = await asyncio.wait([work], timeout=deadline - asyncio.get_running_loop().time())
            if done:
                return work.result()
            await self._abort_left(flight.upstream_id)
            done, _ = await asyncio.wait([work], timeout=GRACE_S)
            if done and (output := work.result()).token_ids:
                is_cut = output.finish_reason is FinishReason.ABORT
                return replace(output, finish_reason=FinishReason.TIMEOUT) if is_cut else output
            self._leave(flight)
            raise self._late(request)
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait([work])

    def _late(self, request: GenerateRequest) -> RequestTimeoutError:
        timeout_s, whose = (
            request.timeout_s or self.config.timeout_s,
            "its own" if request.timeout_s else "the server's",
        )
        return RequestTimeoutError(
            f"request {request.request_id!r} got no token within {timeout_s} s, {whose} timeout_s, on "
            f"{self.upstream.where}; raise it, or ask for less at a time"
        )

    def _leave(self, flight: Flight) -> None:
        """Abort a request at the server too: SGLang notices a closed connection only after seconds."""
        if flight.is_sent:
            task = asyncio.create_task(self._abort_left(flight.upstream_id))
            self._left.add(task)
            task.add_done_callback(self._left.discard)

    async def _abort_left(self, upstream_id: str) -> None:
        with contextlib.suppress(RolloutError):  # it is lost, or ends the request for want of a connection
            await self.post_abort([upstream_id])

    def _check(self, request: GenerateRequest) -> None:
        self._need_running()
        self._check_prompt(request)
        check_limits(request, self.config)
        check_extras(request, self.capabilities)
        check_adapter(request, self.adapters)
        if self._refusal:
            raise WeightUpdateError(self._refusal)
        if request.request_id in self._flights:
            raise RequestError(f"request id {request.request_id!r} is in flight already")

    def _check_prompt(self, request: GenerateRequest) -> None:
        check_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)

    async def _prepare(self, request: GenerateRequest) -> tuple[GenerateRequest, PreparedImages | None]:
        """Expand the image placeholders of a request, and prepare its images."""
        if self.preparer is None:
            return request, None
        self.preparer.check_blind(request)
        if not request.images:
            return request, None
        request, images = await asyncio.to_thread(self.preparer.prepare, request)
        self._check_prompt(request)  # it is longer now
        return request, images

    async def _wait_for_gate(self, flight: Flight) -> bool:
        """Wait while the server is paused; returns False if the request was aborted before it was sent."""
        if not self._may_send.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self._may_send, flight.aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return not flight.aborted.is_set()

    def max_new_tokens(self, request: GenerateRequest) -> int:
        """New tokens that a request may have, by its own limit and the context length."""
        return min(request.sampling_params.max_new_tokens, self.max_model_len - len(request.prompt_token_ids))

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `RolloutServer.abort`. Returns when the requests have ended."""
        self._need_running()
        ids = list(self._flights) if request_ids is None else request_ids
        await self._abort([self._flights[i] for i in ids if i in self._flights])

    async def _abort(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            flight.aborted.set()
        try:
            async with asyncio.timeout(self.config.timeout_s):
                # Repeated: an abort may overtake the request that it is meant for.
                while ids := [f.upstream_id for f in flights if f.is_sent and not f.ended.is_set()]:
                    await self.post_abort(ids)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(CHECK_S):
                            await asyncio.gather(*(flight.ended.wait() for flight in flights))
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"{self.upstream.where} did not end {len(flights)} aborted requests within {self.config.timeout_s} s"
            ) from error

    # ---- control

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutServer.pause`."""
        if mode not in ("abort", "wait", "keep"):
            raise RequestError(f"pause mode {mode!r} is not one of abort, wait, keep")
        self._need_running()
        flights = list(self._flights.values())
        self._may_send.clear()
        self._is_paused = True
        if mode == "abort":
            await self._abort(flights)
        elif mode == "wait":
            await self._drain([flight for flight in flights if flight.is_sent])
        await self.post_pause(mode)

    async def _drain(self, flights: Sequence[Flight]) -> None:
        try:
            async with asyncio.timeout(self.config.timeout_s):
                await asyncio.gather(*(flight.ended.wait() for flight in flights))
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"{self.upstream.where} did not finish the requests in flight within {self.config.timeout_s} s; "
                "new ones are held"
            ) from error

    async def resume(self) -> None:
        """See `RolloutServer.resume`."""
        self._need_running()
        self._is_paused = False
        await self._go_on()

    @property
    def _stands_still(self) -> bool:
        """Whether nothing may be computed, requests in flight included, because the server has no usable weights."""
        return self._is_paused or self._is_asleep or bool(self._refusal)

    async def _go_on(self) -> None:
        """Resume computing, unless a pause, a sleep or missing weights forbid it."""
        if not self._stands_still:
            await self.post_resume()
            self._may_send.set()

    def _refuse(self, why: str) -> None:
        self._refusal = why
        self._may_send.clear()

    async def weight_layout(self, weights: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[list[TensorPart]] | None:
        """See `RolloutServer.weight_layout`. Each rank finds out by a dry run of its engine's own loader."""
        if not self.capabilities.takes_slices:
            return None
        from rl_ckpt import read_layouts, write_layout_request

        async with self._update_lock:
            self._need_running()
            with tempfile.TemporaryDirectory(prefix="rl-rollout-layout-") as folder:
                try:
                    if not self._stands_still:
                        await self.post_pause("keep")
                    await self.post_layout(write_layout_request(Path(folder), weights))
                finally:
                    await self._go_on()
                layouts = read_layouts(Path(folder), self.capabilities.num_receivers)
        return [
            [TensorPart(name=each.name, shape=each.shape, offsets=each.offsets, sizes=each.sizes) for each in own]
            for own in layouts
        ]

    async def update_weights(self, receive: WeightReceiver, version: int) -> None:
        """See `RolloutServer.update_weights`. Decoding is paused once the weights have landed, or to land them.

        The server's own processes open their receivers by `receive.address`, a URL of rl-ckpt.
        """
        can = self.capabilities
        if not can.updates_weights and not (self.adapters and can.updates_adapters):
            why = " beside adapters" if self.adapters else ""
            raise UnsupportedError(f"{self.engine_name} as it was started takes no new weights{why}")
        async with self._update_lock:
            self._need_running()
            address, is_lost = receive.address, False
            try:
                check_version(version)
                if "://" not in address:
                    raise WeightUpdateError("the address is no URL of rl-ckpt, e.g. shm://policy")
                await self.post_slices(address)
                if not self._stands_still:
                    await self.post_pause("keep")
                await self.post_update(address, version)
                self.weight_version, self._refusal = version, ""
            except ServerLostError:
                is_lost = True
                raise
            except TornUpdateError as error:
                self._refuse(f"version {version} was installed by half ({error}); an update must succeed first")
                raise WeightUpdateError(f"{self._refusal}; the server refuses until then") from error
            except RolloutError as error:
                who = self._refusal or f"version {self.weight_version} still serves"
                raise WeightUpdateError(
                    f"version {version} was not installed from {address!r}: {error}; {who}"
                ) from error
            finally:
                if not self._is_stopped and not is_lost:
                    await self._go_on()

    async def sleep(self, level: int = 1) -> None:
        """See `RolloutServer.sleep`."""
        if level not in (1, 2):
            raise RequestError(f"sleep level {level!r} is not 1 (KV cache) or 2 (KV cache and weights)")
        if level not in self.capabilities.sleep_levels:
            raise UnsupportedError(f"{self.engine_name} as it was started cannot sleep at level {level}")
        async with self._update_lock:
            self._need_running()
            self._may_send.clear()
            self._is_asleep = True
            await self.post_sleep(level)
            if level == 2:
                self._refuse("the weights were released by sleep(level=2); wake the server and update them")

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """See `RolloutServer.wake`."""
        unknown = sorted(set(tags) - {"weights", "kv_cache"})
        if unknown or not tags:
            raise RequestError(f"wake tags {list(tags)} must be some of weights, kv_cache")
        async with self._update_lock:
            self._need_running()
            if not self._is_asleep:
                return
            await self.post_wake(tags)
            if "kv_cache" in tags:
                self._is_asleep = False
                await self._go_on()

    def status(self) -> dict[str, Any]:
        """Status for `/health`: numbers of requests, weight version."""
        num_sent = sum(flight.is_sent for flight in self._flights.values())
        return {
            "status": "no weights" if self._refusal else "ok",
            "model": self.model_name,
            "pid": os.getpid(),
            "weight_version": self.weight_version,
            "num_running": num_sent,
            "num_waiting": len(self._flights) - num_sent,
            "is_paused": self._is_paused,
            "is_asleep": self._is_asleep,
        }

    def _need_running(self) -> None:
        if self._address is None or self._is_stopped:
            raise ServerLostError(f"the {self.engine_name} server of {self.model_name!r} is not running; call start()")


class TornUpdateError(RolloutError):
    """Internal: an update failed after the model was changed."""
