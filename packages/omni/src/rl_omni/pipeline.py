"""Pipeline folders of diffusers, and the flow model of each transformer class that is supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_omni.base import Condition, FlowModel
from rl_omni.errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

TRANSFORMERS = ("SD3Transformer2DModel", "FluxTransformer2DModel", "QwenImageTransformer2DModel")
"""Transformer classes of diffusers that are supported."""
_COMPONENTS = {"transformer", "scheduler", "text_encoder", "tokenizer", "vae"}
_PATCH = 2


def check_folder(folder: str | Path) -> dict[str, Any]:
    """Check a pipeline folder by its JSON files, and read its transformer's configuration.

    Raises:
        PipelineError: a component is missing, or of a class that is not supported; names it.
    """
    root = Path(folder)
    index = _read(root / "model_index.json")
    named = {name for name, value in index.items() if isinstance(value, list) and value[0] is not None}
    if extra := sorted(named - _COMPONENTS):
        raise PipelineError(
            f"{root}/model_index.json has {', '.join(extra)}; supported are {', '.join(sorted(_COMPONENTS))}"
        )
    config = _read(root / "transformer/config.json")
    if config.get("_class_name") not in TRANSFORMERS:
        raise PipelineError(
            f"{root}/transformer is a {config.get('_class_name')}; supported are {', '.join(TRANSFORMERS)}"
        )
    if config.get("guidance_embeds"):
        raise PipelineError(f"{root}/transformer has guidance_embeds=true; use a model without guidance distillation")
    if _read(root / "scheduler/scheduler_config.json").get("use_dynamic_shifting"):
        raise PipelineError(f"{root}/scheduler has use_dynamic_shifting=true; set it to false and give a fixed shift")
    if _read(root / "text_encoder/config.json").get("model_type") != "clip_text_model":
        raise PipelineError(f"{root}/text_encoder is no clip_text_model, the only text encoder that is supported")
    return config


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise PipelineError(f"{file} cannot be read: {error}; give a folder that diffusers saved") from error


def load_pipeline(folder: str | Path, device: torch.device | str = "cpu") -> PipelineModel:
    """Load a pipeline folder in float32.

    Raises:
        PipelineError: as `check_folder`, or a component cannot be loaded.
    """
    import diffusers
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from transformers import CLIPTextModelWithProjection

    root, config = Path(folder), check_folder(folder)
    kind: Any = getattr(diffusers, config["_class_name"])
    try:
        transformer = kind.from_pretrained(root / "transformer", use_safetensors=True, trust_remote_code=False)
        encoder: Any = CLIPTextModelWithProjection.from_pretrained(root / "text_encoder", trust_remote_code=False)
        vae: Any = None
        if (root / "vae").is_dir():
            vae = AutoencoderKL.from_pretrained(root / "vae", use_safetensors=True, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise PipelineError(f"{root} cannot be loaded: {error}") from error
    model = _MODELS[config["_class_name"]](transformer.to(device), encoder.to(device), vae)
    for frozen in (encoder, vae):
        if frozen is not None:
            frozen.to(device).requires_grad_(requires_grad=False)
    return model


def times_of(folder: str | Path, num_steps: int) -> Tensor:
    """Times of `num_steps` steps by the folder's scheduler (its shift), (num_steps + 1,) float32 from 1 to 0."""
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    root = Path(folder) / "scheduler"
    scheduler: Any = FlowMatchEulerDiscreteScheduler.from_pretrained(root, trust_remote_code=False)
    scheduler.set_timesteps(sigmas=[1 - i / num_steps for i in range(num_steps)])
    return scheduler.sigmas.float()


class PipelineModel(FlowModel):
    """Flow model of a diffusers pipeline: transformer, CLIP text encoder, and VAE if the folder has one."""

    def __init__(self, transformer: Any, encoder: Any, vae: Any) -> None:
        self.transformer: Any = transformer.eval()
        self.vae = vae
        self._encoder = encoder.eval()
        self._encoded: dict[tuple[int, ...], Condition] = {}

    def encode(self, prompt_token_ids: tuple[int, ...]) -> Condition:
        """Encode a prompt, padded to the encoder's context; the last 1024 prompts are cached."""
        if (found := self._encoded.get(prompt_token_ids)) is not None:
            return found
        config = self._encoder.config
        limit, size = config.max_position_embeddings, config.vocab_size
        if not 0 < len(prompt_token_ids) <= limit or not all(0 <= token < size for token in prompt_token_ids):
            raise PipelineError(
                f"the prompt has {len(prompt_token_ids)} ids up to {max(prompt_token_ids, default='none')}; the text "
                f"encoder takes 1 to {limit} ids from 0 to {size - 1}"
            )
        padded = [*prompt_token_ids, *[config.eos_token_id] * (limit - len(prompt_token_ids))]
        with torch.no_grad():
            output = self._encoder(input_ids=torch.tensor([padded], device=self._encoder.device))
        if len(self._encoded) >= 1024:
            self._encoded.clear()
        condition = Condition(output.last_hidden_state[0], output.text_embeds[0])
        return self._encoded.setdefault(prompt_token_ids, condition)

    def velocity(self, latents: Tensor, times: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """Predict the velocity by the transformer."""
        sequence = torch.stack([each.sequence for each in conditions])
        pooled = torch.stack([each.pooled for each in conditions])
        return self._forward(latents, times, sequence, pooled)

    def _forward(self, latents: Tensor, times: Tensor, sequence: Tensor, pooled: Tensor) -> Tensor:
        return self.transformer(
            hidden_states=latents,
            timestep=1000 * times,
            encoder_hidden_states=sequence,
            pooled_projections=pooled,
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor) -> Tensor:
        """Decode by the VAE; without one, latents are pixels from -1 to 1."""
        with torch.no_grad():
            if self.vae is not None:
                config = self.vae.config
                latents = self.vae.decode(latents / config.scaling_factor + (config.shift_factor or 0)).sample
            return ((latents + 1) / 2).clamp(0, 1)


def _packed(latents: Tensor) -> Tensor:
    """Patches of two by two latents as one vector each, (B, H/2 * W/2, 4 C)."""
    return torch.nn.functional.pixel_unshuffle(latents, _PATCH).flatten(2).transpose(1, 2)


def _unpacked(packed: Tensor, like: Tensor) -> Tensor:
    height, width = (size // _PATCH for size in like.shape[-2:])
    return torch.nn.functional.pixel_shuffle(packed.transpose(1, 2).unflatten(2, (height, width)), _PATCH)


class _Flux(PipelineModel):
    def _forward(self, latents: Tensor, times: Tensor, sequence: Tensor, pooled: Tensor) -> Tensor:
        height, width = (size // _PATCH for size in latents.shape[-2:])
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        image_ids = torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1).to(latents)
        packed = self.transformer(
            hidden_states=_packed(latents),
            timestep=times,
            encoder_hidden_states=sequence,
            pooled_projections=pooled,
            img_ids=image_ids,
            txt_ids=image_ids.new_zeros(sequence.shape[1], 3),
            return_dict=False,
        )[0]
        return _unpacked(packed, latents)


class _QwenImage(PipelineModel):
    def _forward(self, latents: Tensor, times: Tensor, sequence: Tensor, pooled: Tensor) -> Tensor:
        del pooled  # this transformer has no pooled input
        height, width = (size // _PATCH for size in latents.shape[-2:])
        packed = self.transformer(
            hidden_states=_packed(latents),
            timestep=times,
            encoder_hidden_states=sequence,
            encoder_hidden_states_mask=sequence.new_ones(sequence.shape[:2], dtype=torch.bool),
            img_shapes=[[(1, height, width)]] * len(latents),
            return_dict=False,
        )[0]
        return _unpacked(packed, latents)


_MODELS = dict(zip(TRANSFORMERS, (PipelineModel, _Flux, _QwenImage), strict=True))
