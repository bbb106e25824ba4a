"""Images and videos of data rows: taken out of chats, checked, and prepared by the model's own processors.

A row keeps what is encoded (data URLs, or paths of files) and the grids of its patches. Patches, which are many times
as large, are made when a step takes the row. Models are those with the interface of Qwen2.5-VL and Qwen3-VL; which of
them take videos, `rl_csrc.inference.videos` says.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from rl_csrc.inference.images import GRIDS, PIXELS
from rl_csrc.inference.videos import SECONDS, VIDEO_GRIDS, VIDEO_PIXELS, is_video
from rl_engine.batch.packed import ragged
from rl_engine.checkpoint.hf_folder import read_config
from rl_engine.errors import DataError, ModelFolderError
from rl_engine.registry import describe_model, image_processor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDict
    from torch import Tensor

    from rl_csrc.inference.images import ImageProcessor

    Message = Mapping[str, Any]
    Media = Mapping[str, Sequence[Any]]

ENCODED = "images"
"""Column of rows' encoded images and videos, of `RowImages`; `with_pixels` replaces it."""
SIZES = (GRIDS, VIDEO_GRIDS, SECONDS)
"""Columns of their sizes: ragged, (images, 3) and (videos, 3) int64, and (videos) float32."""
_PATCHES = (PIXELS, VIDEO_PIXELS)


def take_images(messages: Sequence[Message], given: Media) -> tuple[list[Message], list[str]]:
    """Extract the images and videos of a chat; returns messages for a chat template, and these in their order.

    A part of a message's content may be `{"type": "image"}`, which stands for the next one of `given["image"]`, the
    same with the image itself under `image`, or `{"type": "image_url", "image_url": {"url": ...}}`. In the same way
    `video` and `video_url`, with `fps` or `nframes` to sample.

    Raises:
        DataError: there are more of a kind than places for them, or fewer; something is none; the assistant shows one.
    """
    left, taken, plain = {kind: iter(media) for kind, media in given.items()}, list[str](), list["Message"]()
    for message in messages:
        parts: Any = message.get("content")
        if isinstance(parts, list):
            parts = list(parts)
            for index, part in enumerate(parts):
                kind = str(part.get("type")).removesuffix("_url") if isinstance(part, Mapping) else ""
                if kind in ("audio", "input_audio"):
                    raise DataError("has a sound; training programs take images and videos, and rl-train sounds too")
                if kind not in left:
                    continue
                if message.get("role") == "assistant":
                    raise DataError("an assistant's message has an image or a video; models here write text")
                medium = part.get(f"{kind}_url", part.get(kind))
                medium = medium.get("url") if isinstance(medium, Mapping) and "url" in medium else medium
                medium = next(left[kind], None) if medium is None else medium
                if medium is None:
                    raise DataError(f"the messages have more places for {kind}s than the {len(given[kind])} in {kind}s")
                if kind == "image":
                    taken.append(encoded(medium))
                else:
                    taken.append(encoded_video(medium, fps=part.get("fps"), nframes=part.get("nframes")))
                parts[index] = {"type": kind}
            message = {**message, "content": parts}
        plain.append(message)
    for kind, media in given.items():
        if num_left := len(list(left[kind])):
            raise DataError(f"has {len(media)} {kind}s, and its messages places for {len(media) - num_left}")
    return plain, taken


def encoded(image: Any) -> str:
    """Path or data URL of an image.

    Args:
        image: One of these, a `file://` URL, the bytes of a file, `{"bytes", "path"}`, or an image of Pillow.

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
        return f"data:image/unknown;base64,{_base64(image)}"
    if isinstance(image, str) and image.startswith("data:image/"):
        return image
    if isinstance(image, str) and (path := _local_file(image)):
        return path
    raise DataError(f"image {image!r:.80} is not a data URL, bytes or an image file here; nothing is downloaded")


def encoded_video(video: Any, **asked: Any) -> str:
    """Data URL of a video for `rl_csrc.inference.videos`; of a file on disk with `path` and its path in place of bytes.

    Args:
        video: A path, a data URL, the bytes of a file, `{"bytes", "path"}`, or a list of frames, each as in `encoded`.
        asked: `fps` and `nframes`; None leaves them to the model's video processor.

    Raises:
        DataError: it is none of these, or no file is there.
    """
    if isinstance(video, Mapping):  # a video column of the datasets package
        video = video.get("bytes") or video.get("path")
    options = "".join(f";{name}={value}" for name, value in asked.items() if value is not None)
    if isinstance(video, list):
        frames = [_base64(_file_of(encoded(frame)).read()) for frame in video]  # pyright: ignore[reportUnknownVariableType]
        return f"data:video/jpeg{options};base64,{','.join(frames)}"
    if isinstance(video, bytes):
        return f"data:video/mp4{options};base64,{_base64(video)}"
    if isinstance(video, str) and video.startswith("data:video/"):
        head, _, data = video.partition(",")
        return f"{head.removesuffix(';base64')}{options};base64,{data}"
    if isinstance(video, str) and (path := _local_file(video)):
        return f"data:video/mp4{options}{_PATH}{path}"
    raise DataError(
        f"video {video!r:.80} is not a data URL, bytes, a video file here or a list of frames; nothing is downloaded"
    )


_PATH = ";path,"
"""What is before the path of a video's file in its source."""


def _local_file(name: str) -> str:
    """Path of a file here by its path or `file://` URL (RFC 8089); empty if there is none, as for any other text."""
    path = unquote(urlsplit(name).path) if name.startswith("file://") else name
    return path if os.path.isfile(path) else ""  # noqa: PTH113 - long names


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode()


def _file_of(source: str) -> io.BytesIO:
    """File of a source of `encoded`."""
    head, _, data = source.partition(",")
    is_url = head.startswith("data:")
    return io.BytesIO(base64.b64decode(data, validate=True) if is_url else Path(source).read_bytes())


@dataclass(frozen=True, slots=True, eq=False)
class RowImages:
    """Encoded images and videos of one row."""

    sources: tuple[str, ...]
    """Path or data URL of each; see `encoded_video` for those of videos."""
    reader: ImageReader

    def sizes(self) -> dict[str, Tensor]:
        """Columns of `SIZES` that the model takes."""
        return self._columns([self.reader.sized(source)[1] for source in self.sources], SIZES)

    def pixels(self) -> dict[str, Tensor]:
        """(patches, numbers of a patch) float32, of all images, and of all videos if the model takes some."""
        return self._columns([self.reader.prepared(source)[1] for source in self.sources], _PATCHES)

    def _columns(self, media: Sequence[Mapping[str, Tensor]], names: tuple[str, ...]) -> dict[str, Tensor]:
        return {name: values for name, values in self.reader.processor.join(media).items() if name in names}


def with_pixels(rows: TensorDict) -> TensorDict:
    """Rows as an engine takes them: what is encoded replaced by its patches."""
    if ENCODED in rows.keys():  # noqa: SIM118 - a TensorDict iterates rows
        images: list[RowImages] = rows.pop(ENCODED).tolist()
        rows.update(joined([each.pixels() for each in images]))
    return rows


def joined(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Ragged columns of rows, which all have the same ones."""
    return {name: ragged([row[name] for row in rows], value.dtype) for name, value in next(iter(rows), {}).items()}


class ImageReader:
    """Image and video reader of a model folder; the processor is loaded with the first of them."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._sized: dict[str, tuple[tuple[int, ...], dict[str, Tensor]]] = {}
        columns = describe_model(folder).image_columns
        self.takes_images = GRIDS in columns
        kinds = ("image", "video") if VIDEO_GRIDS in columns else ("image",)
        config = read_config(self._folder) if self.takes_images else None
        self._kinds = {int(getattr(config, f"{kind}_token_id")): kind for kind in kinds if self.takes_images}

    @cached_property
    def processor(self) -> ImageProcessor:
        """Processor of the folder.

        Raises:
            ModelFolderError: it cannot be loaded.
        """
        try:
            return image_processor(self._folder)
        except (ImportError, OSError, ValueError) as error:
            raise ModelFolderError(
                f"the image processor in {self._folder} cannot be loaded (pip install pillow): {error}"
            ) from error

    def sized(self, source: str) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """`prepared` without the patches; every source is read once."""
        if source not in self._sized:
            run, columns = self.prepared(source)
            self._sized[source] = run, {name: columns[name] for name in SIZES if name in columns}
        return self._sized[source]

    def prepared(self, source: str) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """Tokens of an encoded image or video, and the values of its columns.

        Raises:
            DataError: it cannot be read, or the model takes no videos.
            ModelFolderError: as `processor`.
        """
        from PIL import Image, UnidentifiedImageError

        processor = self.processor
        kind, (head, is_file, path) = "video" if is_video(source) else "image", source.partition(_PATH)
        try:
            if kind == "video":
                return processor.read_clip(f"{head};base64,{_base64(Path(path).read_bytes())}" if is_file else source)
            with Image.open(_file_of(source)) as image:
                return processor.read(image.convert("RGB"))
        except UnidentifiedImageError as error:  # its text has the address of the file object
            raise DataError(f"image {source!r:.60} cannot be read: it is in no format that Pillow knows") from error
        except Exception as error:  # decoders raise what they like
            raise DataError(f"{kind} {source!r:.60} cannot be read: {type(error).__name__}: {error}") from error

    def place(
        self, prompt: Sequence[int], completion: Sequence[int], mask: Sequence[int] | None, images: Sequence[str]
    ) -> tuple[list[int], list[int], list[int]]:
        """A row with the tokens of each image and video in its placeholder.

        A placeholder that is learned (mask 1; None: the whole completion) is a token like any other.

        Raises:
            DataError: one cannot be read, the model takes none, or placeholders and media differ in number.
        """
        mask = [1] * len(completion) if mask is None else mask
        if not self.takes_images:
            if images:
                raise DataError(
                    f"has images or videos, and the model in {self._folder} takes none; models like Qwen2.5-VL and "
                    "Qwen3-VL do"
                )
            return [*prompt], [*completion], [*mask]
        given = [*prompt, *(-1 if kept else token for token, kept in zip(completion, mask, strict=True))]
        runs = {token_id: list[tuple[int, ...]]() for token_id in self._kinds}
        for source in images:
            run = self.sized(source)[0]
            runs[self.processor.placeholder(source)].append(run)
        for token_id, kind in self._kinds.items():
            if (num_places := given.count(token_id)) != len(runs[token_id]):
                raise DataError(
                    f"has {len(runs[token_id])} {kind}s and {num_places} placeholders for them (token {token_id}); the "
                    f"chat template has to write one for each {kind}, and the text none"
                )
        left = {token_id: iter(of_kind) for token_id, of_kind in runs.items()}
        parts = [
            next(left[place]) if place in left else (token,)
            for place, token in zip(given, [*prompt, *completion], strict=True)
        ]
        before, after = parts[: len(prompt)], parts[len(prompt) :]
        return (
            [token for part in before for token in part],
            [token for part in after for token in part],
            [kept for part, kept in zip(after, mask, strict=True) for _ in part],
        )
