"""Validation of requests, outputs, model folders and adapters. No I/O beyond `config.json`."""

from __future__ import annotations

import json
import math
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_rollout.errors import (
    ConfigError,
    GenerationError,
    ModelFolderError,
    RequestError,
    RolloutError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_rollout.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rl_rollout.types import Capabilities, GenerateRequest, SamplingParams, ServerConfig, TokenOutput


NO_LOGPROB = -9999.0
"""What vLLM tells in place of NaN, of minus infinity, and of what it does not know."""
SEED_RANGE = 2**63
"""Seeds lie in [-2**63, 2**63), and no other number is larger: engines keep them in 64 bits."""
LEAST_TEMPERATURE = 1e-6
"""Below it, logits / temperature are no numbers of 32 bits; SGLang takes it for 0."""


TOOL_PARSERS = "rl_rollout.tool_parsers"
"""Entry points of this group are functions that read the tool calls of a turn; rl-agent brings some."""


def find_plugin(group: str, name: str, what: str, error: type[RolloutError] = ConfigError) -> EntryPoint:
    """The entry point of an installed plug-in.

    Raises:
        ConfigError: it is not installed (or `error`); lists those that are.
    """
    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        raise error(f"no {what} {name!r}; installed here: {', '.join(sorted(found)) or 'none'}")
    return found[name]


def check_request(request: GenerateRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse a request that cannot be served.

    Raises:
        RequestError: says which value, and what is allowed.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError(f"request {request.request_id!r}: the prompt is empty; give at least one token id")
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"request {request.request_id!r}: the prompt has {len(prompt)} tokens and the server holds {max_model_len} "
            "for prompt and completion together; shorten the prompt or raise max_model_len"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        bad = next(i for i in prompt if not 0 <= i < vocab_size)
        raise RequestError(
            f"request {request.request_id!r}: token id {bad} is outside the vocabulary [0, {vocab_size})"
        )
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise RequestError(f"request {request.request_id!r}: timeout_s={request.timeout_s} must be above 0")
    bounds = [bound for span in request.sampled_spans for bound in span]
    if bounds != sorted(bounds) or (bounds and not 0 <= bounds[0] <= bounds[-1] <= len(prompt)):
        raise RequestError(
            f"request {request.request_id!r}: sampled_spans={request.sampled_spans} must be ascending [start, end) "
            f"within the {len(prompt)} tokens of the prompt"
        )
    check_sampling(request.request_id, request.sampling_params)


def read_model_config(model_path: str) -> dict[str, Any]:
    """`config.json` of a model folder that can generate; that of the language model, where there are several.

    Raises:
        ModelFolderError: it cannot be read, or is that of a model that scores.
    """
    try:
        found = json.loads((Path(model_path) / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(
            f"model folder {model_path!r} has no config.json that can be read ({error}); give a Hugging Face folder"
        ) from error
    for name in found.get("architectures") or ():
        if str(name).endswith(("ForSequenceClassification", "ForTokenClassification")):
            raise ModelFolderError(
                f"{model_path!r} holds a {name}, which scores and generates nothing; serve it by rl-serve --task score"
            )
    return {**found, **found.get("text_config", {}), "model_type": found.get("model_type")}


def check_count(count: int, config: ServerConfig) -> None:
    """Refuse to be asked for too much at once.

    Raises:
        RequestError: names the setting.
    """
    if count > config.max_completions:
        raise RequestError(
            f"the request asks for {count} sequences, and max_completions={config.max_completions}; ask for fewer, "
            "or raise it"
        )


def check_limits(request: GenerateRequest, config: ServerConfig) -> None:
    """Refuse more than a server is configured to bear.

    Raises:
        RequestError: names the setting.
    """
    for name, asked in (
        ("max_stops", len(request.sampling_params.stop_token_ids)),
        ("max_top_logprobs", request.num_top_logprobs),
    ):
        if asked > (most := getattr(config, name)):
            raise RequestError(
                f"request {request.request_id!r} asks for {asked}, and {name}={most}; ask for fewer, or raise it"
            )


def check_extras(request: GenerateRequest, capabilities: Capabilities) -> None:
    """Refuse what a server does not give.

    Raises:
        UnsupportedError: names the field.
        RequestError: `num_top_logprobs` is negative.
    """
    if request.num_top_logprobs < 0:
        raise RequestError(
            f"request {request.request_id!r}: num_top_logprobs={request.num_top_logprobs} must be 0 or above"
        )
    asked = {
        "num_top_logprobs": capabilities.gives_top_logprobs or not request.num_top_logprobs,
        "returns_prompt_logprobs": capabilities.gives_prompt_logprobs or not request.returns_prompt_logprobs,
        "returns_routed_experts": capabilities.gives_routed_experts or not request.returns_routed_experts,
        "adapter": capabilities.has_adapters or request.adapter is None,
        "images": capabilities.takes_images or not request.images,
        "seed": capabilities.is_seeded or request.sampling_params.seed is None,
    }
    for name, is_fine in asked.items():
        if not is_fine:
            raise UnsupportedError(f"request {request.request_id!r}: this server has no {name}; leave it out")


def check_version(version: int) -> None:
    """Refuse a weight version that tokens cannot carry.

    Raises:
        RequestError: tells the range.
    """
    if not 0 <= version < SEED_RANGE:
        raise RequestError(f"weight version {version} must be 0 or above, in 64 bits: every token carries it")


def check_adapter(request: GenerateRequest, names: Iterable[str]) -> None:
    """Refuse an adapter that is not loaded.

    Raises:
        RequestError: names those that are.
    """
    if request.adapter is not None and request.adapter not in names:
        raise RequestError(
            f"request {request.request_id!r}: there is no adapter {request.adapter!r}; loaded are: {', '.join(names)}"
        )


def check_finite(output: TokenOutput) -> None:
    """Refuse tokens that were drawn from logits that are not finite, and a prompt that was scored by such.

    Raises:
        GenerationError: a log-prob is no number.
    """
    told: tuple[Any, ...] = output.logprobs + output.prompt_logprobs  # JSON has no NaN: servers tell null
    if any(logprob is None or not math.isfinite(logprob) for logprob in told):
        versions = ", ".join(map(str, sorted(set(output.weight_versions))))
        raise GenerationError(
            f"request {output.request_id!r}: the model's logits are not finite; check the weights of version {versions}"
        )


def as_logprob(told: float | None) -> float:
    """A log-prob as the servers of others tell it, or NaN where they have none."""
    return math.nan if told is None or told <= NO_LOGPROB else told


def check_length(output: TokenOutput, max_new_tokens: int) -> None:
    """Refuse an output that claims to have reached its length and has not: its engine has cut what was asked for.

    Raises:
        GenerationError: tells both lengths.
    """
    if output.finish_reason is FinishReason.LENGTH and len(output.token_ids) < max_new_tokens:
        raise GenerationError(
            f"request {output.request_id!r}: the engine ended it for its length after {len(output.token_ids)} of "
            f"{max_new_tokens} tokens; raise what its cache or its own limits hold, or ask for fewer"
        )


def check_sampling(request_id: str, params: SamplingParams) -> None:
    """Refuse sampling parameters out of range.

    Raises:
        RequestError: says which field, its value, and what is allowed.
    """

    def need(is_fine: bool, field: str, allowed: str) -> None:
        if not is_fine:
            raise RequestError(f"request {request_id!r}: {field}={getattr(params, field)!r} must be {allowed}")

    need(params.max_new_tokens >= 1, "max_new_tokens", "at least 1")
    is_warm = math.isfinite(params.temperature) and params.temperature >= LEAST_TEMPERATURE
    need(is_warm or params.temperature == 0, "temperature", f"0 (greedy), or {LEAST_TEMPERATURE} or above")
    need(0 < params.top_p <= 1, "top_p", "above 0 and at most 1")
    need(0 <= params.top_k < SEED_RANGE, "top_k", "0 (off) or above, in 64 bits")
    need(all(0 <= i < SEED_RANGE for i in params.stop_token_ids), "stop_token_ids", "token ids, 0 or above, in 64 bits")
    need(params.seed is None or -SEED_RANGE <= params.seed < SEED_RANGE, "seed", "None or a 64-bit integer")


def versions_of(spans: Sequence[Mapping[str, Any]], count: int, engine_name: str) -> list[int]:
    """One version per token, of spans `[start, end)` that cover all.

    Raises:
        WeightUpdateError: they do not: no token may have a version by guess.
    """
    versions = [int(span["version"]) for span in spans or () for _ in range(span["start"], span["end"])]
    if len(versions) != count:
        raise WeightUpdateError(
            f"{engine_name} told the weight versions of {len(versions)} tokens, and there are {count}"
        )
    return versions


_PLAIN = {
    "bias": "none",
    "use_dora": False,
    "use_qalora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "alora_invocation_tokens": None,
}
"""Settings of peft that are served at this value alone."""
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""`init_lora_weights` under which an adapter is one of the base model as it lies on disk. Others (`pissa`, `olora`)
train beside a base of their own; peft writes `true` where it converts such an adapter to the base on disk."""


def check_plain(adapter: str, config: Mapping[str, Any], *, is_scaled_by_root: bool = True) -> None:
    """Refuse what would be served as another model than peft's.

    Args:
        adapter: Its name.
        config: Peft's.
        is_scaled_by_root: Whether the engine knows `use_rslora`.

    Raises:
        ModelFolderError: says which setting, and what is served.
    """
    if config.get("peft_type") != "LORA":
        raise ModelFolderError(f"adapter {adapter!r} is of type {config.get('peft_type')!r}; LORA is served")
    for name, served in (_PLAIN if is_scaled_by_root else {**_PLAIN, "use_rslora": False}).items():
        if (config.get(name) or served) != served:
            raise ModelFolderError(f"adapter {adapter!r} has {name}={config[name]!r}; {served!r} is served")
    init = config.get("init_lora_weights", True)
    if init not in _KEEPS_BASE:
        raise ModelFolderError(
            f"adapter {adapter!r} has init_lora_weights={init!r}, which changed the base model that it was trained "
            "beside; save it with peft's path_initial_model_for_weight_conversion"
        )


def check_positions(text_config: Any, max_model_len: int) -> None:
    """Check that no token's rotation depends on its neighbours (see `rl_csrc.decoder.longrope_limit`).

    Raises:
        ConfigError: tells the length up to which it does.
    """
    from rl_csrc.inference.decoder import longrope_limit  # torch: for those who serve a model

    limit = longrope_limit(getattr(text_config, "rope_parameters", None))
    if limit is not None and max_model_len > limit:
        raise ConfigError(
            f"max_model_len={max_model_len}: this model (longrope) turns all tokens of a batch by other frequencies "
            f"once one of them is beyond {limit}, so that what is computed would depend on neighbours; set it to "
            f"{limit} at most, or use the backend vllm"
        )
