"""Pictures as data URLs, which is how they travel where text does."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def data_url(picture: Tensor) -> str:
    """PNG of a (3, H, W) picture, 0 to 1, as a data URL; 8 bits a channel."""
    from PIL import Image

    pixels = (picture * 255).round().byte().permute(1, 2, 0).contiguous()
    file = io.BytesIO()
    Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), pixels.numpy().tobytes()).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def picture_of(url: str) -> Tensor:
    """(3, H, W) float32 picture, 0 to 1, of a data URL.

    Raises:
        ValueError: it is no data URL of an image.
    """
    from PIL import Image

    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ValueError(f"{url!r:.60} is no data URL of an image")
    image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1) / 255


def observation_of(pixels: Any, text: str) -> list[dict[str, str]]:
    """Content parts of an observation: a (H, W, 3) uint8 array as a picture, and the instruction."""
    url = data_url(torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255)
    return [{"type": "image", "image": url}, {"type": "text", "text": text}]
