"""Rollout server of flow-matching picture models; rollout backend `diffusion`.

Options: `num_steps` (10), `noise` (0.7), `sde` (flow_grpo or dance_grpo), `size` (latents per side; default: the
transformer's sample_size).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rl_omni.errors import PipelineError
from rl_omni.pipeline import check_folder, load_pipeline, times_of
from rl_omni.sampler import SdeKind, logprobs_of, mean_of, noise_schedule
from rl_omni.step_server import InFlight, StepServer
from rl_rollout.errors import ConfigError, ModelFolderError
from rl_rollout.registry import check_options
from rl_rollout.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_omni.base import Condition
    from rl_omni.pipeline import PipelineModel
    from rl_rollout.base import RolloutServer
    from rl_rollout.types import GenerateRequest, ServerConfig

_OPTIONS = {
    "num_steps": "denoising steps",
    "noise": "scale of the SDE's noise; 0 is the ODE",
    "sde": "noise schedule: flow_grpo or dance_grpo",
    "size": "latents per side",
}


def create_server(config: ServerConfig) -> RolloutServer:
    """Create a server in this process.

    Raises:
        ConfigError, ModelFolderError: an option or a component of the folder is not supported.
    """
    return DiffusionServer(config)


def _is_number(value: Any, low: int, high: int, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high


@dataclass(slots=True, eq=False, kw_only=True)
class _Picture(InFlight):
    """Picture in progress; its states are the latents."""

    condition: Condition


class DiffusionServer(StepServer[_Picture]):
    """Replica of a flow-matching model that returns every denoising step of a picture with its exact log-prob.

    Columns of an output with S steps, float32: `latents` (S + 1, C, H, W) before the first step and after each one,
    `timesteps` (S + 1,), falling from 1, `step_stds` (S,), the standard deviation of the noise of each step (0: it had
    none), and `picture` (3, H', W'), 0 to 1.

    Prompts are token ids of the pipeline's text encoder. An aborted request has no picture.
    """

    name: ClassVar[str] = "diffusion"

    def __init__(self, config: ServerConfig) -> None:
        check_options(config.options, _OPTIONS, self.name)
        super().__init__(config)
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
        self._options, self.num_steps = options, options["num_steps"]
        self._channels = transformer["in_channels"] // (1 if transformer["_class_name"].startswith("SD3") else 4)

    def _load(self) -> torch.nn.Module:
        self._model: PipelineModel = load_pipeline(self._config.model_path, self._device)
        self._times = times_of(self._config.model_path, self.num_steps)
        self._stds = noise_schedule(self._times, float(self._options["noise"]), SdeKind(self._options["sde"]))
        return self._model.transformer

    def _begin(self, request: GenerateRequest, common: Mapping[str, Any]) -> _Picture:
        if request.images:
            raise PipelineError("backend 'diffusion' takes no images; leave them out")
        condition, size = self._model.encode(request.prompt_token_ids), self._options["size"]
        noise = torch.randn(self._channels, size, size, generator=common["generator"])
        return _Picture(condition=condition, states=[noise], **common)

    @torch.no_grad()
    def _advance(self, batch: list[_Picture]) -> tuple[list[torch.Tensor], list[float]]:
        steps = torch.tensor([len(each.logprobs) for each in batch])
        times, after, stds = (
            x.to(self._device) for x in (self._times[steps], self._times[steps + 1], self._stds[steps])
        )
        latents = torch.stack([each.states[-1] for each in batch]).to(self._device)
        velocity = self._model.velocity(latents, times, [each.condition for each in batch])
        mean = mean_of(latents, velocity, times, after, stds)
        noise = torch.stack(
            [torch.randn(x.shape[1:], generator=s.generator) for x, s in zip(mean.split(1), batch, strict=True)]
        )
        samples = mean + stds.view(-1, 1, 1, 1) * noise.to(self._device)
        return list(samples.cpu().unbind()), logprobs_of(samples, mean, stds).tolist()

    def _columns(self, sequence: _Picture, reason: FinishReason) -> dict[str, torch.Tensor]:
        count = len(sequence.logprobs)
        columns = {
            "latents": torch.stack(sequence.states),
            "timesteps": self._times[: count + 1],
            "step_stds": self._stds[:count],
        }
        if reason == FinishReason.STOP:
            columns["picture"] = self._model.decode(sequence.states[-1][None].to(self._device))[0].cpu()
        return columns
