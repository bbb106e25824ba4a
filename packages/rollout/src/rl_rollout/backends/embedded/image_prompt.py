"""Image prompts: pixel values and positions of a vision-language model; videos are among the images.

Multimodal positions (M-RoPE) have three axes (time, height, width), and an image spans fewer of them than it has
tokens: a completion token's position is its index plus `shift`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_csrc.inference.audio import LENGTHS, omni_positions
from rl_csrc.inference.images import GRIDS, GivenPlaceholders, image_arguments, image_columns, rope_positions
from rl_csrc.inference.videos import SECONDS, VIDEO_GRIDS
from rl_rollout.multimodal import load_preparer

if TYPE_CHECKING:
    from torch import Tensor

    from rl_rollout.multimodal import ImagePreparer
    from rl_rollout.types import GenerateRequest

_SIZES = (GRIDS, VIDEO_GRIDS, SECONDS, LENGTHS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImagePrompt:
    """Model inputs for the images of one prompt of P tokens."""

    positions: Tensor
    """[3, P] int64, positions on the axes time, height and width; [P] of a model whose positions have one axis."""
    shift: int
    """Position of a token beyond the prompt, minus its index."""
    arguments: dict[str, Tensor]
    """Keyword arguments of the model that hold the images."""
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
        self._side = module.config.vision_config.patch_size
        self._prepare = preparer.prepare
        self._token_ids = preparer.token_ids
        self.takes_audio = preparer.audio_token_id is not None
        self.takes_videos = preparer.video_token_id is not None
        self.check_blind = preparer.check_blind
        self.given = GivenPlaceholders(self._trunk)

    def see(self, request: GenerateRequest) -> tuple[GenerateRequest, ImagePrompt]:
        """Expand the image placeholders of a request, and prepare its images.

        Raises:
            RequestError: see `ImagePreparer.prepare`.
        """
        request, prepared = self._prepare(request)
        ids, given = request.prompt_token_ids, prepared.given_ids
        num_seen = max(end for _, end in prepared.spans)
        sampled = zip(ids[:num_seen], given, strict=False)
        positions, shift = torch.arange(len(ids)), 0
        if GRIDS in prepared.columns:
            row, kinds = torch.tensor(given), torch.zeros(len(ids), dtype=torch.int32)
            sizes = {name: prepared.columns[name] for name in _SIZES if len(prepared.columns.get(name, ()))}
            for code, (name, each) in enumerate(zip((GRIDS, VIDEO_GRIDS), self._token_ids, strict=False), 1):
                kinds += code * (row == each) * (name in sizes)
            positions = (
                omni_positions(self._trunk, row, sizes).long()
                if self.takes_audio
                else rope_positions(self._trunk, torch.tensor(ids), kinds, sizes)
            )
            shift = int(positions.max()) + 1 - len(ids)
        return request, ImagePrompt(
            positions=positions,
            shift=shift,
            arguments=image_arguments(prepared.columns, self._side),
            given_ids=torch.tensor(given),
            sampled_places=tuple(
                i for i, pair in enumerate(sampled) if pair in [(each, -1) for each in self._token_ids]
            ),
            num_seen=num_seen,
        )


def load_image_reader(module: Any, model_path: str) -> ImageReader | None:
    """Image preprocessor of the model in this folder; None if it takes no images."""
    columns = image_columns(module.config.to_dict())
    if not columns or (GRIDS in columns and not hasattr(module.base_model, "get_rope_index")):
        return None
    preparer = load_preparer(model_path)
    return None if preparer is None else ImageReader(module, preparer)
