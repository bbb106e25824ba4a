"""Image prompts: pixel values and multimodal positions (M-RoPE) of a vision-language model.

Positions have three axes (time, height, width), and an image spans fewer positions than it has tokens: a completion
token's position is its index plus `shift`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_csrc.inference.images import takes_images
from rl_rollout.multimodal import load_preparer

if TYPE_CHECKING:
    from torch import Tensor

    from rl_rollout.multimodal import ImagePreparer
    from rl_rollout.types import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImagePrompt:
    """Model inputs for the images of one prompt of P tokens."""

    positions: Tensor
    """[3, P] int64, positions on the axes time, height and width."""
    shift: int
    """Position of a token beyond the prompt, minus its index."""
    pixel_values: Tensor
    """[patches of all images, elements of a patch] float32"""
    image_grid_thw: Tensor
    """[images, 3] int64, patches of each image along the axes."""
    given_ids: Tensor
    """[P] int64, prompt token ids; -1 where a model sampled the token: a sampled placeholder represents no image."""
    sampled_places: tuple[int, ...]
    """Indices of sampled placeholders before the end of the last image."""
    num_seen: int
    """Number of tokens up to the end of the last image."""


class ImageReader:
    """Image preprocessor of one model. `see` may run in any thread.

    A placeholder that the model sampled stands for no image: it gets the embedding and the position of any other token.
    """

    def __init__(self, module: Any, preparer: ImagePreparer) -> None:
        self._trunk = module.base_model
        self._prepare = preparer.prepare
        self._token_id = preparer.token_id
        self.check_blind = preparer.check_blind
        self._find_places = self._trunk.get_placeholder_mask
        self._trunk.get_placeholder_mask = self._places
        self.given_ids: Tensor | None = None
        """[1, T] `ImagePrompt.given_ids` of the tokens of the current forward pass."""

    def _places(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replaces the model's search for image placeholders."""
        return self._find_places(input_ids if self.given_ids is None else self.given_ids, *args, **kwargs)

    def see(self, request: GenerateRequest) -> tuple[GenerateRequest, ImagePrompt]:
        """Expand the image placeholders of a request, and prepare its images.

        Raises:
            RequestError: see `ImagePreparer.prepare`.
        """
        request, prepared = self._prepare(request)
        ids, given = request.prompt_token_ids, prepared.given_ids
        row = torch.tensor([ids])
        kinds = (torch.tensor([given]) == self._token_id).int()
        num_seen = prepared.spans[-1][1]
        sampled = zip(ids[:num_seen], given, strict=False)
        grids = prepared.image_grid_thw
        positions, shift = self._trunk.get_rope_index(row, mm_token_type_ids=kinds, image_grid_thw=grids)
        return request, ImagePrompt(
            positions=positions[:, 0],
            shift=int(shift),
            pixel_values=prepared.pixel_values,
            image_grid_thw=grids,
            given_ids=torch.tensor(given),
            sampled_places=tuple(i for i, pair in enumerate(sampled) if pair == (self._token_id, -1)),
            num_seen=num_seen,
        )


def load_image_reader(module: Any, model_path: str) -> ImageReader | None:
    """Image preprocessor of the model in this folder; None if it takes no images."""
    if not (takes_images(module.config.to_dict()) and hasattr(module.base_model, "get_rope_index")):
        return None
    config = module.config
    num_merged = config.vision_config.spatial_merge_size**2
    preparer = load_preparer(model_path, token_id=config.image_token_id, num_merged=num_merged)
    return None if preparer is None else ImageReader(module, preparer)
