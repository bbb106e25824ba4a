"""Rollout server of vision-language-action policies; rollout backend `actions`. It has no options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rl_omni.actions.policy import check_policy, load_policy
from rl_omni.errors import PipelineError
from rl_omni.pictures import picture_of
from rl_omni.step_server import InFlight, StepServer
from rl_rollout.errors import ModelFolderError
from rl_rollout.registry import check_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_rollout.base import RolloutServer
    from rl_rollout.types import Capabilities, FinishReason, GenerateRequest, ServerConfig


def create_server(config: ServerConfig) -> RolloutServer:
    """Create a server in this process.

    Raises:
        ConfigError, ModelFolderError: an option or a component of the folder is not supported.
    """
    return ActionServer(config)


@dataclass(slots=True, eq=False, kw_only=True)
class _Observation(InFlight):
    """Observation whose action is generated; its state is the head's sample."""

    prompt: tuple[int, ...]
    picture: torch.Tensor


class ActionServer(StepServer[_Observation]):
    """Replica of a policy: an observation in (a prompt with one image), a chunk of actions with its log-prob out.

    Columns of an output: `action` (H, D) float32, what an environment plays; and with one entry each `pictures`
    (1, 3, height, width) uint8, and `actions`, the head's sample (`rl_omni.actions.heads`). Requests that wait at the
    same time, of any number of environments, share a forward pass.
    """

    name: ClassVar[str] = "actions"

    def __init__(self, config: ServerConfig) -> None:
        check_options(config.options, {}, self.name)
        super().__init__(config)
        try:
            check_policy(config.model_path)
        except PipelineError as error:
            raise ModelFolderError(str(error)) from error

    @property
    def capabilities(self) -> Capabilities:
        """As of a server of steps, with images."""
        return replace(super().capabilities, takes_images=True)

    def _load(self) -> torch.nn.Module:
        self._policy = load_policy(self._config.model_path, self._device)
        return self._policy

    def _begin(self, request: GenerateRequest, common: Mapping[str, Any]) -> _Observation:
        if len(request.images) != 1:
            raise PipelineError(f"it has {len(request.images)} images; an observation has one")
        self._policy.check_prompt(request.prompt_token_ids)
        try:
            picture = (picture_of(request.images[0]) * 255).round().byte()
        except (ValueError, OSError) as error:
            raise PipelineError(f"its image cannot be read: {error}") from error
        return _Observation(prompt=request.prompt_token_ids, picture=picture, **common)

    @torch.no_grad()
    def _advance(self, batch: list[_Observation]) -> tuple[list[torch.Tensor], list[float]]:
        hidden = self._policy.hidden([each.prompt for each in batch], [each.picture for each in batch])
        samples, logprobs = self._policy.head.sample(hidden, [each.generator for each in batch])
        return list(samples.cpu().unbind()), logprobs.tolist()

    def _columns(self, sequence: _Observation, reason: FinishReason) -> dict[str, torch.Tensor]:
        del reason
        if not sequence.states:
            return {}
        samples = sequence.states[0][None]
        return {
            "action": self._policy.head.actions(samples)[0],
            "pictures": sequence.picture[None],
            "actions": samples,
        }
