"""Pictures for tests of vision-language models."""

import base64
import io

import torch
from PIL import Image


def png(width, height, seed):
    """A data URL of noise."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=draw, dtype=torch.uint8)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels.numpy().tobytes()).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
