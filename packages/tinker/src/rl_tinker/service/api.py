"""Requests of the API in JSON, with the rules that they share."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rl_tinker.errors import RequestError
from rl_tinker.types import AdamParams

EPHEMERAL = "ephemeral-"
"""Beginning of the names of checkpoints for sampling that a client gives no name, which end with their session."""
_NAME = re.compile(r"[\w][\w.+=-]{0,254}")
MAX_TOP_K = 64
TtlS = Annotated[int, Meta(ge=3600, le=10 * 366 * 86400)]
"""Time to live, seconds: from an hour to 10 years."""


class Lora(msgspec.Struct, kw_only=True):
    """LoRA configuration of a new model."""

    rank: int
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class Optimizer(msgspec.Struct, kw_only=True):
    """Optimizer family of a new model."""

    type: str = "adamw"


class CreateSession(msgspec.Struct, kw_only=True):
    """`create_session`."""

    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class CreateModel(msgspec.Struct, kw_only=True):
    """`create_model`."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer | None = None


class Numbered(msgspec.Struct, kw_only=True):
    """Operation on a model; its number, and no other field."""

    model_id: str
    seq_id: int


class OptimStep(msgspec.Struct, kw_only=True):
    """`optim_step`."""

    model_id: str
    seq_id: int = 0
    adam_params: AdamParams = AdamParams()
    optimizer_params: Any = None


class Ttl(msgspec.Struct, kw_only=True):
    """Time to live of a checkpoint; None: it does not expire."""

    ttl_seconds: TtlS | None = None


class Save(Ttl, kw_only=True):
    """`save_weights`, `save_weights_for_sampler` and `save_weights_external`."""

    model_id: str
    seq_id: int = 0
    path: str | None = None
    user_metadata: dict[str, Any] | None = None
    overwrite: bool = False
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    age_encryption_recipients: list[str] | None = None


class LoadWeights(msgspec.Struct, kw_only=True):
    """`load_weights`, onto a model or as a new one."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: Optimizer | None = None
    weights_access_token: str | None = None


class CreateSampler(msgspec.Struct, kw_only=True):
    """`create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Chunk(msgspec.Struct, kw_only=True):
    """Chunk of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(msgspec.Struct, kw_only=True):
    """Prompt of chunks."""

    chunks: list[Chunk]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of all chunks."""
        return tuple(token for chunk in self.chunks for token in chunk.tokens)


class Sampling(msgspec.Struct, kw_only=True):
    """Sampling parameters."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(msgspec.Struct, kw_only=True):
    """`asample`."""

    prompt: Prompt
    sampling_params: Sampling
    num_samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_K)] = 0
    topk_sample_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_K)] = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


def check_name(name: str) -> str:
    """Name of a checkpoint.

    Raises:
        RequestError: it cannot be the last part of a path.
    """
    if not _NAME.fullmatch(name):
        raise RequestError(f"name {name!r} of a checkpoint: use letters, digits and ._+=- (at most 255)")
    return name


def expiry(ttl_s: int | None) -> float | None:
    """Time at which something expires."""
    return None if ttl_s is None else time.time() + ttl_s


def sampler_path(model_id: str, request: Save, seq: int) -> str:
    """Path of the checkpoint that a `save_weights_for_sampler` makes.

    Raises:
        RequestError: a name, or the number of the sampling session, is missing or wrong.
    """
    if request.path is not None:
        if request.path.startswith(EPHEMERAL):
            raise RequestError(f"name {request.path!r}: names that begin with {EPHEMERAL!r} are the server's own")
        return f"tinker://{model_id}/sampler_weights/{check_name(request.path)}"
    if request.sampling_session_seq_id is None:
        raise RequestError("save_weights_for_sampler needs a path, or a sampling_session_seq_id")
    return f"tinker://{model_id}/sampler_weights/{EPHEMERAL}{seq}"
