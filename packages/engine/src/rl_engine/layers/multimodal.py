"""Images and videos in a packed batch: see `rl_csrc.inference.images` for the families.

`MultimodalInputs` is of models with the interface of Qwen2.5-VL and Qwen3-VL. A row's images stand in it as
placeholder tokens; their patches ride along as `pixel_values` and their sizes as
`image_grid_thw`, those of videos as `pixel_values_videos` and `video_grid_thw`. The model puts the features in the
places of the placeholders. Only positions are made here: they have three axes (time, height, width) and start anew in
each row. They are made once for a whole batch, on the CPU: transformers asks for the sizes of one image after another,
which on a GPU would wait for it each time. (Its vision towers still do so, once for each micro-batch with images.)
`ImageInputs` is of models whose positions have one axis. A placeholder that the model wrote itself (`loss_mask` 1) is a
token like any other, as in inference engines.

Legend: `T` tokens fed.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_csrc.inference.images import (
    GRIDS,
    PIXELS,
    SIZES,
    GivenPlaceholders,
    image_arguments,
    image_columns,
    merge_size,
    rope_positions,
    tile_features,
)
from rl_engine.batch.packed import to_device
from rl_engine.batch.row_batch import VISUAL
from rl_engine.errors import BatchError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_engine.batch.packed import PackedRows
    from rl_engine.batch.row_batch import RowBatch


def vision_tower(model: PreTrainedModel) -> str:
    """Name of the module that makes features of images.

    Raises:
        ConfigError: there is none.
    """
    if not image_columns(model.config.to_dict()):
        raise ConfigError(f"freeze_vision is true and {type(model).__name__} takes no images. Set it to false.")
    return f"{model.base_model_prefix}.{'visual' if hasattr(model.base_model, 'visual') else 'vision_tower'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """Kind of placeholder token: image or video."""

    name: str
    """`image` or `video`."""
    pixels: str
    """The column of its patches."""
    grids: str
    """The column of its sizes."""
    code: int
    """Number of the kind in the model's `mm_token_type_ids`."""


MODALITIES = (
    Modality(name="image", pixels=PIXELS, grids=GRIDS, code=1),
    Modality(name="video", pixels="pixel_values_videos", grids="video_grid_thw", code=2),
)
SECONDS = "second_per_grid_ts"


def modalities_in(rows: PackedRows) -> list[Modality]:
    """Kinds of placeholder that a micro-batch has."""
    return [kind for kind in MODALITIES if len(rows.visual.get(kind.grids, ()))]


class MultimodalInputs:
    """Image and video inputs of one model, for packed batches."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._trunk: Any = model.base_model
        self._token_ids = {kind.code: int(getattr(model.config, f"{kind.name}_token_id")) for kind in MODALITIES}
        self._vision: Any = model.config.vision_config
        self._takes_seconds = SECONDS in inspect.signature(self._trunk.get_rope_index).parameters
        self._given = GivenPlaceholders(self._trunk)
        self.num_passes = 1
        """Runs of the vision tower per micro-batch, the same on every rank: all gather its parameters together."""

    def passes_for(self, batch: RowBatch) -> int:
        """Runs that this rank's rows need in one micro-batch."""
        return max(1, sum(batch.has(kind.grids) and len(batch.ragged(kind.grids)[0]) > 0 for kind in MODALITIES))

    def passes_in(self, rows: PackedRows) -> int:
        """Runs that a micro-batch needs itself."""
        return len(modalities_in(rows))

    def check(self, batch: RowBatch) -> None:
        """Refuse rows whose images or videos do not fit.

        Raises:
            BatchError: says what does not belong together.
        """
        for kind in MODALITIES:
            self._check(batch, kind)
        if not batch.has(SECONDS):
            return
        if not self._takes_seconds:
            raise BatchError(
                f"The batch has {SECONDS} and {type(self._trunk).__name__} reads time from its text. Drop the column."
            )
        seconds = batch.ragged(SECONDS)[1]
        if not batch.has(MODALITIES[1].grids) or not torch.equal(batch.ragged(MODALITIES[1].grids)[1], seconds):
            raise BatchError(f"{SECONDS} needs one number for each video of {MODALITIES[1].grids}.")

    def _check(self, batch: RowBatch, kind: Modality) -> None:
        marks = batch.count_given(self._token_ids[kind.code])
        has_pixels, has_grids = batch.has(kind.pixels), batch.has(kind.grids)
        if not has_pixels and not has_grids:
            if int(marks.sum()):
                raise BatchError(
                    f"Rows hold {kind.name} tokens ({self._token_ids[kind.code]}); give {kind.pixels} and {kind.grids}."
                )
            return
        if not has_pixels or not has_grids:
            raise BatchError(f"{kind.pixels} and {kind.grids} come together; the batch has one of them.")
        (pixels, num_patches), (grids, num_grids) = batch.ragged(kind.pixels), batch.ragged(kind.grids)
        size, merged = self._patch_numbers(), self._vision.spatial_merge_size**2
        if pixels.ndim != 2 or pixels.shape[1] != size or grids.shape[1:] != (3,):
            raise BatchError(
                f"{kind.pixels} has values of shape {list(pixels.shape)} and {kind.grids} of {list(grids.shape)}; "
                f"wanted (patches, {size}) and ({kind.name}s, 3)."
            )
        row_of = torch.arange(batch.num_rows, device=grids.device).repeat_interleave(num_grids)
        patches = torch.zeros_like(marks).index_add_(0, row_of, grids.prod(-1))
        wrong = (patches != num_patches) | (patches != marks * merged)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise BatchError(
                f"Row {row} has grids of {int(patches[row])} patches, {int(num_patches[row])} patches and "
                f"{int(marks[row])} {kind.name} tokens; {merged} patches belong to each such token."
            )

    def place(self, batch: RowBatch) -> None:
        """Give every token of the batch its position."""
        if not any(batch.has(kind.grids) for kind in MODALITIES) or not batch.num_rows:
            return
        columns = {name: batch.ragged(name) for name in self._size_columns(batch)}
        by_row = {name: values.cpu().split(counts.tolist()) for name, (values, counts) in columns.items()}
        packed = batch.lay_out(range(batch.num_rows))
        assert packed.given_ids is not None
        rows = packed.given_ids.cpu().split(list(packed.lengths))
        batch.place(
            torch.cat(
                [
                    self._positions(tokens, {name: parts[row] for name, parts in by_row.items() if len(parts[row])})
                    for row, tokens in enumerate(rows)
                ]
            )
        )

    def _size_columns(self, batch: RowBatch) -> list[str]:
        """Columns of the batch that positions depend on."""
        return [name for name in (*(kind.grids for kind in MODALITIES), SECONDS) if batch.has(name)]

    def _positions(self, given_ids: Tensor, sizes: dict[str, Tensor]) -> Tensor:
        """(tokens, 3) of one row."""
        kinds = torch.zeros_like(given_ids, dtype=torch.int32)
        for code, token_id in self._token_ids.items():
            kinds[given_ids == token_id] = code
        return rope_positions(self._trunk, given_ids, kinds, sizes).T

    def arguments(self, rows: PackedRows) -> dict[str, Any]:
        """Keyword arguments of the model: positions (3, 1, T), and the images and videos where there are any."""
        if rows.places is None:
            return {"position_ids": rows.position_ids.expand(3, 1, -1)}
        assert rows.given_ids is not None
        seen = {name: rows.visual[name] for kind in modalities_in(rows) for name in (kind.pixels, kind.grids)}
        given, places = rows.given_ids, rows.places
        if rows.shared is not None:
            fed = to_device(rows.shared.fed, given.device)
            for kind in modalities_in(rows):
                seen |= self._fed(kind, seen[kind.pixels], seen[kind.grids], given, fed)
            given, places = given[fed], places[fed]
        self._given.ids = given[None]
        return {"position_ids": places.T[:, None], **seen}

    def _fed(self, kind: Modality, pixels: Tensor, grids: Tensor, given: Tensor, fed: Tensor) -> dict[str, Tensor]:
        """Patches and grids of the images whose tokens are fed, in the order of these."""
        counts = grids.prod(-1)
        kept = self._kept(self._token_ids[kind.code], counts // self._vision.spatial_merge_size**2, given, fed)
        pieces = pixels.split(counts.tolist())
        return {kind.pixels: torch.cat([pieces[index] for index in kept.tolist()]), kind.grids: grids[kept]}

    @staticmethod
    def _kept(token_id: int, num_tokens: Tensor, given: Tensor, fed: Tensor) -> Tensor:
        """Indices of the media, each of so many placeholders among `given`, whose tokens are fed."""
        medium = torch.full_like(given, -1)
        medium[given == token_id] = torch.arange(len(num_tokens), device=given.device).repeat_interleave(num_tokens)
        kept = medium[fed]
        return kept[kept >= 0].unique_consecutive()

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


class ImageInputs:
    """Image inputs of one model whose positions have one axis (LLaVA, InternVL, Mistral 3); see `MultimodalInputs`."""

    num_passes = 1

    def __init__(self, model: PreTrainedModel, columns: tuple[str, ...]) -> None:
        self._trunk: Any = model.base_model
        self._given = GivenPlaceholders(self._trunk)
        config, vision = model.config, model.config.vision_config
        self._columns, self._token_id = columns, int(config.image_token_id)
        side = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
        self._side = side
        self._merge = merge_size(config)
        size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        self._shape = (3 * side**2,) if SIZES in columns else (3, size, size)
        self._num_features = 0 if SIZES in columns else tile_features(config)

    def passes_for(self, batch: RowBatch) -> int:
        """See `MultimodalInputs`."""
        del batch
        return 1

    def passes_in(self, rows: PackedRows) -> int:
        """See `MultimodalInputs`."""
        return int(len(rows.visual.get(PIXELS, ())) > 0)

    def check(self, batch: RowBatch) -> None:
        """Refuse rows whose images do not fit.

        Raises:
            BatchError: says what does not belong together.
        """
        for name in VISUAL:
            if batch.has(name) and name not in self._columns:
                raise BatchError(f"The batch has {name} and {type(self._trunk).__name__} does not take it. Drop it.")
        marks = batch.count_given(self._token_id)
        missing = [name for name in self._columns if not batch.has(name)]
        if missing:
            if len(missing) < len(self._columns) or int(marks.sum()):
                raise BatchError(f"Rows with image tokens ({self._token_id}) need {', '.join(missing)}.")
            return
        pixels, counts = batch.ragged(PIXELS)
        if pixels.shape[1:] != self._shape:
            raise BatchError(f"{PIXELS} has values of shape {[*pixels.shape[1:]]}; wanted {[*self._shape]} each.")
        wanted = counts * self._num_features
        if SIZES in self._columns:
            sizes, num_images = batch.ragged(SIZES)
            row_of = torch.arange(batch.num_rows, device=sizes.device).repeat_interleave(num_images)
            wanted = torch.zeros_like(marks).index_add_(0, row_of, (sizes // (self._side * self._merge)).prod(-1))
            patches = torch.zeros_like(marks).index_add_(0, row_of, (sizes // self._side).prod(-1))
            if not torch.equal(patches, counts):
                raise BatchError(f"{SIZES} has {patches.tolist()} patches by row and {PIXELS} {counts.tolist()}.")
        if bool((wanted != marks).any()):
            row = int((wanted != marks).nonzero()[0])
            raise BatchError(
                f"Row {row} has images of {int(wanted[row])} features and {int(marks[row])} image tokens; one feature "
                "belongs to each."
            )

    def place(self, batch: RowBatch) -> None:
        """Positions count tokens."""

    def arguments(self, rows: PackedRows) -> dict[str, Any]:
        """Keyword arguments of the model: positions (1, T), and the images where there are any."""
        positions = {"position_ids": rows.position_ids[None]}
        if not self.passes_in(rows):
            return positions
        assert rows.given_ids is not None
        self._given.ids = rows.given_ids[None]
        return positions | image_arguments({name: rows.visual[name] for name in self._columns}, self._side)

    def blank(self, device: torch.device) -> Tensor:
        """See `MultimodalInputs`."""
        edge = self._side * self._merge
        size = (3, edge, edge) if SIZES in self._columns else self._shape
        pixels = torch.zeros(1, *size, device=device, dtype=self._trunk.dtype)
        sizes = {SIZES: torch.tensor([[edge, edge]], device=device)} if SIZES in self._columns else {}
        found = self._trunk.get_image_features(pixels, **sizes, return_dict=True).pooler_output
        return torch.stack([part.sum() for part in found]).sum() * 0.0
