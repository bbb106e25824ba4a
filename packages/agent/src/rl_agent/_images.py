"""One image: its encoded bytes, as a data URL."""

from __future__ import annotations

import base64
import mimetypes
from pathlib import Path
from typing import Any

from rl_agent.errors import RowError

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
