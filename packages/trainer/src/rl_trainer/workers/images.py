"""The images of trajectories, as the engine is fed them.

In token ids an image has one place until here (rl-agent), and one placeholder for every feature that the vision tower
makes of it from here on (rl-engine). Models are those with the interface of Qwen2.5-VL and Qwen3-VL.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rl_rollout import placeholder_repeats
from rl_rollout.errors import RequestError
from rl_trainer.errors import InputError, TrainerError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from rl_agent.types import AgentLoopOutput

IMAGES = ("pixel_values", "image_grid_thw")
"""Ragged, float32 [patches of a row's images, numbers of a patch] and int64 [images, 3]: what the engine is fed."""


def takes_images(folder: Path) -> bool:
    """Whether the model in a folder takes images in this way, and the folder says how to prepare them."""
    file = folder / "config.json"
    vision = json.loads(file.read_text()).get("vision_config") or {} if file.is_file() else {}
    is_told = any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))
    return is_told and {"spatial_merge_size", "patch_size"} <= vision.keys()


class ImageReader:
    """Prepares images by the model's own image processor, as servers do.

    Args:
        folder: Of a model that `takes_images`.

    Raises:
        InputError: the processor cannot be loaded.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoImageProcessor

        load: Any = AutoImageProcessor.from_pretrained
        try:
            self._processor = load(folder, local_files_only=True, trust_remote_code=False)
        except (ImportError, OSError, ValueError) as error:
            raise InputError(
                f"the image processor in {folder} cannot be loaded (pip install 'rl-post-trainer[images]'): {error}"
            ) from error
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self._place: int = config.image_token_id
        vision = config.vision_config
        self._merged: int = vision.spatial_merge_size**2
        channels = getattr(vision, "in_channels", None) or vision.in_chans
        self._patch_numbers: int = channels * vision.temporal_patch_size * vision.patch_size**2

    def num_added(self, urls: Sequence[str]) -> int:
        """Tokens that a prompt with these images has beyond one for each; their pixels are not read."""
        return sum(self._num_tokens(_opened(url)) - 1 for url in urls)

    def _num_tokens(self, image: Any) -> int:
        patches: int = self._processor.get_number_of_image_patches(image.height, image.width)
        return patches // self._merged

    def read(self, outputs: Sequence[AgentLoopOutput]) -> tuple[list[AgentLoopOutput], list[tuple[Tensor, Tensor]]]:
        """The trajectories with their images' places written out, and the values of `IMAGES` for each.

        Raises:
            TrainerError: a trajectory has not as many places as images.
        """
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        written: list[AgentLoopOutput] = []
        values: list[tuple[Tensor, Tensor]] = []
        for output in outputs:
            for url in output.images:
                if url not in seen:
                    found = self._processor(images=[_opened(url).convert("RGB")], return_tensors="pt")
                    seen[url] = found["pixel_values"].float(), found["image_grid_thw"]
            of_row = [seen[url] for url in output.images]
            counts = [int(grid.prod()) // self._merged for _, grid in of_row]
            written.append(written_out(output, self._place, counts))
            none = torch.empty(0, self._patch_numbers), torch.empty(0, 3, dtype=torch.int64)
            pixels, grids = zip(none, *of_row, strict=True)
            values.append((torch.cat(pixels), torch.cat(grids)))
        return written, values


def written_out(output: AgentLoopOutput, place: int, counts: Sequence[int]) -> AgentLoopOutput:
    """Expand the placeholders of a trajectory: image i takes `counts[i]` tokens. Sampled placeholders stay single.

    Args:
        output: Trajectory with one placeholder for each image, or with all of them already.
        place: Placeholder token id.
        counts: Tokens of each image.

    Raises:
        TrainerError: there are neither as many placeholders as images, nor as many as these take.
    """
    pairs = zip(output.completion_token_ids, output.loss_mask, strict=True)
    given = [*output.prompt_token_ids, *(-1 if wrote else token for token, wrote in pairs)]
    try:
        times = placeholder_repeats("a trajectory", given, place, counts)
    except RequestError as error:
        raise TrainerError(str(error)) from error

    def repeated(name: str, times: Sequence[int]) -> tuple[Any, ...]:
        return tuple(value for value, count in zip(getattr(output, name), times, strict=True) for _ in range(count))

    start = len(output.prompt_token_ids)
    per_token = ("completion_token_ids", "loss_mask", "rollout_logprobs", "weight_versions")
    return replace(
        output,
        prompt_token_ids=repeated("prompt_token_ids", times[:start]),
        **{name: repeated(name, times[start:]) for name in per_token},
    )


def _opened(url: str) -> Any:
    """The image in a data URL, its pixels not yet decoded."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
