"""Sounds of rows as data URLs; nothing is decoded here."""

from __future__ import annotations

import base64
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from rl_agent.errors import RowError


def local_file(name: str) -> Path | None:
    """File here by its path or `file://` URL (RFC 8089); None if there is none, as for any other text."""
    path = unquote(urlsplit(name).path) if name.startswith("file://") else name
    return Path(path) if not name.startswith(("http:", "https:")) and os.path.isfile(path) else None  # noqa: PTH113 - long text


def audio_url(sound: Any) -> str:
    """Encode a sound as a data URL (RFC 2397); the bytes of a file are unchanged.

    Args:
        sound: A `data:audio/` URL, the bytes of a sound file, its path or `file://` URL, `{"bytes", "path"}` with one
            of these, as the datasets package stores sounds, or samples and their rate: `[samples, rate]`, or
            `{"array", "sampling_rate"}`. Samples are of one channel, from -1 to 1.

    Raises:
        RowError: it is none of these.
    """
    if isinstance(sound, Mapping):  # an audio column of the datasets package
        fields = cast("Mapping[str, Any]", sound)
        decoded = [fields["array"], fields.get("sampling_rate")] if "array" in fields else None
        sound = decoded or fields.get("bytes") or fields.get("path")
    if isinstance(sound, str) and sound.startswith("data:audio/"):
        return sound
    if isinstance(sound, str) and (path := local_file(sound)):
        sound = path.read_bytes()
    if isinstance(sound, bytes) and sound:
        return f"data:audio/file;base64,{base64.b64encode(sound).decode()}"
    if isinstance(sound, Sequence) and not isinstance(sound, str | bytes):
        return f"data:audio/wav;base64,{base64.b64encode(_wav(list(cast('Sequence[Any]', sound)))).decode()}"
    raise RowError(
        f"audio {sound!r:.80} is not a data URL, bytes, a sound file here or [samples, rate]; nothing is downloaded"
    )


def _wav(pair: list[Any]) -> bytes:
    """WAV file of samples, 32-bit floats."""
    try:
        samples, rate = array("f", pair[0]), int(pair[1])
        if len(pair) != 2 or not samples or rate < 1 or max(map(abs, samples)) > 1:
            raise ValueError
    except (IndexError, OverflowError, TypeError, ValueError) as error:
        raise RowError(
            f"audio {pair!r:.80} is not [samples, rate]: samples of one channel from -1 to 1, and samples per second"
        ) from error
    size = len(samples) * samples.itemsize
    header = struct.pack(
        "<4sI8sIHHIIHH4sI", b"RIFF", 36 + size, b"WAVEfmt ", 16, 3, 1, rate, 4 * rate, 4, 32, b"data", size
    )
    return header + samples.tobytes()
