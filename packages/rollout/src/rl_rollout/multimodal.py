"""Image and video preprocessing of prompts, for the families of `rl_csrc.inference.images`.

In a prompt an image is a run of tokens, with a placeholder for each feature of the vision tower, and so is a video, by
another placeholder. Callers give one placeholder per image, or whole runs. Here each is decoded, prepared by the
model's own processor, and its placeholder is expanded. Every backend uses the result, so that all of them see the same
prompt.
"""

from __future__ import annotations

import base64
import binascii
import io
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_csrc.inference.audio import is_audio
from rl_csrc.inference.images import ImageProcessor
from rl_csrc.inference.videos import is_video
from rl_rollout.errors import RequestError
from rl_rollout.types import expand_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rl_rollout.types import GenerateRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedImages:
    """Prepared images and videos of one prompt of P tokens."""

    urls: tuple[str, ...]
    """Data URL of each."""
    given_ids: tuple[int, ...]
    """[P] prompt token ids; -1 where a model sampled the token: a sampled placeholder represents no image."""
    columns: dict[str, Tensor]
    """Columns of all, each kind end to end: see `rl_csrc.inference.images.image_columns`, `videos.video_columns`."""
    spans: tuple[tuple[int, int], ...]
    """[start, end) of each one's run among the P tokens."""


class ImagePreparer:
    """Image preprocessor of one model. `prepare` may run in any thread.

    Args:
        processor: The model folder's.
    """

    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor
        self.token_id, self.video_token_id = processor.token_id, processor.video_token_id
        self.audio_token_id = processor.audio_token_id
        kinds = (self.token_id, self.video_token_id, self.audio_token_id)
        self.token_ids = [kind for kind in kinds if kind is not None]
        """Placeholder ids of images, videos and sounds."""

    def prepare(self, request: GenerateRequest) -> tuple[GenerateRequest, PreparedImages]:
        """Expand the placeholders of a request, and prepare its images and videos.

        Raises:
            RequestError: an image cannot be read, the number of placeholders does not fit the images, the prompt ends
                with one, or outputs about the prompt are asked for, which an image prompt does not have.
        """
        given = _given(request.prompt_token_ids, request.sampled_spans)
        if given[-1] in (self.token_id, self.audio_token_id) or (
            request.has_videos and given[-1] == self.video_token_id
        ):
            raise RequestError(f"request {request.request_id!r}: the prompt ends with an image; let a token follow it")
        if request.returns_prompt_logprobs:
            raise RequestError(
                f"request {request.request_id!r}: of a prompt with images, returns_prompt_logprobs cannot be had; "
                "leave it out"
            )
        read = [self._read(request.request_id, i, url) for i, url in enumerate(request.images)]
        runs, columns = [run for run, _ in read], [values for _, values in read]
        owner, by_kind = f"request {request.request_id!r}", self._processor.runs(request.images, runs)
        ids, _ = expand_runs(owner, request.prompt_token_ids, given, by_kind)
        given, _ = expand_runs(owner, given, given, by_kind)
        spans = {kind: iter(_spans(request.request_id, given, kind, of_kind)) for kind, of_kind in by_kind.items()}
        prepared = PreparedImages(
            urls=request.images,
            given_ids=given,
            columns=self._processor.join(columns),
            spans=tuple(next(spans[self._processor.placeholder(url)]) for url in request.images),
        )
        return replace(request, prompt_token_ids=ids, sampled_spans=()), prepared

    def _read(self, request_id: str, index: int, url: str) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """Tokens of an image or a video, and the values of its columns."""
        if not is_video(url) and not is_audio(url):
            return self._processor.read(_decoded(request_id, index, url))
        try:
            return self._processor.read_clip(url)
        except (OSError, ValueError) as error:
            kind = "sound" if is_audio(url) else "video"
            raise RequestError(f"request {request_id!r}: image {index} is a {kind}: {error}") from error

    def check_blind(self, request: GenerateRequest) -> None:
        """Check that a request without images has no image placeholder in its prompt.

        Raises:
            RequestError: it has one.
        """
        given = () if request.images else _given(request.prompt_token_ids, request.sampled_spans)
        for token_id in self.token_ids:
            if token_id in given:
                raise RequestError(
                    f"request {request.request_id!r}: the prompt has places for images (token {token_id}) and the "
                    "request none; give `images`"
                )


def load_preparer(model_path: str) -> ImagePreparer | None:
    """Image preprocessor of a model folder; None, and a warning in the log, where it cannot be loaded."""
    try:
        return ImagePreparer(ImageProcessor(model_path))
    except (ImportError, OSError, ValueError) as error:
        _log.warning("%s is served without images, as its image processor cannot be loaded: %s", model_path, error)
        return None


def _spans(
    request_id: str, given: Sequence[int], token_id: int, runs: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, int], ...]:
    """[start, end) of each image's run, after their expansion."""
    places, spans = [index for index, token in enumerate(given) if token == token_id], list[tuple[int, int]]()
    for index, run in enumerate(runs):
        start = places[0] - run.index(token_id)
        if given[start : start + len(run)] != run:
            raise RequestError(
                f"request {request_id!r}: the {len(run)} tokens of image {index} are not one after the other from "
                f"token {start} on; put one placeholder for each image, or all its tokens side by side"
            )
        spans.append((start, start + len(run)))
        places = places[run.count(token_id) :]
    return tuple(spans)


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
