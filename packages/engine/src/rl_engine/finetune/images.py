"""Images of data rows: taken out of chats, checked, and prepared by the model's own image processor.

A row keeps its encoded images (data URLs, or paths of files) and the grids of their patches. Patches, which are many
times as large, are made when a step takes the row. Models are those with the interface of Qwen2.5-VL and Qwen3-VL.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_engine.batch.packed import ragged
from rl_engine.checkpoint.hf_folder import read_config
from rl_engine.errors import DataError, ModelFolderError
from rl_engine.registry import describe_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDict
    from torch import Tensor

    Message = Mapping[str, Any]

ENCODED = "images"
"""Column of rows' encoded images, of `RowImages`; `with_pixels` replaces it."""
GRIDS = "image_grid_thw"
"""Column of their grids: ragged, (images, 3) int64."""


def take_images(messages: Sequence[Message], given: Sequence[Any]) -> tuple[list[Message], list[str]]:
    """Extract the images of a chat; returns messages for a chat template, and the images in their order.

    A part of a message's content may be `{"type": "image"}`, which stands for the next one of `given`, the same with
    the image itself under `image`, or `{"type": "image_url", "image_url": {"url": ...}}`.

    Raises:
        DataError: there are more images than places for them, or fewer; something is no image; the assistant shows one.
    """
    left, taken, plain = iter(given), list[str](), list["Message"]()
    for message in messages:
        parts: Any = message.get("content")
        if isinstance(parts, list):
            parts = list(parts)
            for index, part in enumerate(parts):
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind in ("video", "video_url"):
                    raise DataError("has a video; training programs take images, such as frames of it")
                if kind in ("audio", "audio_url", "input_audio"):
                    raise DataError("has a sound; training programs take images, and rl-train sounds too")
                if kind not in ("image", "image_url"):
                    continue
                if message.get("role") == "assistant":
                    raise DataError("an assistant's message has an image; models here write text")
                image = part.get("image_url", part.get("image"))
                image = image.get("url") if isinstance(image, Mapping) and "url" in image else image
                image = next(left, None) if image is None else image
                if image is None:
                    raise DataError(f"the messages have more places for images than the {len(given)} in images")
                taken.append(encoded(image))
                parts[index] = {"type": "image"}
            message = {**message, "content": parts}
        plain.append(message)
    if num_left := len(list(left)):
        raise DataError(f"has {len(given)} images, and its messages places for {len(given) - num_left}")
    return plain, taken


def encoded(image: Any) -> str:
    """Path or data URL of an image: one of these, the bytes of a file, `{"bytes", "path"}`, or an image of Pillow.

    Raises:
        DataError: it is none of these, or no file is there.
    """
    if isinstance(image, Mapping):  # an image column of the datasets package
        image = image.get("bytes") or image.get("path")
    if hasattr(image, "save"):  # the same, decoded
        buffer = io.BytesIO()
        image.save(buffer, "png")
        image = buffer.getvalue()
    if isinstance(image, bytes):
        return f"data:image/unknown;base64,{base64.b64encode(image).decode()}"
    if isinstance(image, str) and (image.startswith("data:image/") or os.path.isfile(image)):  # noqa: PTH113 - long names
        return image
    raise DataError(f"image {image!r:.80} is not a data URL, bytes or an image file here; nothing is downloaded")


@dataclass(frozen=True, slots=True, eq=False)
class RowImages:
    """Encoded images of one row."""

    sources: tuple[str, ...]
    """Path or data URL of each."""
    reader: ImageReader

    def pixels(self) -> Tensor:
        """(patches, numbers of a patch) float32, of all images."""
        return torch.cat([self.reader.empty_pixels, *(self.reader.prepared(source)[0] for source in self.sources)])


def with_pixels(rows: TensorDict) -> TensorDict:
    """Rows as an engine takes them: encoded images replaced by their patches, `pixel_values`."""
    if ENCODED in rows.keys():  # noqa: SIM118 - a TensorDict iterates rows
        images: list[RowImages] = rows.pop(ENCODED).tolist()
        rows["pixel_values"] = ragged([each.pixels() for each in images], torch.float32)
    return rows


class ImageReader:
    """Image reader of a model folder; the processor is loaded with the first image."""

    def __init__(self, folder: str | Path) -> None:
        self._folder, self._processor = Path(folder), None
        self._grids: dict[str, Tensor] = {}
        self.takes_images = GRIDS in describe_model(folder).image_columns
        if self.takes_images:
            config = read_config(self._folder)
            self._token_id, vision = config.image_token_id, config.vision_config
            self._merged = vision.spatial_merge_size**2
            channels = getattr(vision, "in_channels", None) or vision.in_chans
            self.empty_pixels = torch.empty(0, channels * vision.temporal_patch_size * vision.patch_size**2)
            """(0, numbers of a patch) float32."""

    def prepared(self, source: str) -> tuple[Tensor, Tensor]:
        """(patches, numbers of a patch) float32 and (1, 3) int64, the grid of an encoded image.

        Raises:
            DataError: it cannot be read.
            ModelFolderError: the folder's image processor cannot be loaded.
        """
        from PIL import Image, UnidentifiedImageError

        if self._processor is None:
            self._processor = _image_processor(self._folder)
        head, _, data = source.partition(",")
        try:
            file = io.BytesIO(base64.b64decode(data, validate=True)) if head.startswith("data:") else source
            with Image.open(file) as image:
                found = self._processor(images=[image.convert("RGB")], return_tensors="pt")
        except UnidentifiedImageError as error:  # its text has the address of the file object
            raise DataError(f"image {source!r:.60} cannot be read: it is in no format that Pillow knows") from error
        except Exception as error:  # decoders raise what they like
            raise DataError(f"image {source!r:.60} cannot be read: {type(error).__name__}: {error}") from error
        return found["pixel_values"].float(), found["image_grid_thw"]

    def place(
        self, prompt: Sequence[int], completion: Sequence[int], mask: Sequence[int] | None, images: Sequence[str]
    ) -> tuple[list[int], list[int], list[int], Tensor]:
        """A row with as many placeholders as each image has features, and (images, 3) int64, their grids.

        A placeholder that is learned (mask 1; None: the whole completion) is a token like any other.

        Raises:
            DataError: an image cannot be read, the model takes none, or placeholders and images differ in number.
        """
        mask = [1] * len(completion) if mask is None else mask
        none = torch.empty(0, 3, dtype=torch.int64)
        if not self.takes_images:
            if images:
                raise DataError(
                    f"has images, and the model in {self._folder} takes none; models like Qwen2.5-VL and Qwen3-VL do"
                )
            return [*prompt], [*completion], [*mask], none
        given = [*prompt, *(-1 if kept else token for token, kept in zip(completion, mask, strict=True))]
        if (num_places := given.count(self._token_id)) != len(images):
            raise DataError(
                f"has {len(images)} images and {num_places} placeholders for them (token {self._token_id}); the chat "
                "template has to write one for each image, and the text none"
            )
        for source in images:
            if source not in self._grids:
                self._grids[source] = self.prepared(source)[1]
        grids = torch.cat([none, *(self._grids[source] for source in images)])
        left = iter((grids.prod(-1) // self._merged).tolist())
        times = [next(left) if token == self._token_id else 1 for token in given]
        long = [
            [value for value, count in zip(values, part, strict=True) for _ in range(count)]
            for values, part in (
                (prompt, times[: len(prompt)]),
                (completion, times[len(prompt) :]),
                (mask, times[len(prompt) :]),
            )
        ]
        return long[0], long[1], long[2], grids


def _image_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    load: Any = AutoImageProcessor.from_pretrained
    try:
        return load(folder, local_files_only=True, trust_remote_code=False)
    except (ImportError, OSError, ValueError) as error:
        raise ModelFolderError(
            f"the image processor in {folder} cannot be loaded (pip install pillow): {error}"
        ) from error
