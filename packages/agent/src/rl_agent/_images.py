"""Images in messages: taken out as they are, in the order in which the prompt shows them."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rl_agent.errors import RowError

if TYPE_CHECKING:
    from rl_agent.types import Message

_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


def data_url(image: Any) -> str:
    """An encoded image as a data URL (RFC 2397), its bytes untouched.

    Args:
        image: A data URL, the bytes of a PNG, JPEG, GIF or WebP file, or the path of one.

    Raises:
        RowError: it is none of these.
    """
    if isinstance(image, str) and image.startswith("data:image/"):
        return image
    if isinstance(image, bytes):
        kind = next((kind for start, kind in _SIGNATURES.items() if image.startswith(start)), None)
        if kind is None:
            raise RowError(f"an image starts with {image[:8]!r}; the bytes of a PNG, JPEG, GIF or WebP file are needed")
        return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
    if isinstance(image, str) and not image.startswith(("http:", "https:")) and Path(image).is_file():
        kind = mimetypes.guess_type(image)[0] or ""
        if kind.startswith("image/"):
            return f"data:{kind};base64,{base64.b64encode(Path(image).read_bytes()).decode()}"
    raise RowError(f"image {image!r:.80} is no data URL, no bytes and no image file here; nothing is downloaded")


def take_images(messages: Sequence[Message], images: Sequence[Any] = ()) -> tuple[list[Message], tuple[str, ...]]:
    """Messages as a chat template takes them, and their images as data URLs.

    Parts of a message's content may be `{"type": "image"}`, which stands for the next of `images`, the same with the
    image itself under `image`, and `{"type": "image_url", "image_url": {"url": ...}}`.

    Raises:
        RowError: there are more images than places for them, or fewer, or something is no image.
    """
    left, taken, plain = list(images), list[str](), list["Message"]()
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) or not isinstance(content, Sequence):
            plain.append(message)
            continue
        parts: list[Any] = []
        for part in cast("Sequence[Any]", content):
            if not _is_image(part):
                parts.append(part)
                continue
            if "image" in part or "image_url" in part:
                taken.append(data_url(part["image"] if "image" in part else part["image_url"]["url"]))
            elif left:
                taken.append(data_url(left.pop(0)))
            else:
                raise RowError(f"the messages have more places for images than the {len(images)} images of the row")
            parts.append({"type": "image"})
        plain.append({**message, "content": parts})
    if left:
        raise RowError(f"the row has {len(images)} images, and its messages places for {len(images) - len(left)}")
    return plain, tuple(taken)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and cast("Mapping[str, Any]", part).get("type") in ("image", "image_url")


def count_images(messages: Sequence[Message]) -> int:
    """Places for images in messages that `take_images` gave."""
    return sum(_is_image(part) for message in messages for part in _parts(message))


def without_images(messages: Sequence[Message]) -> list[Message]:
    """The messages with their places for images left out."""
    return [
        {**message, "content": [part for part in _parts(message) if not _is_image(part)]}
        if count_images([message])
        else message
        for message in messages
    ]


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return cast("Sequence[Any]", content) if isinstance(content, list) else ()
