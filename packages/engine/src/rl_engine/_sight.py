"""Images in a packed batch, for models with the interface of Qwen2.5-VL and Qwen3-VL.

A row's images stand in it as placeholder tokens; their patches ride along as `pixel_values` and their sizes as
`image_grid_thw`. The model puts the features in the places of the placeholders. Only positions are made here: they have
three axes (time, height, width) and start anew in each row.

Legend: `T` tokens fed, `B` rows, `L` longest row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_engine.errors import BatchError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_engine._rows import PackedRows, RowBatch


def is_sighted(model: PreTrainedModel) -> bool:
    """Whether the model takes images in the way described above."""
    trunk: Any = model.base_model
    return hasattr(trunk, "visual") and hasattr(trunk, "get_rope_index")


class Sight:
    """What one model needs to see the images of a packed batch."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._trunk: Any = model.base_model
        self._token_id: int = model.config.image_token_id
        self._video_token_id: int = model.config.video_token_id
        self._vision: Any = model.config.vision_config

    def check(self, batch: RowBatch) -> None:
        """Refuse rows whose images do not fit.

        Raises:
            BatchError: says what does not belong together.
        """
        if batch.has("pixel_values_videos") or int(batch.count_tokens(self._video_token_id).sum()):
            raise BatchError("The batch has videos, which the engine does not take; give their frames as images.")
        batch.check_images(self._patch_numbers(), self._vision.spatial_merge_size**2, self._token_id)

    def arguments(self, rows: PackedRows, slot: Tensor, width: int) -> dict[str, Any]:
        """Keyword arguments of the model: positions (3, 1, T), and the images where there are any.

        Args:
            rows: The micro-batch.
            slot: (T,) place of each token in a right-padded (B, L) block.
            width: L.
        """
        if not rows.has_images:
            return {"position_ids": rows.position_ids.expand(3, 1, -1)}
        padded = rows.token_ids.new_zeros(len(rows.lengths) * width)
        mask = torch.zeros_like(padded)
        padded[slot], mask[slot] = rows.token_ids, 1
        kinds = (padded == self._token_id).to(torch.int32) * mask.to(torch.int32)
        shape = (len(rows.lengths), width)
        positions, _ = self._trunk.get_rope_index(
            padded.view(shape),
            mm_token_type_ids=kinds.view(shape),
            image_grid_thw=rows.grids,
            attention_mask=mask.view(shape),
        )
        return {
            "position_ids": positions.flatten(1)[:, None, slot],
            "pixel_values": rows.pixels,
            "image_grid_thw": rows.grids,
        }

    def blank(self, device: torch.device) -> Tensor:
        """Zero, made by the vision tower from a blank image.

        For a micro-batch without one: ranks must all gather and reduce the vision tower's parameters, or none.
        """
        side = self._vision.spatial_merge_size
        pixels = torch.zeros(side**2, self._patch_numbers(), device=device)
        grid = torch.tensor([[1, side, side]], device=device)
        found = self._trunk.get_image_features(pixels.to(self._trunk.visual.dtype), grid, return_dict=True)
        parts = [*found.pooler_output, *(part for layer in getattr(found, "deepstack_features", ()) for part in layer)]
        return torch.stack([part.sum() for part in parts]).sum() * 0.0

    def _patch_numbers(self) -> int:
        """Numbers of one patch: channels, frames, height and width."""
        vision = self._vision
        channels = getattr(vision, "in_channels", None) or vision.in_chans
        return channels * vision.temporal_patch_size * vision.patch_size**2
