"""Images of vision-language models: which families take them, in which columns, and how they are read.

Plan, engine, servers and trainer ask the same functions. An image is a run of tokens in a prompt, placeholders of its
features among them. Families:

- Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and others with their interface: patches and their grid.
- LLaVA 1.5 with a CLIP or SigLIP tower, and InternVL: images, or tiles of them, all of one size.
- Mistral 3: images of any size, as patches of the pixels here; a token ends each line of features.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_csrc.inference.audio import FRAMES, LENGTHS, AudioProcessor, audio_arguments, is_audio, takes_audio
from rl_csrc.inference.videos import SECONDS, VIDEO_GRIDS, VIDEO_PIXELS, VideoProcessor, is_video, video_columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PACKED_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types whose tokens meet in attention alone, so that rows can be packed."""
PIXELS, GRIDS, SIZES = "pixel_values", "image_grid_thw", "image_sizes"
FAMILIES = "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5, LLaVA 1.5, InternVL, Mistral 3"
"""Names of the families that take images."""
_REFUSED = {
    "gemma3": "tokens of a Gemma 3 image attend to one another in both directions, which packed rows do not",
    "llava_next": "LLaVA-NeXT joins the features of an image's tiles by a rule of its own",
    "llava_onevision": "LLaVA-OneVision cuts an image into tiles only where it is the prompt's only one",
    "llava": "this LLaVA has another vision tower than CLIP or SigLIP",
}


def image_columns(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Columns of a row's images, as a model takes them; empty if it takes no images.

    Args:
        config: Values of its `config.json`.
    """
    vision, text = config.get("vision_config") or {}, config.get("text_config") or config
    if not {*(text.get("layer_types") or ())} <= PACKED_LAYERS | {"linear_attention"}:
        return ()
    match config.get("model_type"):
        case "llava":
            is_plain = vision.get("model_type") in ("clip_vision_model", "siglip_vision_model")
            return (PIXELS,) if is_plain else ()
        case "internvl":
            return (PIXELS,)
        case "mistral3":
            return (PIXELS, SIZES)
        case _:
            return (PIXELS, GRIDS) if {"spatial_merge_size", "patch_size"} <= vision.keys() else ()


def why_blind(config: Mapping[str, Any]) -> str:
    """Why a model takes no images, as a clause that names its family."""
    kind = config.get("model_type")
    why = "it has no vision tower" if not config.get("vision_config") else "its family has no mapping here"
    return f"of model type {kind!r}, {_REFUSED.get(str(kind), why)} (families that take images: {FAMILIES})"


def merge_size(config: Any) -> int:
    """Patches along a side of what becomes one feature; `config` is the model's, of transformers."""
    return int(getattr(config, "spatial_merge_size", None) or getattr(config.vision_config, "spatial_merge_size", 1))


def tile_features(config: Any) -> int:
    """Features of each image, or tile of one, of LLaVA and InternVL; `config` is the model's, of transformers."""
    vision = config.vision_config
    size, side = (value if isinstance(value, int) else value[0] for value in (vision.image_size, vision.patch_size))
    if config.model_type == "internvl":
        return round((size // side) ** 2 * config.downsample_ratio**2)
    has_more = vision.model_type == "clip_vision_model"  # one more in front, which the default drops
    return (size // side) ** 2 + has_more - (config.vision_feature_select_strategy == "default")


def to_patches(image: Tensor, side: int) -> Tensor:
    """`[lines * columns, 3 * side * side]` patches of an image `[3, lines * side, columns * side]`, line by line."""
    return image.unflatten(1, (-1, side)).unflatten(3, (-1, side)).permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1)


def from_patches(patches: Tensor, sizes: Tensor, side: int) -> Tensor:
    """Images `[images, 3, H, W]` from their patches, padded with 0 to the largest.

    Args:
        patches: As `to_patches` gives them, of all images.
        sizes: `[images, 2]` int64, height and width of each image in pixels.
        side: Pixels of a patch's side.
    """
    height, width = sizes.amax(0).tolist()
    images = patches.new_zeros(len(sizes), 3, height, width)
    lines = sizes // side
    for image, part, (rows, columns) in zip(
        images, patches.split(lines.prod(-1).tolist()), lines.tolist(), strict=True
    ):
        whole = part.view(rows, columns, 3, side, side).permute(2, 0, 3, 1, 4)
        image[:, : rows * side, : columns * side] = whole.reshape(3, rows * side, columns * side)
    return images


class GivenPlaceholders:
    """Replaces a model's search for image placeholders: one that it sampled is a token like any other.

    Args:
        trunk: The base model, of transformers.
    """

    def __init__(self, trunk: Any) -> None:
        self._find = trunk.get_placeholder_mask
        trunk.get_placeholder_mask = self._places
        self.ids: Tensor | None = None
        """[1, T] token ids of the current forward pass, -1 where they were sampled; None: as the model is fed them."""

    def _places(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._find(input_ids if self.ids is None else self.ids, *args, **kwargs)


class ImageProcessor:
    """Image and video processor of a model folder, with tokens and columns of each. Calls may come from any thread.

    Raises:
        ImportError, OSError, ValueError: transformers cannot load it.
    """

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

        def load(auto: Any) -> Any:
            return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

        config, self._processor = load(AutoConfig), load(AutoImageProcessor)
        config = getattr(config, "thinker_config", config)
        values = config.to_dict()
        self._image_columns = image_columns(values)
        self.columns = self._image_columns + video_columns(values)
        """Names of the columns of images, videos and sounds."""
        self.token_id = int(config.image_token_id)
        """Id of an image's placeholder."""
        self.video_token_id = int(config.video_token_id) if video_columns(values) else None
        """Id of a video's placeholder; None where the model takes none."""
        self._audio = AudioProcessor(folder) if takes_audio(values) else None
        self.columns += self._audio.columns if self._audio else ()
        self.audio_token_id = self._audio.token_id if self._audio else None
        """Id of a sound's placeholder; None where the model takes none."""
        self._folder, self._config = folder, values
        self._side, self._merge = config.vision_config.patch_size, merge_size(config)
        self._options: dict[str, Any] = {}
        self._ends: tuple[int, ...] = ()
        if self.video_token_id is not None:
            self._tokenizer = load(AutoTokenizer)
        elif config.model_type == "internvl":
            tokenizer, self._options = load(AutoTokenizer), {"crop_to_patches": True}
            self._ends = tokenizer.start_image_token_id, tokenizer.end_image_token_id
        elif SIZES in self.columns:
            self._options = {"patch_size": self._side * self._merge}
            self._ends = tuple(load(AutoTokenizer).convert_tokens_to_ids(["[IMG_BREAK]", "[IMG_END]"]))
        self._num_features = tile_features(config) if self.columns == (PIXELS,) else 0

    @cached_property
    def _videos(self) -> VideoProcessor:
        def encode(text: str) -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=False)

        return VideoProcessor(self._folder, self._config, encode)

    def placeholder(self, url: str) -> int:
        """Placeholder id of an image, a video or a sound.

        Raises:
            ValueError: it is a video or a sound, and the model takes none.
        """
        if is_audio(url):
            if self.audio_token_id is None:
                raise ValueError(f"models of type {self._config['model_type']!r} take no sounds; leave them out")
            return self.audio_token_id
        if not is_video(url):
            return self.token_id
        if self.video_token_id is None:
            raise ValueError(
                f"models of type {self._config['model_type']!r} take no videos here; give frames as images"
            )
        return self.video_token_id

    def runs(self, urls: Sequence[str], runs: Sequence[tuple[int, ...]]) -> dict[int, list[tuple[int, ...]]]:
        """Tokens of images and videos by the id of their placeholder, each kind in its order."""
        found: dict[int, list[tuple[int, ...]]] = {self.token_id: []}
        if self.audio_token_id is not None:
            found[self.audio_token_id] = []
        for url, run in zip(urls, runs, strict=True):
            found.setdefault(self.placeholder(url), []).append(run)
        return found

    def read_clip(self, url: str) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """Tokens of a video or a sound, and the values of its columns.

        Raises:
            ValueError: see `VideoProcessor.read` and `AudioProcessor.read`; the model takes none.
        """
        self.placeholder(url)
        return self._audio.read(url) if self._audio is not None and is_audio(url) else self._videos.read(url)

    def num_clip_tokens(self, url: str) -> int:
        """Tokens of a video, whose frames are not decoded, or of a sound; raises as `read_clip`."""
        self.placeholder(url)
        if is_audio(url):
            return len(self.read_clip(url)[0])
        return len(self._videos.sampled(url)[1].tokens)

    def read(self, image: Any) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """Tokens of a PIL image in RGB, and the values of its columns."""
        found = self._processor(images=[image], return_tensors="pt", **self._options)
        values = {name: torch.as_tensor(found[name]) for name in self._image_columns}
        values[PIXELS] = values[PIXELS].float()
        if GRIDS in values:
            return (self.token_id,) * (int(values[GRIDS].prod()) // self._merge**2), values
        if SIZES in values:
            lines, columns = (values[SIZES][0] // (self._side * self._merge)).tolist()
            values[PIXELS] = to_patches(values[PIXELS][0], self._side)
            run = (*[self.token_id] * columns, self._ends[0]) * lines
            return (*run[:-1], self._ends[1]), values
        run = (self.token_id,) * (self._num_features * len(values[PIXELS]))
        return (*self._ends[:1], *run, *self._ends[1:]), values

    def num_tokens(self, height: int, width: int) -> int:
        """Tokens of an image of so many pixels."""
        if GRIDS in self.columns:
            return self._processor.get_number_of_image_patches(height, width) // self._merge**2
        from PIL import Image

        return len(self.read(Image.new("RGB", (width, height)))[0])

    def join(self, media: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Columns of a row with these images and videos, of which there may be none."""
        return {
            name: torch.cat([self._empty[name], *(each[name] for each in media if name in each)])
            for name in self.columns
        }

    @cached_property
    def _empty(self) -> dict[str, Tensor]:
        """Columns of a row without an image."""
        from PIL import Image

        none = {name: value[:0] for name, value in self.read(Image.new("RGB", (64, 64)))[1].items()}
        if self.video_token_id is not None:
            none |= {VIDEO_PIXELS: none[PIXELS], VIDEO_GRIDS: none[GRIDS], SECONDS: torch.empty(0)}
        return none | (self._audio.empty() if self._audio is not None else {})


def rope_positions(trunk: Any, ids: Tensor, kinds: Tensor, sizes: Mapping[str, Tensor]) -> Tensor:
    """`[3, T]` positions (time, height, width) of one row, for models with `get_rope_index`.

    The text after a video starts beyond all positions of the video (2409.12191), as in inference servers. In
    transformers 5.23 it starts beyond the height and width alone, at positions that later frames have too.

    Args:
        trunk: The base model, of transformers.
        ids: `[T]` int64.
        kinds: `[T]` int32: 1 where a token is of an image, 2 of a video, else 0.
        sizes: Columns of grids, and of seconds, those that the row has.
    """
    positions = trunk.get_rope_index(ids[None], mm_token_type_ids=kinds[None], **sizes)[0][:, 0]
    ends = (kinds.diff() != 0).nonzero()[:, 0].add(1).tolist()
    for start, end in pairwise([0, *ends]):
        if kinds[start] == 2:
            positions[:, end:] += (positions[:, start:end].max() + 1 - positions[:, end].min()).clamp_min(0)
    return positions


def image_arguments(columns: Mapping[str, Tensor], side: int) -> dict[str, Tensor]:
    """Keyword arguments of the model for images in these columns; `side` is the pixels of a patch's side."""
    if GRIDS in columns:  # of the kinds that there are; positions are made elsewhere
        found = {name: value for name, value in columns.items() if len(value) and name != SECONDS}
        lengths = found.pop(LENGTHS, None)
        return found if lengths is None else found | audio_arguments(found[FRAMES].split(lengths.tolist()))
    if SIZES not in columns:
        return dict(columns)
    return {**columns, PIXELS: from_patches(columns[PIXELS], columns[SIZES], side)}
