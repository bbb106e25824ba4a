"""Rollout server of flow-matching picture models; rollout backend `diffusion`.

Requests are batched by step: rows at different steps share a forward pass, and a request joins between two steps.
Options: `num_steps` (10), `noise` (0.7), `sde` (flow_grpo or dance_grpo), `size` (latents per side; default: the
transformer's sample_size).
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from rl_omni.errors import PipelineError
from rl_omni.pipeline import check_folder, load_pipeline, times_of
from rl_omni.sampler import SdeKind, logprobs_of, mean_of, noise_schedule
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
from rl_rollout.registry import check_options, check_unused, create_endpoint
from rl_rollout.types import Capabilities, FinishReason, SamplingParams, ServerAddress, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_omni.base import Condition
    from rl_omni.pipeline import PipelineModel
    from rl_rollout.base import PauseMode, WeightReceiver
    from rl_rollout.types import GenerateRequest, ServerConfig

_OPTIONS = {
    "num_steps": "denoising steps",
    "noise": "scale of the SDE's noise; 0 is the ODE",
    "sde": "noise schedule: flow_grpo or dance_grpo",
    "size": "latents per side",
}
_UNUSED = ("kv_cache_bytes", "parallel", "num_threads")


def create_server(config: ServerConfig) -> RolloutServer:
    """Create a server in this process.

    Raises:
        ConfigError, ModelFolderError: an option or a component of the folder is not supported.
    """
    return DiffusionServer(config)


def _is_number(value: Any, low: int, high: int, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high


@dataclass(slots=True, eq=False)
class _Sequence:
    """Picture in progress."""

    request: GenerateRequest
    condition: Condition
    latents: list[torch.Tensor]
    generator: torch.Generator
    deadline: float
    done: asyncio.Future[TokenOutput]
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])


class DiffusionServer(RolloutServer):
    """Replica of a flow-matching model that returns every denoising step of a picture with its exact log-prob.

    Columns of an output with S steps, float32: `latents` (S + 1, C, H, W) before the first step and after each one,
    `timesteps` (S + 1,), falling from 1, `step_stds` (S,), the standard deviation of the noise of each step (0: it had
    none), and `picture` (3, H', W'), 0 to 1.

    Prompts are token ids of the pipeline's text encoder; of the sampling parameters only `seed` may be set. An aborted
    request returns its steps so far and no picture.
    """

    def __init__(self, config: ServerConfig) -> None:
        check_options(config.options, _OPTIONS, "diffusion")
        check_unused(config, _UNUSED, "backend 'diffusion' has no use for it")
        if config.dtype not in ("auto", "float32"):
            raise ConfigError(f"dtype={config.dtype}: backend 'diffusion' serves in float32")
        try:
            transformer = check_folder(config.model_path)
        except PipelineError as error:
            raise ModelFolderError(str(error)) from error
        options: dict[str, Any] = {"num_steps": 10, "noise": 0.7, "sde": SdeKind.FLOW_GRPO, **config.options}
        options.setdefault("size", transformer.get("sample_size"))
        for name, is_met, allowed in (
            ("num_steps", _is_number(options["num_steps"], 1, 1000, int), "a whole number from 1 to 1000"),
            ("noise", _is_number(options["noise"], 0, 10, (int, float)), "a number from 0 to 10"),
            ("sde", options["sde"] in list(SdeKind), " or ".join(SdeKind)),
            ("size", _is_number(options["size"], 2, 4096, int) and options["size"] % 2 == 0, "even, from 2 to 4096"),
        ):
            if not is_met:
                raise ConfigError(f"option {name}={options[name]!r} of backend 'diffusion' must be {allowed}")
        self._config, self._options = config, options
        is_auto = config.device == "auto"
        self._device = ("cuda" if torch.cuda.is_available() else "cpu") if is_auto else config.device
        self._channels = transformer["in_channels"] // (1 if transformer["_class_name"].startswith("SD3") else 4)
        self._model: PipelineModel | None = None
        self._version: int = 0
        self._has_weights, self._is_paused = True, False
        self._active: list[_Sequence] = []
        self._wake_up = asyncio.Event()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._endpoint = create_endpoint(self, config, model_name=config.model_path)
        self._url = ""
        self._seeds = torch.Generator().manual_seed(config.seed)

    @property
    def capabilities(self) -> Capabilities:
        """Log-probs per step, whole tensors as weights."""
        return Capabilities(gives_top_logprobs=False, gives_prompt_logprobs=False, sleep_levels=())

    async def start(self) -> ServerAddress:
        """Load the pipeline."""
        if self._model is None:
            try:
                self._model = await asyncio.to_thread(load_pipeline, self._config.model_path, self._device)
            except PipelineError as error:
                raise ModelFolderError(str(error)) from error
            self._model.transformer.requires_grad_(requires_grad=False)
            self._times = times_of(self._config.model_path, self._options["num_steps"])
            kind = SdeKind(self._options["sde"])
            self._stds = noise_schedule(self._times, float(self._options["noise"]), kind)
            self._task = asyncio.create_task(self._run())
            self._url = await self._endpoint.start()
        return ServerAddress(url=self._url, model=self._config.model_path, pid=os.getpid())

    async def check_health(self) -> None:
        """Check that the server was started, and not stopped."""
        if self._task is None or self._task.done():
            raise ServerLostError(f"the diffusion server of {self._config.model_path} does not run; call start")

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Generate a picture, in `num_steps` steps."""
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

    def _new_sequence(self, request: GenerateRequest) -> _Sequence:
        assert self._model is not None
        params, name = request.sampling_params, request.request_id
        if replace(params, seed=None) != SamplingParams():
            raise RequestError(
                f"request {name!r}: of the sampling parameters a picture has `seed` alone; it has {params}"
            )
        if request.has_extras or request.adapter is not None or request.images:
            raise UnsupportedError(f"request {name!r}: backend 'diffusion' has no extra outputs, adapters or images")
        if any(each.request.request_id == name for each in self._active):
            raise RequestError(f"request {name!r} is in flight already; give each its own request_id")
        try:
            condition = self._model.encode(request.prompt_token_ids)
        except PipelineError as error:
            raise RequestError(f"request {name!r}: {error}") from error
        drawn = int(torch.randint(2**62, (), generator=self._seeds)) if params.seed is None else params.seed
        generator = torch.Generator().manual_seed(drawn)
        size = self._options["size"]
        noise = torch.randn(self._channels, size, size, generator=generator)
        timeout_s = self._config.timeout_s if request.timeout_s is None else request.timeout_s
        future = asyncio.get_running_loop().create_future()
        return _Sequence(request, condition, [noise], generator, monotonic() + timeout_s, future)

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

    async def _step(self, batch: list[_Sequence]) -> None:
        version = self._version
        try:
            samples, logprobs = await asyncio.to_thread(self._denoise, batch)
        except Exception as error:  # noqa: BLE001  every waiting request gets the error
            for sequence in batch:
                self._fail(sequence, GenerationError(f"a denoising step failed: {type(error).__name__}: {error}"))
            return
        for sequence, sample, logprob in zip(batch, samples, logprobs, strict=True):
            if sequence.done.done():
                continue
            if not torch.isfinite(sample).all():
                self._fail(sequence, GenerationError(f"latents of {sequence.request.request_id!r} are not finite"))
                continue
            sequence.latents.append(sample)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            if len(sequence.logprobs) == len(self._stds):
                self._finish(sequence, FinishReason.STOP)

    @torch.no_grad()
    def _denoise(self, batch: list[_Sequence]) -> tuple[list[torch.Tensor], list[float]]:
        assert self._model is not None
        steps = torch.tensor([len(each.logprobs) for each in batch])
        times, after, stds = (
            x.to(self._device) for x in (self._times[steps], self._times[steps + 1], self._stds[steps])
        )
        latents = torch.stack([each.latents[-1] for each in batch]).to(self._device)
        velocity = self._model.velocity(latents, times, [each.condition for each in batch])
        mean = mean_of(latents, velocity, times, after, stds)
        noise = torch.stack(
            [torch.randn(x.shape[1:], generator=s.generator) for x, s in zip(mean.split(1), batch, strict=True)]
        )
        samples = mean + stds.view(-1, 1, 1, 1) * noise.to(self._device)
        return list(samples.cpu().unbind()), logprobs_of(samples, mean, stds).tolist()

    def _is_open(self, sequence: _Sequence) -> bool:
        """Take a request out of the batch; returns whether its caller still waits."""
        if sequence in self._active:
            self._active.remove(sequence)
        return not sequence.done.done()

    def _finish(self, sequence: _Sequence, reason: FinishReason) -> None:
        if not self._is_open(sequence):
            return
        assert self._model is not None
        count = len(sequence.logprobs)
        columns = {
            "latents": torch.stack(sequence.latents),
            "timesteps": self._times[: count + 1],
            "step_stds": self._stds[:count],
        }
        if reason == FinishReason.STOP:
            columns["picture"] = self._model.decode(sequence.latents[-1][None].to(self._device))[0].cpu()
        sequence.done.set_result(
            TokenOutput(
                request_id=sequence.request.request_id,
                token_ids=(),
                logprobs=tuple(sequence.logprobs),
                weight_versions=tuple(sequence.versions),
                finish_reason=reason,
                columns=columns,
            )
        )

    def _fail(self, sequence: _Sequence, error: Exception) -> None:
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
        """Install the transformer's weights between two steps."""
        await self.check_health()
        assert self._model is not None
        own: dict[str, torch.Tensor] = self._model.transformer.state_dict()
        staged: dict[str, torch.Tensor] = {}
        try:
            async for name, tensor in receive.receive_weights():
                if name not in own or own[name].shape != tensor.shape:
                    expected = tuple(own[name].shape) if name in own else "no such tensor"
                    raise WeightUpdateError(
                        f"version {version}: tensor {name} {tuple(tensor.shape)} does not fit the transformer: "
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
            self._model.transformer.load_state_dict(staged)
            self._has_weights, self._version = True, version

    async def sleep(self, level: int = 1) -> None:
        """Not supported: there is no cache to free, and the weights stay."""
        raise UnsupportedError(f"backend 'diffusion' has no sleep level {level}; stop the server instead")

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
            self._fail(sequence, ServerLostError("the diffusion server was stopped"))
        self._model = None
