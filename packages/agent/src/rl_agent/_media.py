"""Images and videos in messages: taken out as they are, in the order in which the prompt shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rl_agent._images import data_url
from rl_agent._videos import NUM_FRAMES, frame_urls
from rl_agent.errors import RowError

if TYPE_CHECKING:
    from rl_agent.types import Message


def take_images(messages: Sequence[Message], row: Mapping[str, Any]) -> tuple[list[Message], tuple[str, ...]]:
    """Messages as a chat template takes them, and their images as data URLs.

    Parts of a message's content may be `{"type": "image"}`, which stands for the next of the row's `images`, the same
    with the image itself under `image`, and `{"type": "image_url", "image_url": {"url": ...}}`. In the same way
    `video`, `videos` and `video_url`: frames of it, as many as `nframes` of the part says (8), each an image in its
    place.

    Raises:
        RowError: there are more images or videos than places for them, or fewer, or something is none.
    """
    given = {kind: list(row.get(f"{kind}s") or ()) for kind in ("image", "video")}
    left = {kind: iter(values) for kind, values in given.items()}
    taken, plain = list[str](), list["Message"]()
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) or not isinstance(content, Sequence):
            plain.append(message)
            continue
        parts: list[Any] = []
        for part in cast("Sequence[Any]", content):
            kind = _kind_of(part)
            if kind is None:
                parts.append(part)
                continue
            medium = _own(part, kind) or next(left[kind], None)
            if medium is None:
                raise RowError(
                    f"the messages have more places for {kind}s than the {len(given[kind])} {kind}s of the row"
                )
            shown = (data_url(medium),) if kind == "image" else frame_urls(medium, part.get("nframes", NUM_FRAMES))
            taken += shown
            parts += [{"type": "image"}] * len(shown)
        plain.append({**message, "content": parts})
    for kind, rest in left.items():
        if num_left := len(list(rest)):
            total = len(given[kind])
            raise RowError(f"the row has {total} {kind}s, and its messages places for {total - num_left}")
    return plain, tuple(taken)


def _own(part: Mapping[str, Any], kind: str) -> Any:
    """What a part brings itself."""
    return part[f"{kind}_url"]["url"] if f"{kind}_url" in part else part.get(kind)


def _kind_of(part: Any) -> str | None:
    """`image` or `video`; None of other parts."""
    name = cast("Mapping[str, Any]", part).get("type") if isinstance(part, Mapping) else None
    return {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}.get(name or "")


def _is_image(part: Any) -> bool:
    return _kind_of(part) == "image"


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
