"""Engine of vision-language-action policies and of their critics; engine backend `actions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from rl_engine.errors import BatchError, ConfigError
from rl_engine.types import Head
from rl_omni.actions.policy import check_policy, load_policy, load_value, save_policy
from rl_omni.step_engine import StepEngine, merged_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.base import Engine
    from rl_engine.types import EngineConfig


def create(config: EngineConfig) -> Engine:
    """Create the engine; nothing is loaded before `initialize`."""
    return ActionEngine(config)


class ActionEngine(StepEngine):
    """Policy under training; a step is an observation and the chunk of actions that was played.

    Columns of a row with S steps: `prompt_token_ids` (ragged, one image placeholder), `pictures` (ragged, (S, 3,
    height, width) uint8), `actions` (ragged, S samples of the head) and `loss_mask` (ragged, S). With head=value the
    engine is a critic: it gives the value of each observation, by a linear layer.
    """

    name: ClassVar[str] = "actions"
    settings = StepEngine.settings | {"head"}
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    batch_columns = ("prompt_token_ids", "pictures", "actions", "loss_mask")

    def _check_folder(self) -> None:
        check_policy(self._config.model_path)
        if self._config.head not in (Head.LM, Head.VALUE):
            raise ConfigError(f"head={self._config.head}: backend 'actions' has lm (its action head) and value.")

    def _load(self) -> torch.nn.Module:
        self._policy = load_policy(self._config.model_path, self._device)
        if self._config.head == Head.VALUE:
            self._policy.value = load_value(self._config.model_path, self._policy.head.hidden_size).to(self._device)
        return self._policy

    def _add_adapter(self, model: torch.nn.Module) -> None:
        super()._add_adapter(model)
        for name, parameter in model.named_parameters():
            if name.startswith(("head.", "value.")):
                parameter.requires_grad_()

    def _check_row(self, row: int, columns: dict[str, Tensor]) -> None:
        seen = {name: len(columns[name]) for name in ("pictures", "actions", "loss_mask")}
        if len(set(seen.values())) > 1 or not seen["loss_mask"]:
            raise BatchError(f"row {row} has lengths {seen}; S steps need S of each.")
        if columns["pictures"].dtype != torch.uint8 or columns["pictures"].shape[1:2] != (3,):
            found = f"{columns['pictures'].dtype} {tuple(columns['pictures'].shape)}"
            raise BatchError(f"row {row} has pictures {found}; uint8 (S, 3, height, width) are needed.")
        if (problem := self._policy.head.check(columns["actions"])) is not None:
            raise BatchError(f"row {row} has actions {problem} are needed.")

    def _score(self, rows: TensorDict) -> dict[str, Tensor]:
        prompts: list[list[int]] = []
        pictures: list[Tensor] = []
        for prompt, seen in zip(rows["prompt_token_ids"].unbind(), rows["pictures"].unbind(), strict=True):
            self._policy.check_prompt(prompt.tolist())
            prompts += [prompt.tolist()] * len(seen)
            pictures += seen.unbind()
        hidden = self._policy.hidden(prompts, pictures)
        if self._policy.value is not None:
            return {"token_values": self._policy.value(hidden).squeeze(-1)}
        return {"token_logprobs": self._policy.head.logprobs(hidden, rows["actions"].values().to(hidden.device))}

    def save_model(self, path: str | Path) -> None:
        """Write a policy's folder, the adapter merged."""
        save_policy(path, self._config.model_path, dict(merged_tensors(self._policy)))
