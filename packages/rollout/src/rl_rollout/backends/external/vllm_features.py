"""Prepared images as vLLM's `/inference/v1/generate` takes them: its `features`.

Written from vLLM 0.32 (`entrypoints/scale_out/token_in_token_out`, `v1/serial_utils`): of each image a hash, its places
in the prompt, and base64 of msgpack with the tensors that the model's own processor would have made of it.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from rl_rollout.multimodal import PreparedImages

RAW_VIEW = 3
"""Extension type of the bytes of a tensor."""


def features_of(images: PreparedImages) -> dict[str, Any]:
    """`features` of a request. vLLM knows an image again by the hash of its data URL."""
    from msgspec import msgpack  # needed for this alone

    grids = images.image_grid_thw
    pixels = images.pixel_values.split(grids.prod(-1).tolist())
    items = [_item(*pair) for pair in zip(pixels, grids, strict=True)]
    return {
        "mm_hashes": {"image": [hashlib.sha256(url.encode()).hexdigest() for url in images.urls]},
        "mm_placeholders": {"image": [{"offset": start, "length": end - start} for start, end in images.spans]},
        "kwargs_data": {"image": [base64.b64encode(msgpack.encode(item)).decode() for item in items]},
    }


def _item(pixel_values: Tensor, grid_thw: Tensor) -> dict[str, Any]:
    """One image: its fields, each with how vLLM is to put those of several images together."""
    rows = [[0, len(pixel_values), None]]
    return {
        "pixel_values": {
            "data": _tensor(pixel_values),
            "field": ("flat", {"keep_on_cpu": False, "slices": rows, "dim": 0}),
        },
        "image_grid_thw": {"data": _tensor(grid_thw), "field": ("batched", {"keep_on_cpu": True})},
    }


def _tensor(tensor: Tensor) -> tuple[str, tuple[int, ...], Any]:
    from msgspec.msgpack import Ext

    data = tensor.contiguous().numpy().tobytes()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), Ext(RAW_VIEW, data)
