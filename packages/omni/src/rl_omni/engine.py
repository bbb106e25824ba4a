"""Engine of flow-matching picture models; engine backend `diffusion`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from safetensors.torch import save_file

from rl_engine.errors import BatchError
from rl_omni.pipeline import check_folder, load_pipeline
from rl_omni.sampler import logprobs_of, mean_of
from rl_omni.step_engine import StepEngine, merged_tensors

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.base import Engine
    from rl_engine.types import EngineConfig
    from rl_omni.pipeline import PipelineModel

_STEPS = ("step_stds", "loss_mask")


def create(config: EngineConfig) -> Engine:
    """Create the engine; nothing is loaded before `initialize`."""
    return DiffusionEngine(config)


class DiffusionEngine(StepEngine):
    """Flow-matching model under training; a step is a denoising step.

    Columns of a row with S steps: `prompt_token_ids` (ragged), `latents` (ragged, (S + 1, C, H, W)), `timesteps`
    (ragged, S + 1), `step_stds` and `loss_mask` (ragged, S).
    """

    name: ClassVar[str] = "diffusion"
    settings = StepEngine.settings | {"activation_checkpointing"}
    targets = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    batch_columns = ("prompt_token_ids", "latents", "timesteps", *_STEPS)

    def _check_folder(self) -> None:
        check_folder(self._config.model_path)

    def _load(self) -> torch.nn.Module:
        self._model: PipelineModel = load_pipeline(self._config.model_path, self._device)
        if self._config.activation_checkpointing:
            self._model.transformer.enable_gradient_checkpointing()
        return self._model.transformer

    def _check_row(self, row: int, columns: dict[str, Tensor]) -> None:
        seen = {name: len(columns[name]) for name in ("latents", "timesteps", *_STEPS)}
        num_steps = seen["latents"] - 1
        expected = {"latents": num_steps + 1, "timesteps": num_steps + 1, **dict.fromkeys(_STEPS, num_steps)}
        if num_steps < 1 or seen != expected:
            raise BatchError(
                f"row {row} has lengths {seen}; S steps need S + 1 latents and timesteps, S of the others."
            )
        times, stds, mask = (columns[name] for name in ("timesteps", *_STEPS))
        if not (times[:-1] > times[1:]).all() or times[0] > 1 or times[-1] < 0:
            raise BatchError(f"row {row} has timesteps {times.tolist()}; they fall from at most 1 to at least 0.")
        if ((mask > 0) & (stds <= 0)).any():
            raise BatchError(f"row {row} has loss_mask 1 at a step with step_stds 0, which has no log-prob.")

    def _score(self, rows: TensorDict) -> dict[str, Tensor]:
        device, model = self._device, self._model
        latents, times = ([each.to(device) for each in rows[name].unbind()] for name in ("latents", "timesteps"))
        stds = rows["step_stds"].values().to(device)
        before, after = torch.cat([each[:-1] for each in times]), torch.cat([each[1:] for each in times])
        states, samples = torch.cat([each[:-1] for each in latents]), torch.cat([each[1:] for each in latents])
        prompts = [model.encode(tuple(each.tolist())) for each in rows["prompt_token_ids"].unbind()]
        conditions = [prompt for prompt, row in zip(prompts, times, strict=True) for _ in row[1:]]
        mean = mean_of(states, model.velocity(states, before, conditions), before, after, stds)
        return {"token_logprobs": logprobs_of(samples, mean, stds)}

    def save_model(self, path: str | Path) -> None:
        """Write a pipeline folder with the trained transformer, the adapter merged."""
        target = Path(path)
        shutil.copytree(
            self._config.model_path, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.index.json")
        )
        for file in (target / "transformer").glob("*.safetensors"):
            file.unlink()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in merged_tensors(self._model.transformer)}
        save_file(tensors, target / "transformer/diffusion_pytorch_model.safetensors", {"format": "pt"})
