"""Images and videos of messages, extracted unchanged in the order in which the prompt shows them."""

from __future__ import annotations

import base64
import binascii
import io
import mimetypes
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from rl_agent.audio import audio_url, local_file
from rl_agent.errors import RowError

if TYPE_CHECKING:
    from rl_agent.types import Message


def take_images(
    messages: Sequence[Message], row: Mapping[str, Any], *, takes_videos: bool = False
) -> tuple[list[Message], tuple[str, ...]]:
    """Extract images, videos and sounds; returns messages for a chat template, and data URLs in their order.

    Parts of a message's content may be `{"type": "image"}`, which stands for the next of the row's `images`, the same
    with the image itself under `image`, and `{"type": "image_url", "image_url": {"url": ...}}`. In the same way
    `video`, `videos` and `video_url`. A model that `takes_videos` gets the video (see `video_url`), another one frames
    of it, as many as `nframes` of the part says (8), each an image in its place. In the same way `audio`, `audios` and
    `audio_url`, or OpenAI's `input_audio`: see `rl_agent.audio`.

    Raises:
        RowError: there are more images, videos or sounds than places for them, or fewer, or something is none.
    """
    given = {kind: list(row.get(f"{kind}s") or ()) for kind in ("image", "video", "audio")}
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
            if kind == "video" and takes_videos:
                taken.append(video_url(medium, fps=part.get("fps"), num_frames=part.get("nframes")))
                parts.append({"type": "video"})
                continue
            if kind == "audio":
                taken.append(audio_url(medium))
                parts.append({"type": "audio"})
                continue
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
    """Image, video or sound that a content part holds itself."""
    if "input_audio" in part:
        return f"data:audio/{part['input_audio'].get('format')};base64,{part['input_audio'].get('data')}"
    return part[f"{kind}_url"]["url"] if f"{kind}_url" in part else part.get(kind)


def _kind_of(part: Any) -> str | None:
    """Kind of a content part: `image`, `video` or `audio`; None for others."""
    name = cast("Mapping[str, Any]", part).get("type") if isinstance(part, Mapping) else None
    kind = str(name).removesuffix("_url").removeprefix("input_")
    return kind if kind in ("image", "video", "audio") and name != "input_image" else None


def count_images(messages: Sequence[Message]) -> int:
    """Number of placeholders of images, videos and sounds in messages from `take_images`."""
    return sum(_kind_of(part) is not None for message in messages for part in _parts(message))


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Messages without their placeholders of images, videos and sounds."""
    return [
        {**message, "content": [part for part in _parts(message) if _kind_of(part) is None]}
        if count_images([message])
        else message
        for message in messages
    ]


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return cast("Sequence[Any]", content) if isinstance(content, list) else ()


_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


def data_url(image: Any) -> str:
    """Encode an image as a data URL (RFC 2397), its bytes unchanged.

    Args:
        image: A data URL, the bytes of a PNG, JPEG, GIF or WebP file, its path or `file://` URL, or `{"bytes", "path"}`
            with one of these, as the datasets package stores images.

    Raises:
        RowError: it is none of these.
    """
    if isinstance(image, Mapping):  # an image column of the datasets package
        fields = cast("Mapping[str, Any]", image)
        image = fields.get("bytes") or fields.get("path")
    if isinstance(image, str) and image.startswith("data:image/"):
        return image
    if isinstance(image, bytes):
        kind = next((kind for start, kind in _SIGNATURES.items() if image.startswith(start)), None)
        if kind is None:
            raise RowError(f"an image starts with {image[:8]!r}; the bytes of a PNG, JPEG, GIF or WebP file are needed")
        return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
    if isinstance(image, str) and (path := local_file(image)):
        kind = mimetypes.guess_type(path)[0] or ""
        if kind.startswith("image/"):
            return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    raise RowError(f"image {image!r:.80} is not a data URL, bytes or an image file here; nothing is downloaded")


NUM_FRAMES = 8
"""Default number of frames of a video."""


def video_url(video: Any, *, fps: Any = None, num_frames: Any = None) -> str:
    """Encode a video as a data URL, its bytes unchanged: see `rl_csrc.inference.videos`.

    Args:
        video: The bytes of a video file, its path or `file://` URL, a `data:video/` URL, its frames, each as `data_url`
            takes it, or `{"bytes", "path"}`, as the datasets package stores videos.
        fps: Frames per second to sample of a file, or the rate of given frames; None: as the model's processor says.
        num_frames: Number of frames to sample; None leaves it to the rate.

    Raises:
        RowError: it is no video, or a number is not positive.
    """
    for name, value in (("fps", fps), ("nframes", num_frames)):
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise RowError(f"{name} of a video is {value!r}; a positive number is needed")
    if num_frames is not None and type(num_frames) is not int:
        raise RowError(f"nframes of a video is {num_frames!r}; a whole number is needed")
    options = "".join(f";{name}={value}" for name, value in (("fps", fps), ("nframes", num_frames)) if value)
    if frames := _frames_in(video):
        return f"data:video/jpeg{options};base64,{','.join(data_url(each).partition(',')[2] for each in frames)}"
    if isinstance(video, str) and video.startswith("data:video/") and (options or ";base64," in video):
        head, _, data = video.partition(",")
        return f"{head.removesuffix(';base64')}{options};base64,{data}"
    return f"data:video/mp4{options};base64,{base64.b64encode(_video_bytes(video)).decode()}"


def _frames_in(video: Any) -> Sequence[Any]:
    """Frames of a video that is a list of them; empty if it is something else."""
    return cast("Sequence[Any]", video) if isinstance(video, Sequence) and not isinstance(video, str | bytes) else ()


def _video_bytes(video: Any) -> bytes:
    """Bytes of a video file.

    Raises:
        RowError: it is none.
    """
    if isinstance(video, Mapping):  # a video column of the datasets package
        fields = cast("Mapping[str, Any]", video)
        video = fields.get("bytes") or fields.get("path")
    if isinstance(video, bytes):
        return video
    if isinstance(video, str) and video.startswith("data:video/"):
        try:
            return base64.b64decode(video.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise RowError(f"video {video!r:.80} is not base64: {error}") from error
    if isinstance(video, str) and (path := local_file(video)):
        return path.read_bytes()
    raise RowError(
        f"video {video!r:.80} is not a data URL, bytes, a file here or a list of frames; nothing is downloaded"
    )


def frame_urls(video: Any, num_frames: int = NUM_FRAMES) -> tuple[str, ...]:
    """Frames of a video as data URLs, in order: first, last, and evenly spaced ones between.

    Args:
        video: As `video_url` takes it. Frames of a file are decoded by PyAV (`pip install 'rl-agent[videos]'`) and
            written as PNG, which loses nothing.
        num_frames: At most; a shorter video gives all that it has.

    Raises:
        RowError: it is no video, has no frames, or cannot be decoded here.
    """
    if type(num_frames) is not int or num_frames < 1:
        raise RowError(f"nframes of a video is {num_frames!r}; a positive number of frames is needed")
    if frames := _frames_in(video):
        return tuple(data_url(frames[index]) for index in _chosen(len(frames), num_frames))
    return _decoded(_video_bytes(video), num_frames)


def _chosen(length: int, count: int) -> list[int]:
    if count == 1 or length == 1:
        return [0]
    count = min(count, length)
    return [round(index * (length - 1) / (count - 1)) for index in range(count)]


@lru_cache(maxsize=16)  # the rollouts of a group show the same
def _decoded(encoded: bytes, num_frames: int) -> tuple[str, ...]:
    try:
        import av
        from av.error import FFmpegError
    except ImportError as error:
        raise RowError(
            "a row has a video file, which nothing here decodes: pip install 'rl-agent[videos]', or give its frames"
        ) from error
    try:
        with av.open(io.BytesIO(encoded), "r") as container:
            length = sum(1 for _ in container.decode(video=0))  # what the file says of itself may be missing, or wrong
        if not length:
            raise RowError("a video has no frames")
        wanted = set(_chosen(length, num_frames))
        with av.open(io.BytesIO(encoded), "r") as container:
            frames = [_png(frame) for at, frame in enumerate(container.decode(video=0)) if at in wanted]
    except (FFmpegError, IndexError) as error:  # the latter where there are only other streams
        raise RowError(f"a video of {len(encoded)} bytes cannot be decoded: {error}") from error
    return tuple(map(data_url, frames))


def _png(frame: Any) -> bytes:
    buffer = io.BytesIO()
    frame.to_image().save(buffer, "png")
    return buffer.getvalue()
