"""Image preprocessing of prompts, for models with the interface of Qwen2.5-VL and Qwen3-VL.

In a prompt an image is a run of placeholder tokens, one per feature of the vision tower. Callers give one placeholder
per image, or all of them. Here each image is decoded, prepared by the model's own image processor, and its placeholders
are expanded. Every backend uses the result, so that all of them see the same prompt.
"""

from __future__ import annotations

import base64
import binascii
import io
import itertools
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_rollout.errors import RequestError
from rl_rollout.types import placeholder_repeats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rl_rollout.types import GenerateRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedImages:
    """Prepared images of one prompt of P tokens."""

    urls: tuple[str, ...]
    """Data URL of each image."""
    given_ids: tuple[int, ...]
    """[P] prompt token ids; -1 where a model sampled the token: a sampled placeholder represents no image."""
    pixel_values: Tensor
    """[patches of all images, elements of a patch] float32"""
    image_grid_thw: Tensor
    """[images, 3] int64, patches of each image along time, height and width."""
    spans: tuple[tuple[int, int], ...]
    """[start, end) of each image's placeholders among the P tokens."""


class ImagePreparer:
    """Image preprocessor of one model. `prepare` may run in any thread.

    Args:
        processor: The model's image processor, from transformers.
        token_id: Id of the image placeholder.
        num_merged: Patches per feature of the vision tower.
    """

    def __init__(self, processor: Any, *, token_id: int, num_merged: int) -> None:
        self._processor = processor
        self.token_id = token_id
        self._num_merged = num_merged

    def prepare(self, request: GenerateRequest) -> tuple[GenerateRequest, PreparedImages]:
        """Expand the image placeholders of a request, and prepare its images.

        Raises:
            RequestError: an image cannot be read, the number of placeholders does not fit the images, the prompt ends
                with one, or outputs about the prompt are asked for, which an image prompt does not have.
        """
        given = _given(request.prompt_token_ids, request.sampled_spans)
        if given[-1] == self.token_id:
            raise RequestError(f"request {request.request_id!r}: the prompt ends with an image; let a token follow it")
        if request.returns_prompt_logprobs:
            raise RequestError(
                f"request {request.request_id!r}: of a prompt with images, returns_prompt_logprobs cannot be had; "
                "leave it out"
            )
        pictures = [_decoded(request.request_id, index, url) for index, url in enumerate(request.images)]
        found = self._processor(images=pictures, return_tensors="pt")
        grids: Tensor = found["image_grid_thw"]
        counts = (grids.prod(-1) // self._num_merged).tolist()
        times = placeholder_repeats(f"request {request.request_id!r}", given, self.token_id, counts)
        ids, given = (_repeated(each, times) for each in (request.prompt_token_ids, given))
        prepared = PreparedImages(
            urls=request.images,
            given_ids=given,
            pixel_values=found["pixel_values"],
            image_grid_thw=grids,
            spans=_spans(request.request_id, given, self.token_id, counts),
        )
        return replace(request, prompt_token_ids=ids, sampled_spans=()), prepared

    def check_blind(self, request: GenerateRequest) -> None:
        """Check that a request without images has no image placeholder in its prompt.

        Raises:
            RequestError: it has one.
        """
        if not request.images and self.token_id in _given(request.prompt_token_ids, request.sampled_spans):
            raise RequestError(
                f"request {request.request_id!r}: the prompt has places for images (token {self.token_id}) and the "
                "request none; give `images`"
            )


def load_preparer(model_path: str, *, token_id: int, num_merged: int) -> ImagePreparer | None:
    """Image preprocessor of a model folder; None, and a warning in the log, where it cannot be loaded."""
    try:
        from transformers import AutoImageProcessor

        load: Any = AutoImageProcessor.from_pretrained
        return ImagePreparer(
            load(model_path, local_files_only=True, trust_remote_code=False), token_id=token_id, num_merged=num_merged
        )
    except (ImportError, OSError, ValueError) as error:
        _log.warning("%s is served without images, as its image processor cannot be loaded: %s", model_path, error)
        return None


def _spans(request_id: str, given: Sequence[int], token_id: int, counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """[start, end) of each image's placeholders, after their expansion."""
    places = [index for index, token in enumerate(given) if token == token_id]
    ends = list(itertools.accumulate(counts))
    spans = tuple((places[end - count], places[end - 1] + 1) for end, count in zip(ends, counts, strict=True))
    for index, ((start, end), count) in enumerate(zip(spans, counts, strict=True)):
        if end - start != count:
            raise RequestError(
                f"request {request_id!r}: the {count} places of image {index} are not one after the other, but among "
                f"tokens {start} to {end - 1}; put one placeholder for each image, or its places side by side"
            )
    return spans


def _repeated(ids: Sequence[int], times: Sequence[int]) -> tuple[int, ...]:
    return tuple(token for token, count in zip(ids, times, strict=True) for _ in range(count))


def _given(ids: Sequence[int], sampled_spans: Sequence[tuple[int, int]]) -> list[int]:
    """Token ids, with -1 where a model sampled the token."""
    given = list(ids)
    for start, end in sampled_spans:
        given[start:end] = [-1] * (end - start)
    return given


def _decoded(request_id: str, index: int, url: str) -> Any:
    """Decode the image of a data URL (RFC 2397) to an RGB image of PIL."""
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
