"""Images of a prompt, for models with the interface of Qwen2.5-VL and Qwen3-VL.

An image stands in a prompt as placeholder tokens, one for every feature that the vision tower makes of it. Callers
give one placeholder per image, or all of them; here each image is decoded, prepared by the model's own image
processor, and written out. Positions have three axes (time, height, width), and an image takes fewer of them than it
has tokens: from the prompt's end on, a token's position is its index plus `shift`.
"""

from __future__ import annotations

import base64
import binascii
import io
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rl_rollout.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rl_rollout.types import GenerateRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenPrompt:
    """The images of one prompt of P tokens, as the model takes them."""

    positions: Tensor
    """[3, P] int64, on the axes time, height and width."""
    shift: int
    """Position of token i, beyond the prompt, minus i."""
    pixel_values: Tensor
    """[patches of all images, numbers of a patch] float32"""
    image_grid_thw: Tensor
    """[images, 3] int64, patches of each along the axes."""
    given_ids: Tensor
    """[P] int64, the prompt; -1 where a model sampled the token, which then stands for no image."""
    sampled_places: tuple[int, ...]
    """Where a placeholder was sampled before the end of the last image."""
    num_seen: int
    """Tokens up to the end of the last image."""


class Sight:
    """Prepares images for one model. `see` may run in any thread.

    Placeholders that a model sampled stand for nothing: their tokens have the embedding and the position of any other.
    """

    def __init__(self, module: Any, processor: Any) -> None:
        self._trunk = module.base_model
        self._processor = processor
        self._token_id: int = module.config.image_token_id
        self._num_merged: int = module.config.vision_config.spatial_merge_size**2
        self._find_places = self._trunk.get_placeholder_mask
        self._trunk.get_placeholder_mask = self._places
        self.given_ids: Tensor | None = None
        """[1, T] of the pass under way, `SeenPrompt.given_ids` of its tokens."""

    def _places(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's own search for placeholders."""
        return self._find_places(input_ids if self.given_ids is None else self.given_ids, *args, **kwargs)

    def see(self, request: GenerateRequest) -> tuple[GenerateRequest, SeenPrompt]:
        """The request with its images' places written out, and what the model is to see there.

        Raises:
            RequestError: an image cannot be read, the prompt has not as many places as there are images, it ends with
                one, or more is asked about it than can be told.
        """
        given = _given(request.prompt_token_ids, request.sampled_spans)
        if given[-1] == self._token_id:
            raise RequestError(f"request {request.request_id!r}: the prompt ends with an image; let a token follow it")
        if request.returns_prompt_logprobs or request.returns_routed_experts:
            raise RequestError(
                f"request {request.request_id!r}: of a prompt with images, neither returns_prompt_logprobs nor "
                "returns_routed_experts can be had; leave them out"
            )
        pictures = [_decoded(request.request_id, index, url) for index, url in enumerate(request.images)]
        found = self._processor(images=pictures, return_tensors="pt")
        grids: Tensor = found["image_grid_thw"]
        counts = (grids.prod(-1) // self._num_merged).tolist()
        times = repeats(request.request_id, given, self._token_id, counts)
        ids, given = (_repeated(each, times) for each in (request.prompt_token_ids, given))
        row = torch.tensor([ids])
        kinds = (torch.tensor([given]) == self._token_id).int()
        num_seen = len(given) - given[::-1].index(self._token_id)
        sampled = zip(ids[:num_seen], given, strict=False)
        positions, shift = self._trunk.get_rope_index(row, mm_token_type_ids=kinds, image_grid_thw=grids)
        seen = SeenPrompt(
            positions=positions[:, 0],
            shift=int(shift),
            pixel_values=found["pixel_values"],
            image_grid_thw=grids,
            given_ids=torch.tensor(given),
            sampled_places=tuple(i for i, pair in enumerate(sampled) if pair == (self._token_id, -1)),
            num_seen=num_seen,
        )
        return replace(request, prompt_token_ids=ids, sampled_spans=()), seen

    def check_blind(self, request: GenerateRequest) -> None:
        """Refuse a prompt with places for images and none to put there.

        Raises:
            RequestError: says so.
        """
        if not request.images and self._token_id in _given(request.prompt_token_ids, request.sampled_spans):
            raise RequestError(
                f"request {request.request_id!r}: the prompt has places for images (token {self._token_id}) and the "
                "request none; give `images`"
            )


def load_sight(module: Any, model_path: str) -> Sight | None:
    """How the model in this folder is shown images; None if it takes none."""
    if not (hasattr(module.base_model, "visual") and hasattr(module.base_model, "get_rope_index")):
        return None
    from transformers import AutoImageProcessor

    load: Any = AutoImageProcessor.from_pretrained
    try:
        return Sight(module, load(model_path, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        _log.warning("%s is served without images, as its image processor cannot be loaded: %s", model_path, error)
        return None


def repeats(request_id: str, given: Sequence[int], token_id: int, counts: Sequence[int]) -> list[int]:
    """How often each token is to stand in a prompt in which image i takes `counts[i]` placeholders.

    Args:
        request_id: For the error.
        given: With one placeholder per image, or with all of them already.
        token_id: The placeholder.
        counts: Placeholders of each image.

    Raises:
        RequestError: there are neither as many placeholders as images, nor as many as these take.
    """
    num_places = sum(token == token_id for token in given)
    if num_places == sum(counts):
        return [1] * len(given)
    if num_places != len(counts):
        raise RequestError(
            f"request {request_id!r}: {len(counts)} images and {num_places} places for them (token {token_id}); the "
            f"prompt must have one for each image, or all {sum(counts)} that their features take. Tokens that a model "
            "sampled are told in sampled_spans"
        )
    left = iter(counts)
    return [next(left) if token == token_id else 1 for token in given]


def _repeated(ids: Sequence[int], times: Sequence[int]) -> tuple[int, ...]:
    return tuple(token for token, count in zip(ids, times, strict=True) for _ in range(count))


def _given(ids: Sequence[int], sampled_spans: Sequence[tuple[int, int]]) -> list[int]:
    """The ids, -1 where a model sampled one."""
    given = list(ids)
    for start, end in sampled_spans:
        given[start:end] = [-1] * (end - start)
    return given


def _decoded(request_id: str, index: int, url: str) -> Any:
    """The image in a data URL (RFC 2397), as an RGB image of PIL."""
    from PIL import Image

    where = f"request {request_id!r}: image {index}"
    head, comma, data = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        raise RequestError(f"{where} is {url[:40]!r}..., and must be a data URL: data:image/png;base64,...")
    try:
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
            return image.convert("RGB")
    except (binascii.Error, OSError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(f"{where} cannot be read: {error}") from error
