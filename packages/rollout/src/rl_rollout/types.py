"""Types of rl-rollout: requests, outputs, capabilities, configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from rl_rollout.errors import RequestError


class FinishReason(StrEnum):
    """Reason for which generation of a request ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last token of the output."""
    LENGTH = "length"
    """`max_new_tokens` or the context length was reached."""
    ABORT = "abort"
    """The request was aborted; the output holds what was generated until then."""
    TIMEOUT = "timeout"
    """The deadline of the request or of the server passed; the output holds what was generated until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. The returned log-probs are of exactly this distribution.

    At most one of `json_schema`, `regex` and `choice` asks for a structured output: tokens that cannot continue it are
    never sampled. The log-probs are then those of the model at this temperature, without that restriction, penalties,
    `min_p`, `top_p` and `top_k`: what a trainer computes, so that the ratio of an unchanged model is 1.
    """

    max_new_tokens: int = 256
    """Most tokens to generate."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy, whose log-probs are reported at temperature 1."""
    top_p: float = 1.0
    """Nucleus sampling: probability of the tokens that are kept; 1 keeps all (1904.09751)."""
    top_k: int = 0
    """Number of most likely tokens that are kept; 0 keeps all. Applied after the temperature and before top_p."""
    min_p: float = 0.0
    """Drops the tokens that are less likely than this times the most likely one; 0 keeps all. Applied after the
    temperature and before top_k (2407.01082)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of the tokens that the completion has."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the completion has it."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies others, of the tokens that prompt or completion have; above 0
    (1909.05858). Penalties come before the temperature."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end generation, in addition to the model's end-of-sequence ids."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence ids."""
    seed: int | None = None
    """Seed of this request alone: its tokens then do not depend on its neighbours in the batch. None: the next seed of
    the server's stream."""
    json_schema: str | None = None
    """JSON schema, as JSON, of the output; `{}` allows any JSON value."""
    regex: str | None = None
    """Regular expression that the whole output matches, in the syntax of Rust's regex crate."""
    choice: tuple[str, ...] = ()
    """Texts of which the output is one."""

    @property
    def is_structured(self) -> bool:
        """Whether it asks for a structured output."""
        return self.json_schema is not None or self.regex is not None or bool(self.choice)

    @property
    def shapes_logits(self) -> bool:
        """Whether it has penalties or `min_p`."""
        return bool(self.min_p or self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


def structure_of(response_format: Any = None, structured_outputs: Any = None) -> dict[str, Any]:
    """Fields of `SamplingParams` for OpenAI's `response_format`, or for vLLM's `structured_outputs`.

    Args:
        response_format: `{"type": "text"}`, `{"type": "json_object"}`, or
            `{"type": "json_schema", "json_schema": {"schema": {}}}`.
        structured_outputs: One of `{"json": SCHEMA}`, `{"regex": ...}` and `{"choice": [...]}`.

    Raises:
        RequestError: it is something else, or both are given.
    """
    if structured_outputs is None:
        return {} if response_format is None else _of_response_format(response_format)
    if response_format is not None:
        raise RequestError("response_format and structured_outputs are one setting; leave one of them out")
    given: Mapping[str, Any] = structured_outputs if isinstance(structured_outputs, Mapping) else {}
    match [(name, value) for name, value in given.items() if value is not None]:
        case [("json", str() as schema)]:
            return {"json_schema": schema}
        case [("json", Mapping() | bool() as schema)]:
            return {"json_schema": json.dumps(schema)}
        case [("regex", str() as regex)]:
            return {"regex": regex}
        case [("choice", list() | tuple() as choice)] if all(isinstance(each, str) for each in choice):
            return {"choice": tuple(choice)}
        case _:
            raise RequestError(
                f"structured_outputs={structured_outputs!r:.200} asks for no structure that is known; it has one of "
                "json, regex and choice"
            )


def _of_response_format(response_format: Any) -> dict[str, Any]:
    match response_format:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": '{"type": "object"}'}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() | bool() as schema}}:
            return {"json_schema": json.dumps(schema)}
        case _:
            raise RequestError(
                f"response_format={response_format!r:.200} asks for no structure that is known; its type is text, "
                "json_object, or json_schema with a schema"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Generation request: token ids in."""

    request_id: str
    """Id that is unique among the requests in flight."""
    prompt_token_ids: tuple[int, ...]
    """Prompt token ids, at least one."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters."""
    session_id: str | None = None
    """Id that the requests of one conversation share; a router keeps them on one replica."""
    timeout_s: float | None = None
    """Deadline of this request, seconds, time in the queue included. When it is over, the output has the tokens so far
    and the reason `timeout`; without any, `RequestTimeoutError`. None: the server's, which counts generating alone."""
    num_top_logprobs: int = 0
    """Number of most likely tokens to return at every position."""
    returns_prompt_logprobs: bool = False
    """Return the log-probs of the prompt's tokens too."""
    returns_routed_experts: bool = False
    """Return the experts that every token was routed to, of a mixture-of-experts model."""
    adapter: str | None = None
    """Name of the LoRA adapter that generates; None: the base model."""
    images: tuple[str, ...] = ()
    """Data URLs of encoded images, videos and sounds, in the order of their placeholders. See
    `Capabilities.takes_images`, `takes_videos` and `takes_audio`; `rl_csrc.inference.videos` for those of videos."""
    sampled_spans: tuple[tuple[int, int], ...] = ()
    """Ascending [start, end) spans of the prompt that a model sampled: earlier turns, or a completion that is resumed.
    A sampled placeholder is a token like any other, and represents no image."""

    @property
    def has_videos(self) -> bool:
        """Whether videos are among its images."""
        return any(url.startswith("data:video/") for url in self.images)

    @property
    def has_sounds(self) -> bool:
        """Whether sounds are among its images."""
        return any(url.startswith("data:audio/") for url in self.images)

    @property
    def has_extras(self) -> bool:
        """Whether it asks for extra outputs, which the chunks of a stream do not carry."""
        return bool(self.num_top_logprobs or self.returns_prompt_logprobs or self.returns_routed_experts)

    def check_streamable(self) -> None:
        """Check that it asks for no extra outputs.

        Raises:
            RequestError: it does; names the fields.
        """
        if self.has_extras:
            raise RequestError(
                f"request {self.request_id!r}: a stream has tokens, log-probs and versions only; leave out "
                "num_top_logprobs, returns_prompt_logprobs and returns_routed_experts, or use generate"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """Output of a request: token ids out. P prompt tokens, C completion tokens."""

    request_id: str
    """Id of the request."""
    token_ids: tuple[int, ...]
    """C generated ids, the stop token included."""
    logprobs: tuple[float, ...]
    """C natural log-probs under the sampling distribution."""
    weight_versions: tuple[int, ...]
    """C weight versions: the version that each token was sampled from."""
    finish_reason: FinishReason
    """Reason for which generation ended."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """C lists of (id, log-prob) under the sampling distribution, most likely first; empty unless asked for."""
    prompt_logprobs: tuple[float, ...] = ()
    """P - 1 log-probs at temperature 1 of the prompt's tokens, each given those before it, under the weights that
    serve when the request starts; empty unless asked for."""
    routed_experts: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """[P + C - 1][MoE layers][experts per token] expert ids, in the order of the router; the last token was never
    fed. Empty unless asked for."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    """Outputs of models that generate something else than tokens, such as latents: tensors by name, float32, int64 or
    uint8. Such an output has no `token_ids`, and one log-prob and weight version for each step."""

    @classmethod
    def empty(cls, request: GenerateRequest) -> TokenOutput:
        """Output of a request that was aborted before its first token."""
        reason = FinishReason.ABORT
        return cls(request_id=request.request_id, token_ids=(), logprobs=(), weight_versions=(), finish_reason=reason)

    @classmethod
    def joined(cls, request_id: str, chunks: Sequence[TokenChunk]) -> TokenOutput:
        """Output that a request's chunks make up; `abort` where none of them has a finish reason."""
        reason = next((chunk.finish_reason for chunk in reversed(chunks) if chunk.finish_reason), FinishReason.ABORT)
        return cls(
            request_id=request_id,
            token_ids=tuple(i for chunk in chunks for i in chunk.token_ids),
            logprobs=tuple(x for chunk in chunks for x in chunk.logprobs),
            weight_versions=tuple(v for chunk in chunks for v in chunk.weight_versions),
            finish_reason=reason,
        )

    def extended(self, chunk: TokenChunk) -> TokenOutput:
        """Output with the tokens of a further chunk, and its finish reason if it has one."""
        return replace(
            self,
            finish_reason=self.finish_reason if chunk.finish_reason is None else chunk.finish_reason,
            token_ids=self.token_ids + chunk.token_ids,
            logprobs=self.logprobs + chunk.logprobs,
            weight_versions=self.weight_versions + chunk.weight_versions,
        )


class StoppedRequests:
    """Tokens of requests that were stopped, by which requests of another process go on."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[tuple[int, ...], TokenOutput]] = {}
        self._restored: dict[tuple[int, ...], list[TokenOutput]] = {}

    def outputs(self) -> list[tuple[tuple[int, ...], TokenOutput]]:
        """Prompt and tokens so far of each request that is not complete and was stopped at least once."""
        return [*self._parts.values()]

    def restore(self, outputs: Sequence[tuple[tuple[int, ...], TokenOutput]]) -> None:
        """Have the next requests with these prompts begin with these tokens, of another process's `outputs`.

        A request whose output has another finish reason than `abort` is answered with it.
        """
        for prompt, output in outputs:
            self._restored.setdefault(prompt, []).append(output)

    def forget(self) -> None:
        """Drop the restored tokens that no request has taken."""
        self._restored.clear()

    def begun(self, request: GenerateRequest) -> TokenOutput:
        """Tokens that a request begins with: restored ones of its prompt, or none."""
        if not (outputs := self._restored.get(request.prompt_token_ids)):
            return TokenOutput.empty(request)
        self.note(request, outputs[-1])
        return replace(outputs.pop(), request_id=request.request_id)

    def note(self, request: GenerateRequest, done: TokenOutput) -> None:
        """Note the tokens of a request that was stopped."""
        self._parts[request.request_id] = request.prompt_token_ids, done

    def end(self, request: GenerateRequest) -> None:
        """Note the end of a request."""
        self._parts.pop(request.request_id, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """Slice of a tensor that one weight receiver of a server takes: a box in the coordinates of the whole tensor."""

    name: str
    """Hugging Face name of the tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Start of the box along each axis."""
    sizes: tuple[int, ...]
    """Its length along each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of a server beyond plain generation. A missing one raises `UnsupportedError`."""

    takes_token_ids: bool = True
    """Whether it takes and returns exact token ids; without, no output may be trained on."""
    has_logprobs: bool = True
    """Whether log-probs are of the distribution that was sampled from."""
    updates_weights: bool = True
    """Whether it has `update_weights`."""
    pauses: bool = True
    """Whether it has `pause`, `resume`, and an `abort` that returns the tokens so far."""
    sleep_levels: tuple[int, ...] = (1, 2)
    """Levels of `sleep`."""
    is_seeded: bool = True
    """Whether `SamplingParams.seed` determines the tokens."""
    gives_top_logprobs: bool = True
    """Whether it supports `GenerateRequest.num_top_logprobs`."""
    gives_prompt_logprobs: bool = True
    """Whether it supports `GenerateRequest.returns_prompt_logprobs`."""
    gives_routed_experts: bool = False
    """Whether it supports `GenerateRequest.returns_routed_experts`."""
    has_adapters: bool = False
    """Whether it supports `GenerateRequest.adapter`."""
    takes_images: bool = False
    """Whether it supports images in `GenerateRequest.images`."""
    takes_videos: bool = False
    """Whether it supports videos in `GenerateRequest.images`."""
    takes_audio: bool = False
    """Whether it supports sounds in `GenerateRequest.images`."""
    num_receivers: int = 1
    """Number of weight receivers that one `update_weights` opens, one on each rank of the server: a sender waits for
    exactly so many."""
    updates_adapters: bool = False
    """Whether `update_weights` takes the tensors of an adapter alone, named `adapters.NAME....`."""
    takes_slices: bool = False
    """Whether `update_weights` takes slices of tensors from several senders: see `rl_ckpt.sharded`."""
    takes_mtp: bool = False
    """Whether `update_weights` takes the layers for multi-token prediction, with which the server drafts."""
    structured: Literal["none", "model", "restricted"] = "none"
    """Structured outputs (`SamplingParams.json_schema`, `regex`, `choice`): none, with log-probs of the model, which
    may be trained on, or with log-probs of the restricted distribution that was sampled from."""
    attests_weights: bool = True
    """Whether the weights that the server holds after an update with whole tensors are compared with those sent; if
    not, only those that arrived are. Slices are always compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Chunk of a streamed output. The chunks of a request, concatenated, are its `TokenOutput`."""

    token_ids: tuple[int, ...]
    """C new ids."""
    logprobs: tuple[float, ...]
    """C log-probs."""
    weight_versions: tuple[int, ...]
    """C weight versions."""
    finish_reason: FinishReason | None
    """Finish reason, in the last chunk only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Address of a replica."""

    url: str
    """Base URL of its HTTP endpoint; `inproc:` for a server that lives in this process only."""
    model: str
    """Name of the served model."""
    pid: int
    """Id of the serving process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParallel:
    """Parallel layout of one replica over `tp * pp * dp` ranks: one GPU each, or one process each on a CPU.

    A backend refuses what it cannot do.
    """

    tp: int = 1
    """Tensor-parallel ranks: every weight matrix is sharded (Shoeybi et al., 1909.08053)."""
    pp: int = 1
    """Pipeline-parallel ranks: each has some of the layers."""
    dp: int = 1
    """Data-parallel groups of `tp` ranks, each with its own requests (data-parallel attention). Every group holds all
    attention weights; the experts of a mixture are spread over groups where `ep` says so."""
    ep: int = 1
    """Expert-parallel ranks, among the `tp * dp` ones: each has some of the experts."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the replica, and so of its GPUs."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Configuration of one replica."""

    model_path: str
    """Hugging Face model folder."""
    max_model_len: int = 4096
    """Longest prompt plus completion, tokens; the model's own limit where that is smaller."""
    max_num_seqs: int = 256
    """Most sequences decoded at the same time."""
    seed: int = 0
    """Seed of the stream that gives requests without a seed theirs."""
    host: str = "127.0.0.1"
    """Interface that the HTTP endpoint binds."""
    port: int = 0
    """Port of the HTTP endpoint; 0 picks a free one."""
    api_token: str | None = None
    """Bearer token that HTTP callers must send; required when `host` is not loopback."""
    timeout_s: float = 120.0
    """Deadline of start-up and of commands, and of generating for requests without a deadline, seconds: their output
    then ends with the reason `timeout`. Time in the queue, or while the server is paused or asleep, does not count (in
    a third-party server's own queue it does)."""
    queue_timeout_s: float = 3600.0
    """Most seconds that a request waits for its turn before it is refused with `RequestTimeoutError`."""
    max_body_bytes: int = 2**26
    """Largest body of an HTTP request, bytes."""
    max_completions: int = 4096
    """Most completions that one HTTP request may ask for: its prompts times `n`, or the requests of a batch."""
    max_stops: int = 256
    """Most stop token ids, or stop strings, of one request."""
    max_top_logprobs: int = 1024
    """Most alternatives per token that one request may ask for."""
    num_threads: int = 0
    """CPU threads of the model; 0 leaves the choice to the backend. On a busy machine 1 is often the fastest."""
    device: str = "auto"
    """Device: `cpu`, `cuda`, `cuda:1`; `auto` takes a CUDA device if there is one."""
    dtype: str = "auto"
    """Dtype of weights and cache: `float32`, `bfloat16` or `float16`. `auto` is float32 on a CPU and bfloat16 on CUDA;
    third-party engines have rules of their own for it (vLLM takes bfloat16 for a model in float32)."""
    quantization: str = "none"
    """Format that the server converts weights to after each update, which is received and verified as it was sent:
    `int8` (embedded on a CPU, vllm), `fp8` with one scale or `fp8_block` with one per block (vllm on a GPU); `none`."""
    kv_cache_bytes: int = 0
    """Most memory of the KV cache, bytes; 0: a quarter of the machine's memory, or half of a CUDA device's free
    memory."""
    parallel: ServerParallel = field(default_factory=ServerParallel)
    """Parallel layout of the replica over GPUs; only vllm and sglang take more than one."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of one backend, JSON values; its module lists them."""


def placeholder_repeats(owner: str, given: Sequence[int], token_id: int, counts: Sequence[int]) -> list[int]:
    """Number of times to repeat each token, so that image i has `counts[i]` placeholders: 1 for every other token.

    Args:
        owner: Name of the request or trajectory, for the error.
        given: Tokens with one placeholder per image, or with all of them already; -1 where a model sampled one.
        token_id: Id of the placeholder.
        counts: Placeholders of each image.

    Raises:
        RequestError: the number of placeholders is neither that of the images nor the sum of `counts`.
    """
    num_places = sum(token == token_id for token in given)
    if num_places == sum(counts):
        return [1] * len(given)
    if num_places != len(counts):
        raise RequestError(
            f"{owner}: {len(counts)} images and {num_places} places for them (token {token_id}); give one placeholder "
            f"for each image, or all {sum(counts)} of their features. Sampled placeholders do not count: name them in "
            "sampled_spans"
        )
    left = iter(counts)
    return [next(left) if token == token_id else 1 for token in given]


def expand_runs(
    owner: str, ids: Sequence[int], given: Sequence[int], runs: Mapping[int, Sequence[tuple[int, ...]]]
) -> tuple[tuple[int, ...], list[int]]:
    """Token ids with each placeholder as the run of its image or video, and how many tokens each of `ids` became.

    Args:
        owner: Name of the request or trajectory, for the error.
        ids: Token ids, with one placeholder per image or video, or with whole runs.
        given: `ids`, with -1 where a model sampled one.
        runs: By the id of their placeholder, the tokens of each image or video, placeholders among them.

    Raises:
        RequestError: the number of placeholders is neither that of the images nor that of their runs.
    """
    parts: dict[int, tuple[int, ...]] = {}
    for token_id, of_kind in runs.items():
        placeholder_repeats(owner, given, token_id, [run.count(token_id) for run in of_kind])
        starts = [index for index, token in enumerate(given) if token == token_id]
        if len(starts) != len(of_kind):
            continue
        firsts = [start - run.index(token_id) for start, run in zip(starts, of_kind, strict=True)]
        if any(tuple(given[first : first + len(run)]) != run for first, run in zip(firsts, of_kind, strict=True)):
            parts |= dict(zip(starts, of_kind, strict=True))
    expanded = [parts.get(index, (token,)) for index, token in enumerate(ids)]
    return tuple(token for part in expanded for token in part), [len(part) for part in expanded]
