"""Base class of backends that run a third-party server (vLLM, SGLang) as a subprocess and talk to it over HTTP.

The subprocess listens on a UNIX socket or on loopback, known to this process alone. In front of it is the same HTTP
endpoint as that of every other server here, so that clients need not know which engine serves them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rl_rollout.backends.external.calls import EngineCalls
from rl_rollout.backends.external.inflight import ModelLimits, Requests
from rl_rollout.backends.external.lifecycle import Lifecycle
from rl_rollout.backends.external.options import read_adapters, read_default, read_environment, words
from rl_rollout.backends.external.updates import Activity, Updates
from rl_rollout.backends.external.upstream import Upstream
from rl_rollout.base import RolloutServer
from rl_rollout.errors import RequestError, UnsupportedError, WeightUpdateError
from rl_rollout.http.endpoint import Endpoint
from rl_rollout.process import ChildProcess
from rl_rollout.registry import check_quantization
from rl_rollout.validation import check_adapter, check_extras, folder_tokens, read_model_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import aiohttp

    from rl_rollout.base import PauseMode, WeightReceiver
    from rl_rollout.multimodal import ImagePreparer
    from rl_rollout.types import GenerateRequest, ServerAddress, ServerConfig, TensorPart, TokenChunk, TokenOutput


class ExternalServer(RolloutServer, EngineCalls):
    """Base class of backends that launch a third-party server: its command line and `EngineCalls` are the subclass's.

    A pause also closes a gate on this side: new requests are not sent before `resume`, so that none can overtake the
    pause on its way.
    """

    tells_progress = True
    quantizations: ClassVar[Mapping[str, Sequence[str]]] = {}
    """By format of `ServerConfig.quantization` that it converts each update to, the arguments for it."""
    worker_title: str = ""
    """Beginning of the titles of the server's worker processes; empty: it has none, or watches them well itself."""

    def __init__(self, config: ServerConfig, *, engine_name: str) -> None:
        check_quantization(config, engine_name, self.quantizations)
        self.model_config = model_config = read_model_config(config.model_path)
        self.config = config
        self.engine_name = engine_name
        self.model_name = Path(config.model_path).resolve().name
        self.max_position_embeddings = int(model_config.get("max_position_embeddings") or sys.maxsize)
        self.max_model_len = min(config.max_model_len, self.max_position_embeddings)
        self.adapters = read_adapters(config.options.get("adapters", {}), self.model_name)
        self._default_adapter = read_default(config.options.get("default_adapter"), self.adapters)
        self.arguments = words(config.options.get("args", []), "args")
        self.preparer: ImagePreparer | None = None
        """Image preprocessor, set before `run_as` by a subclass whose model takes images."""

    def run_as(
        self, command: Sequence[str], url: str, connector: Callable[[], aiohttp.BaseConnector], **environment: str
    ) -> None:
        """Set the command that `start` runs, and its URL. The option `env` takes precedence over `environment`."""
        config = self.config
        threads = {"OMP_NUM_THREADS": str(config.num_threads)} if config.num_threads else {}
        self.process = ChildProcess(
            [sys.executable, "-m", "rl_rollout.process", *command],
            {**threads, **environment, **read_environment(config.options.get("env", {}))},
            name=self.engine_name,
            workers=self.worker_title,
        )
        self.upstream = Upstream(
            self.process, name=self.engine_name, url=url, connector=connector, timeout_s=config.timeout_s
        )
        self.limits = ModelLimits(
            vocab_size=int(self.model_config["vocab_size"]),
            max_model_len=self.max_model_len,
            end_ids=tuple(folder_tokens(config.model_path).end_ids),
        )
        self.requests = Requests(config, self.limits, self.upstream, self.preparer, self)
        self._lifecycle = Lifecycle(
            self.upstream,
            Endpoint(self, config, model_name=self.model_name),
            model_name=self.model_name,
            watches_workers=bool(self.worker_title),
            timeout_s=config.timeout_s,
        )
        self._activity = Activity(self.requests, self)
        self._updates = Updates(self._activity, self._lifecycle, self)

    @property
    def weight_version(self) -> int:
        """Weight version that is served."""
        return self._updates.version

    async def start(self) -> ServerAddress:
        """Start the subprocess, wait until it answers, and bind the endpoint. Idempotent."""
        return await self._lifecycle.start(self.after_start, self.stop)

    async def stop(self) -> None:
        """End the subprocess and close the endpoint. Idempotent."""
        self.requests.close()
        await self._lifecycle.stop()

    async def check_health(self) -> None:
        """See `RolloutServer.check_health`. The subprocess must not have ended, nor have been stopped for 10 s."""
        await self._lifecycle.check_health()

    async def generate(
        self, request: GenerateRequest, on_progress: Callable[[TokenChunk], None] | None = None
    ) -> TokenOutput:
        """See `RolloutServer.generate`. `on_progress` gets new tokens as they come, where the server streams."""
        if request.adapter is None and self._default_adapter is not None:
            request = replace(request, adapter=self._default_adapter)
        self._lifecycle.require_running()
        self.requests.check(request)
        check_extras(request, self.capabilities)
        check_adapter(request, self.adapters)
        if self._activity.refusal:
            raise WeightUpdateError(self._activity.refusal)
        return await self.requests.generate(request, on_progress)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `RolloutServer.abort`. Returns when the requests have ended."""
        self._lifecycle.require_running()
        await self.requests.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutServer.pause`."""
        if mode not in ("abort", "wait", "keep"):
            raise RequestError(f"pause mode {mode!r} is not one of abort, wait, keep")
        self._lifecycle.require_running()
        await self._activity.pause(mode)

    async def resume(self) -> None:
        """See `RolloutServer.resume`."""
        self._lifecycle.require_running()
        await self._activity.resume()

    async def weight_layout(self, weights: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[list[TensorPart]] | None:
        """See `RolloutServer.weight_layout`. Each rank finds out by a dry run of its engine's own loader."""
        can = self.capabilities
        return await self._updates.layout(weights, can.num_receivers) if can.takes_slices else None

    async def update_weights(self, receive: WeightReceiver, version: int) -> None:
        """See `RolloutServer.update_weights`. Decoding is paused once the weights have landed, or to land them.

        The server's own processes open their receivers by `receive.address`, a URL of rl-ckpt.
        """
        can = self.capabilities
        if not can.updates_weights and not (self.adapters and can.updates_adapters):
            why = " other than adapters" if self.adapters else ""
            raise UnsupportedError(f"{self.engine_name} as it was started takes no new weights{why}")
        await self._updates.install(receive.address, version)

    async def sleep(self, level: int = 1) -> None:
        """See `RolloutServer.sleep`."""
        if level not in (1, 2):
            raise RequestError(f"sleep level {level!r} is not 1 (KV cache) or 2 (KV cache and weights)")
        if level not in self.capabilities.sleep_levels:
            raise UnsupportedError(f"{self.engine_name} as it was started cannot sleep at level {level}")
        async with self._updates.lock:
            self._lifecycle.require_running()
            await self._activity.sleep(level)

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """See `RolloutServer.wake`."""
        unknown = sorted(set(tags) - {"weights", "kv_cache"})
        if unknown or not tags:
            raise RequestError(f"wake tags {list(tags)} must be some of weights, kv_cache")
        async with self._updates.lock:
            self._lifecycle.require_running()
            await self._activity.wake(tags)

    def status(self) -> dict[str, Any]:
        """Status for `/health`: numbers of requests, weight version."""
        return {
            "status": "no weights" if self._activity.refusal else "ok",
            "model": self.model_name,
            "pid": os.getpid(),
            "weight_version": self.weight_version,
            "num_running": self.requests.num_sent,
            "num_waiting": self.requests.num_waiting,
            "is_paused": self._activity.is_paused,
            "is_asleep": self._activity.is_asleep,
        }
