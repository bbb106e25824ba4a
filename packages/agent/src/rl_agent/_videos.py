"""Videos in messages: frames of them, at even distances, which a vision-language model is shown as images."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from rl_agent._images import data_url
from rl_agent.errors import RowError

NUM_FRAMES = 8
"""Of a video that does not say how many."""


def frame_urls(video: Any, num_frames: int = NUM_FRAMES) -> tuple[str, ...]:
    """Frames of a video as data URLs, in order: the first, the last, and those at even distances between.

    Args:
        video: The bytes of a video file, its path, a `data:video/` URL, or its frames themselves, each as `data_url`
            takes it. Frames of a file are decoded by PyAV (`pip install 'rl-agent[videos]'`) and written as PNG, which
            loses nothing.
        num_frames: At most; a shorter video gives all that it has.

    Raises:
        RowError: it is no video, has no frames, or cannot be decoded here.
    """
    if not isinstance(num_frames, int) or isinstance(num_frames, bool) or num_frames < 1:
        raise RowError(f"nframes of a video is {num_frames!r}; a positive number of frames is needed")
    if isinstance(video, bytes):
        return _decoded(video, num_frames)
    if isinstance(video, str) and video.startswith("data:video/"):
        try:
            return _decoded(base64.b64decode(video.partition(",")[2], validate=True), num_frames)
        except binascii.Error as error:
            raise RowError(f"video {video!r:.80} is no base64: {error}") from error
    if isinstance(video, str) and not video.startswith(("http:", "https:")) and Path(video).is_file():
        return _decoded(Path(video).read_bytes(), num_frames)
    if isinstance(video, Sequence) and not isinstance(video, str) and video:
        frames = cast("Sequence[Any]", video)
        return tuple(data_url(frames[index]) for index in _chosen(len(frames), num_frames))
    raise RowError(
        f"video {video!r:.80} is no data URL, no bytes, no file here and no list of frames; nothing is downloaded"
    )


def _chosen(length: int, count: int) -> list[int]:
    if count == 1 or length == 1:
        return [0]
    count = min(count, length)
    return [round(index * (length - 1) / (count - 1)) for index in range(count)]


@lru_cache(maxsize=16)  # the rollouts of a group show the same
def _decoded(encoded: bytes, num_frames: int) -> tuple[str, ...]:
    try:
        import av
    except ImportError as error:
        raise RowError(
            "a row has a video file, which nothing here decodes: pip install 'rl-agent[videos]', or give its frames"
        ) from error
    try:
        with av.open(io.BytesIO(encoded)) as container:
            length = sum(1 for _ in container.decode(video=0))  # what the file says of itself may be missing, or wrong
        if not length:
            raise RowError("a video has no frames")
        wanted = set(_chosen(length, num_frames))
        with av.open(io.BytesIO(encoded)) as container:
            frames = [_png(frame) for at, frame in enumerate(container.decode(video=0)) if at in wanted]
    except (av.FFmpegError, IndexError) as error:  # the latter where there are only other streams
        raise RowError(f"a video of {len(encoded)} bytes cannot be decoded: {error}") from error
    return tuple(map(data_url, frames))


def _png(frame: Any) -> bytes:
    buffer = io.BytesIO()
    frame.to_image().save(buffer, "png")
    return buffer.getvalue()
