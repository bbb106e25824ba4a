"""Base of rollout servers whose requests advance by steps: rows at different steps share a forward pass."""

from __future__ import annotations

import asyncio
import math
import os
from abc import abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from rl_omni.errors import PipelineError
from rl_rollout.base import RolloutServer
from rl_rollout.errors import (
    ConfigError,
    GenerationError,
    ModelFolderError,
    RequestError,
    RequestTimeoutError,
    ServerLostError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_rollout.registry import check_unused, create_endpoint
from rl_rollout.types import Capabilities, FinishReason, SamplingParams, ServerAddress, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_rollout.base import PauseMode, WeightReceiver
    from rl_rollout.types import GenerateRequest, ServerConfig

_UNUSED = ("kv_cache_bytes", "parallel", "num_threads")


@dataclass(slots=True, eq=False, kw_only=True)
class InFlight:
    """Request in progress."""

    request: GenerateRequest
    generator: torch.Generator
    deadline: float
    done: asyncio.Future[TokenOutput]
    states: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Results of its steps, after what it began with."""
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])


RequestT = TypeVar("RequestT", bound=InFlight)


class StepServer(RolloutServer, Generic[RequestT]):
    """Replica of a model that generates by steps, each with a log-prob and a weight version.

    Batched by step: a request joins between two steps. New weights are installed between two steps, too. An aborted
    request returns its steps so far. A subclass loads the model, begins a request, advances a batch by one step, and
    gives the columns of an output. Of the sampling parameters only `seed` may be set.
    """

    name: ClassVar[str]
    """Name of the backend."""
    num_steps: int = 1
    """Steps of a request."""

    def __init__(self, config: ServerConfig) -> None:
        check_unused(config, _UNUSED, f"backend {self.name!r} has no use for it")
        if config.dtype not in ("auto", "float32"):
            raise ConfigError(f"dtype={config.dtype}: backend {self.name!r} serves in float32")
        self._config = config
        is_auto = config.device == "auto"
        self._device = ("cuda" if torch.cuda.is_available() else "cpu") if is_auto else config.device
        self._module: torch.nn.Module | None = None
        self._version: int = 0
        self._has_weights, self._is_paused = True, False
        self._active: list[RequestT] = []
        self._wake_up = asyncio.Event()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._endpoint = create_endpoint(self, config, model_name=config.model_path)
        self._url = ""
        self._seeds = torch.Generator().manual_seed(config.seed)

    @abstractmethod
    def _load(self) -> torch.nn.Module:
        """Load the model; returns the module whose weights are updated.

        Raises:
            PipelineError: the folder cannot be used.
        """

    @abstractmethod
    def _begin(self, request: GenerateRequest, common: Mapping[str, Any]) -> RequestT:
        """Begin a request, with the fields of `InFlight` that all have in common.

        Raises:
            PipelineError: it cannot be generated.
        """

    @abstractmethod
    def _advance(self, batch: list[RequestT]) -> tuple[list[torch.Tensor], list[float]]:
        """Advance requests by one step; returns the result of each, and its log-prob."""

    @abstractmethod
    def _columns(self, sequence: RequestT, reason: FinishReason) -> dict[str, torch.Tensor]:
        """Columns of a request that ends."""

    @property
    def capabilities(self) -> Capabilities:
        """Log-probs per step, whole tensors as weights."""
        return Capabilities(gives_top_logprobs=False, gives_prompt_logprobs=False, sleep_levels=())

    async def start(self) -> ServerAddress:
        """Load the model."""
        if self._module is None:
            try:
                self._module = await asyncio.to_thread(self._load)
            except PipelineError as error:
                raise ModelFolderError(str(error)) from error
            self._module.requires_grad_(requires_grad=False)
            self._task = asyncio.create_task(self._run())
            self._url = await self._endpoint.start()
        return ServerAddress(url=self._url, model=self._config.model_path, pid=os.getpid())

    async def check_health(self) -> None:
        """Check that the server was started, and not stopped."""
        if self._task is None or self._task.done():
            raise ServerLostError(f"the {self.name} server of {self._config.model_path} does not run; call start")

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Generate in `num_steps` steps."""
        await self.check_health()
        if not self._has_weights:
            raise WeightUpdateError("the last weight update failed half-way; update the weights again")
        sequence = self._new_sequence(request)
        self._active.append(sequence)
        self._wake_up.set()
        try:
            return await sequence.done
        finally:
            if sequence in self._active:
                self._active.remove(sequence)

    def _new_sequence(self, request: GenerateRequest) -> RequestT:
        params, name = request.sampling_params, request.request_id
        if replace(params, seed=None) != SamplingParams():
            raise RequestError(
                f"request {name!r}: of the sampling parameters backend {self.name!r} has `seed` alone; it has {params}"
            )
        if request.has_extras or request.adapter is not None:
            raise UnsupportedError(f"request {name!r}: backend {self.name!r} has no extra outputs and no adapters")
        if any(each.request.request_id == name for each in self._active):
            raise RequestError(f"request {name!r} is in flight already; give each its own request_id")
        drawn = int(torch.randint(2**62, (), generator=self._seeds)) if params.seed is None else params.seed
        timeout_s = self._config.timeout_s if request.timeout_s is None else request.timeout_s
        common = {
            "request": request,
            "generator": torch.Generator().manual_seed(drawn),
            "deadline": monotonic() + timeout_s,
            "done": asyncio.get_running_loop().create_future(),
        }
        try:
            return self._begin(request, common)
        except PipelineError as error:
            raise RequestError(f"request {name!r}: {error}") from error

    async def _run(self) -> None:
        while True:
            await self._wake_up.wait()
            self._end_late()
            async with self._lock:
                batch = [] if self._is_paused else self._active[: self._config.max_num_seqs]
                if batch:
                    await self._step(batch)
            if not self._active or self._is_paused:
                self._wake_up.clear()

    def _end_late(self) -> None:
        for sequence in [each for each in self._active if monotonic() > each.deadline]:
            if sequence.logprobs:
                self._finish(sequence, FinishReason.TIMEOUT)
            else:
                message = f"request {sequence.request.request_id!r} made no step before its deadline"
                self._fail(sequence, RequestTimeoutError(message))

    async def _step(self, batch: list[RequestT]) -> None:
        version = self._version
        try:
            states, logprobs = await asyncio.to_thread(self._advance, batch)
        except Exception as error:  # noqa: BLE001  every waiting request gets the error
            for sequence in batch:
                self._fail(sequence, GenerationError(f"a step failed: {type(error).__name__}: {error}"))
            return
        for sequence, state, logprob in zip(batch, states, logprobs, strict=True):
            if sequence.done.done():
                continue
            if not (math.isfinite(logprob) and torch.isfinite(state).all()):
                self._fail(sequence, GenerationError(f"a step of {sequence.request.request_id!r} is not finite"))
                continue
            sequence.states.append(state)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            if len(sequence.logprobs) == self.num_steps:
                self._finish(sequence, FinishReason.STOP)

    def _is_open(self, sequence: RequestT) -> bool:
        """Take a request out of the batch; returns whether its caller still waits."""
        if sequence in self._active:
            self._active.remove(sequence)
        return not sequence.done.done()

    def _finish(self, sequence: RequestT, reason: FinishReason) -> None:
        if not self._is_open(sequence):
            return
        sequence.done.set_result(
            TokenOutput(
                request_id=sequence.request.request_id,
                token_ids=(),
                logprobs=tuple(sequence.logprobs),
                weight_versions=tuple(sequence.versions),
                finish_reason=reason,
                columns=self._columns(sequence, reason),
            )
        )

    def _fail(self, sequence: RequestT, error: Exception) -> None:
        if self._is_open(sequence):
            sequence.done.set_exception(error)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests with their steps so far."""
        for sequence in list(self._active):
            if request_ids is None or sequence.request.request_id in request_ids:
                self._finish(sequence, FinishReason.ABORT)

    async def pause(self, mode: PauseMode) -> None:
        """Pause between two steps."""
        if mode == "wait":
            waiting: list[Any] = [each.done for each in self._active]
            if waiting:
                await asyncio.wait(waiting, timeout=self._config.timeout_s)
        self._is_paused = True
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        """Resume after `pause`."""
        self._is_paused = False
        self._wake_up.set()

    async def update_weights(self, receive: WeightReceiver, version: int) -> None:
        """Install weights between two steps."""
        await self.check_health()
        assert self._module is not None
        own: dict[str, torch.Tensor] = self._module.state_dict()
        staged: dict[str, torch.Tensor] = {}
        try:
            async for name, tensor in receive.receive_weights():
                if name not in own or own[name].shape != tensor.shape:
                    expected = tuple(own[name].shape) if name in own else "no such tensor"
                    raise WeightUpdateError(
                        f"version {version}: tensor {name} {tuple(tensor.shape)} does not fit the model: "
                        f"{expected}; version {self._version} still serves"
                    )
                staged[name] = tensor.detach().to("cpu", copy=True)
        except WeightUpdateError:
            raise
        except Exception as error:
            raise WeightUpdateError(
                f"version {version} was not received: {type(error).__name__}: {error}; "
                f"version {self._version} still serves"
            ) from error
        if missing := sorted(set(own) - set(staged)):
            raise WeightUpdateError(
                f"version {version} lacks {len(missing)} tensors such as {missing[0]}; "
                f"version {self._version} still serves"
            )
        async with self._lock:
            self._has_weights = False
            self._module.load_state_dict(staged)
            self._has_weights, self._version = True, version

    async def sleep(self, level: int = 1) -> None:
        """Not supported: there is no cache to free, and the weights stay."""
        raise UnsupportedError(f"backend {self.name!r} has no sleep level {level}; stop the server instead")

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """No-op: the server never sleeps."""
        del tags

    async def stop(self) -> None:
        """Stop the server; requests in flight raise `ServerLostError`."""
        await self._endpoint.stop()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        for sequence in list(self._active):
            self._fail(sequence, ServerLostError(f"the {self.name} server was stopped"))
        self._module = None
