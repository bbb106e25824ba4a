"""Values that rl-rollout takes and gives: requests, outputs, capabilities, configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence  # noqa: TC003 - what nests ServerConfig in a schema reads its annotations
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from rl_rollout.errors import RequestError


class FinishReason(StrEnum):
    """Why generation of a request ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last token of the output."""
    LENGTH = "length"
    """`max_new_tokens` or the context length was reached."""
    ABORT = "abort"
    """The request was aborted; the output holds what was generated until then."""
    TIMEOUT = "timeout"
    """Its `timeout_s`, or the server's, was over; the output holds what was generated until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. The returned log-probs are of exactly this distribution."""

    max_new_tokens: int = 256
    """At most this many tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy, whose log-probs are reported at temperature 1."""
    top_p: float = 1.0
    """Nucleus mass; 1 keeps all."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all. Applied after the temperature and before top_p."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's end-of-sequence ids."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence ids."""
    seed: int | None = None
    """Seeds this request alone: its tokens do not depend on its neighbours in the batch. None takes the next seed
    of the server's stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Token ids in."""

    request_id: str
    """Unique among the requests in flight."""
    prompt_token_ids: tuple[int, ...]
    """At least one id."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """How to sample."""
    session_id: str | None = None
    """Requests of one conversation share it; a router keeps them on one replica."""
    timeout_s: float | None = None
    """Deadline of this request, seconds, time in the queue included: a whole answer, what there is with the reason
    `timeout`, or `RequestTimeoutError` if nothing was generated. None takes the server's, which counts otherwise."""
    num_top_logprobs: int = 0
    """Give this many most likely tokens at every position too."""
    returns_prompt_logprobs: bool = False
    """Give the log-probs of the prompt's tokens too."""
    returns_routed_experts: bool = False
    """Give the experts that every token was routed to, of a mixture-of-experts model."""
    adapter: str | None = None
    """Name of the LoRA adapter that generates; None is the base model."""
    images: tuple[str, ...] = ()
    """Data URLs of encoded images, in the order of their places in the prompt; see `Capabilities.takes_images`."""
    sampled_spans: tuple[tuple[int, int], ...] = ()
    """[start, end) of what a model sampled in the prompt, ascending: earlier turns, or the part of a completion that
    goes on. A placeholder that was sampled is a token like any other, and stands for no image."""

    @property
    def has_extras(self) -> bool:
        """Whether it asks for something beside the tokens, which chunks of a stream do not tell."""
        return bool(self.num_top_logprobs or self.returns_prompt_logprobs or self.returns_routed_experts)

    def check_streamable(self) -> None:
        """Refuse to stream what chunks do not tell.

        Raises:
            RequestError: names the fields.
        """
        if self.has_extras:
            raise RequestError(
                f"request {self.request_id!r}: a stream tells tokens, log-probs and versions alone; leave out "
                "num_top_logprobs, returns_prompt_logprobs and returns_routed_experts, or use generate"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """Token ids out."""

    request_id: str
    """The request's id."""
    token_ids: tuple[int, ...]
    """C generated ids, the stop token included."""
    logprobs: tuple[float, ...]
    """C natural log-probs under the sampling distribution."""
    weight_versions: tuple[int, ...]
    """C weight versions, one for the weights that each token was sampled from."""
    finish_reason: FinishReason
    """Why it ended."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """C lists of (id, log-prob) under the sampling distribution, the most likely first; empty unless asked for."""
    prompt_logprobs: tuple[float, ...] = ()
    """P - 1 log-probs at temperature 1 of the prompt's tokens, each given those before it, under the weights that
    serve when the request starts; empty unless asked for."""
    routed_experts: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """[P + C - 1][MoE layers][experts per token] expert ids, in the order of the router; the last token was never
    fed. Empty unless asked for."""

    @classmethod
    def empty(cls, request: GenerateRequest) -> TokenOutput:
        """Of a request that ended before its first token."""
        reason = FinishReason.ABORT
        return cls(request_id=request.request_id, token_ids=(), logprobs=(), weight_versions=(), finish_reason=reason)

    @classmethod
    def joined(cls, request_id: str, chunks: Sequence[TokenChunk]) -> TokenOutput:
        """Of a request whose chunks these are; `abort` where none of them tells a reason."""
        reason = next((chunk.finish_reason for chunk in reversed(chunks) if chunk.finish_reason), FinishReason.ABORT)
        return cls(
            request_id=request_id,
            token_ids=tuple(i for chunk in chunks for i in chunk.token_ids),
            logprobs=tuple(x for chunk in chunks for x in chunk.logprobs),
            weight_versions=tuple(v for chunk in chunks for v in chunk.weight_versions),
            finish_reason=reason,
        )

    def extended(self, chunk: TokenChunk) -> TokenOutput:
        """This output and what came after it, with its reason if it tells one."""
        return replace(
            self,
            finish_reason=self.finish_reason if chunk.finish_reason is None else chunk.finish_reason,
            token_ids=self.token_ids + chunk.token_ids,
            logprobs=self.logprobs + chunk.logprobs,
            weight_versions=self.weight_versions + chunk.weight_versions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a server can do beyond plain generation. What it cannot is refused with `UnsupportedError`."""

    takes_token_ids: bool = True
    """Token ids in and out, exactly; without, no output may be trained on."""
    has_logprobs: bool = True
    """Log-probs are of the distribution that was sampled from."""
    updates_weights: bool = True
    """`update_weights`."""
    pauses: bool = True
    """`pause`, `resume`, and `abort` with its partial output."""
    sleep_levels: tuple[int, ...] = (1, 2)
    """Levels of `sleep`."""
    is_seeded: bool = True
    """`SamplingParams.seed` fixes the tokens."""
    gives_top_logprobs: bool = True
    """`GenerateRequest.num_top_logprobs`."""
    gives_prompt_logprobs: bool = True
    """`GenerateRequest.returns_prompt_logprobs`."""
    gives_routed_experts: bool = False
    """`GenerateRequest.returns_routed_experts`."""
    has_adapters: bool = False
    """`GenerateRequest.adapter`."""
    takes_images: bool = False
    """`GenerateRequest.images`."""
    num_receivers: int = 1
    """Weight receivers that one `update_weights` opens: a sender has to wait for exactly so many of this server. A
    server of several ranks has one on each."""
    updates_adapters: bool = False
    """Whether `update_weights` takes the tensors of an adapter alone, named `adapters.NAME.` and so on."""
    takes_slices: bool = False
    """Whether `update_weights` takes slices of tensors from several senders, too: see `rl_ckpt.sharded`."""
    attests_weights: bool = True
    """Whether what the server holds after an update is compared with what was sent; if not, what arrived is, alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """A piece of an output that is streamed. The chunks of a request, put together, are its `TokenOutput`."""

    token_ids: tuple[int, ...]
    """C new ids."""
    logprobs: tuple[float, ...]
    """C log-probs."""
    weight_versions: tuple[int, ...]
    """C weight versions."""
    finish_reason: FinishReason | None
    """Set in the last chunk alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where a replica answers."""

    url: str
    """Base URL of its HTTP endpoint; `inproc:` for a server that lives in this process only."""
    model: str
    """Name of the served model."""
    pid: int
    """Process that serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParallel:
    """Layout of one replica over `tp * pp * dp` ranks: one GPU each, or on a CPU one process each.

    A backend refuses what it cannot do.
    """

    tp: int = 1
    """Tensor-parallel ranks: every weight matrix is cut (Shoeybi et al., 1909.08053)."""
    pp: int = 1
    """Pipeline-parallel ranks: each has its share of the layers."""
    dp: int = 1
    """Data-parallel groups of `tp` ranks, each with requests of its own (data-parallel attention): they hold the
    attention's weights whole, and share out the experts of a mixture where `ep` says so."""
    ep: int = 1
    """Expert-parallel ranks, of the `tp * dp` ones: each has its share of a mixture's experts."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the replica, and so its GPUs."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What one replica is built from."""

    model_path: str
    """A Hugging Face model folder."""
    max_model_len: int = 4096
    """Longest prompt plus completion, tokens; the model's own limit where that is smaller."""
    max_num_seqs: int = 256
    """Requests decoded at the same time."""
    seed: int = 0
    """Seeds sampling of requests that bring no seed."""
    host: str = "127.0.0.1"
    """Interface that the HTTP endpoint binds."""
    port: int = 0
    """0 picks a free one."""
    api_token: str | None = None
    """Bearer token that HTTP callers must show; required when `host` is not loopback."""
    timeout_s: float = 120.0
    """Deadline of start-up and of commands, and how long a request that brings no deadline may generate, seconds: its
    output ends then with the reason `timeout`. Time in the queue, or while the server is paused or asleep, does not
    count (in a third-party server's own queue it does)."""
    queue_timeout_s: float = 3600.0
    """How long any request may wait for its turn before it is refused with `RequestTimeoutError`, seconds."""
    max_body_bytes: int = 2**26
    """Largest body of an HTTP request."""
    max_completions: int = 4096
    """Most completions that one HTTP request may ask for: its prompts times `n`, or the requests of a batch."""
    max_stops: int = 256
    """Most stop token ids, or stop strings, of one request."""
    max_top_logprobs: int = 1024
    """Most alternatives per token that one request may ask for."""
    num_threads: int = 0
    """CPU threads of the model; 0 leaves the choice to the backend. On a busy machine 1 is often the fastest."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`; `auto` takes a CUDA device where there is one."""
    dtype: str = "auto"
    """`float32`, `bfloat16` or `float16`. `auto` is float32 on CPU and bfloat16 on CUDA; the engines of others follow
    rules of their own then (vLLM takes bfloat16 for a model in float32)."""
    kv_cache_bytes: int = 0
    """Most memory that keys and values may take, bytes; 0 allows a quarter of the machine's memory, or half of what is
    free on a CUDA device."""
    parallel: ServerParallel = field(default_factory=ServerParallel)
    """Layout of the replica over GPUs; vllm and sglang take more than one."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of one backend alone, JSON values; its module says which."""
