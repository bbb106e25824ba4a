"""Validation of requests, outputs, model folders and adapters. No I/O beyond configurations."""

from __future__ import annotations

import json
import math
import re
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

    from rl_csrc.inference.folder_tokens import FolderTokens
    from rl_rollout.types import Capabilities, GenerateRequest, SamplingParams, ServerConfig, TokenOutput


NO_LOGPROB = -9999.0
"""Log-prob that vLLM reports in place of NaN, of minus infinity, and of unknown ones."""
_SLACK = 1e-3
"""Log-probs above 0 by rounding."""
SEED_RANGE = 2**63
"""Bound of seeds, versions, ids and top-k, which engines keep as signed 64-bit integers."""
LEAST_TEMPERATURE = 1e-6
"""Lowest temperature above 0: with less, logits / temperature overflow float32, and SGLang takes it for 0."""


TOOL_PARSERS = "rl_rollout.tool_parsers"
"""Group of entry points that parse the tool calls of a turn; rl-agent brings some."""


def find_plugin(group: str, name: str, what: str, error: type[RolloutError] = ConfigError) -> EntryPoint:
    """Find the entry point of an installed plug-in.

    Raises:
        ConfigError: it is not installed (or `error`); lists those that are.
    """
    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        raise error(f"no {what} {name!r}; installed here: {', '.join(sorted(found)) or 'none'}")
    return found[name]


def check_request(request: GenerateRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Check the prompt, the deadline and the sampling parameters of a request.

    Raises:
        RequestError: says which value is wrong, and what is allowed.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError(f"request {request.request_id!r}: the prompt is empty; give at least one token id")
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"request {request.request_id!r}: the prompt is too long. This model's maximum context length is "
            f"{max_model_len} tokens, completion included, and the prompt has {len(prompt)} tokens; shorten the prompt "
            "or raise max_model_len"  # by the first two phrases clients see that no retry helps
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
    """Read `config.json` of a generative model folder; of a multimodal model, with the language model's fields on top.

    Of an omni model, its thinker's section.

    Raises:
        ModelFolderError: it cannot be read, or the model is a sequence classifier.
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
    from rl_csrc.inference.folder_tokens import thinker_of  # imports torch, which a client does not need

    found = thinker_of(found)
    return {**found, **found.get("text_config", {}), "model_type": found.get("model_type")}


def folder_tokens(model_path: str) -> FolderTokens:
    """Ids that end a turn in a model folder: see `rl_csrc.inference.folder_tokens`.

    Raises:
        ModelFolderError: one of its files cannot be read.
    """
    from rl_csrc.inference.folder_tokens import read_folder_tokens  # imports torch, which a client does not need

    try:
        return read_folder_tokens(model_path)
    except ValueError as error:
        raise ModelFolderError(str(error)) from error


def check_device(name: str) -> None:
    """Check the name of a device that is computed on here.

    Raises:
        ConfigError: it is another, such as `mps` or `npu`.
    """
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is None:
        raise ConfigError(f"device {name!r} is not computed on; use auto, cpu, cuda or cuda:N (an NVIDIA GPU)")


def check_count(count: int, config: ServerConfig) -> None:
    """Check the number of completions that one HTTP request asks for.

    Raises:
        RequestError: it is above `max_completions`.
    """
    if count > config.max_completions:
        raise RequestError(
            f"the request asks for {count} sequences, and max_completions={config.max_completions}; ask for fewer, "
            "or raise it"
        )


def check_limits(request: GenerateRequest, config: ServerConfig) -> None:
    """Check a request's stop ids and top log-probs against the server's limits.

    Raises:
        RequestError: it asks for more; names the setting.
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
    """Check a request's optional features against the server's capabilities.

    Raises:
        UnsupportedError: the server lacks one; names the field.
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
        "sounds": capabilities.takes_audio or not request.has_sounds,
        "videos": capabilities.takes_videos or not request.has_videos,
        "seed": capabilities.is_seeded or request.sampling_params.seed is None,
        "structured output": capabilities.structured != "none" or not request.sampling_params.is_structured,
    }
    for name, is_fine in asked.items():
        if not is_fine:
            raise UnsupportedError(f"request {request.request_id!r}: this server has no {name}; leave it out")
    is_resumed = bool(request.sampled_spans) and request.sampled_spans[-1][1] == len(request.prompt_token_ids)
    if capabilities.structured == "restricted" and is_resumed and request.sampling_params.is_structured:
        raise UnsupportedError(
            f"request {request.request_id!r}: this server cannot go on with a structured output that another one "
            "began; ask for all of it again"
        )


def check_version(version: int) -> None:
    """Check that a weight version is a non-negative 64-bit integer.

    Raises:
        RequestError: it is not.
    """
    if not 0 <= version < SEED_RANGE:
        raise RequestError(f"weight version {version} must be 0 or above, in 64 bits: every token carries it")


def check_adapter(request: GenerateRequest, names: Iterable[str]) -> None:
    """Check that the adapter of a request is loaded.

    Raises:
        RequestError: it is not; lists those that are.
    """
    if request.adapter is not None and request.adapter not in names:
        raise RequestError(
            f"request {request.request_id!r}: there is no adapter {request.adapter!r}; loaded are: {', '.join(names)}"
        )


def check_finite(output: TokenOutput) -> None:
    """Check that all log-probs of an output are finite, so that no token comes from logits that are not.

    Raises:
        GenerationError: one is not.
    """
    logprobs: tuple[Any, ...] = output.logprobs + output.prompt_logprobs  # JSON has no NaN: servers send null
    if any(logprob is None or not math.isfinite(logprob) for logprob in logprobs):
        versions = ", ".join(map(str, sorted(set(output.weight_versions))))
        raise GenerationError(
            f"request {output.request_id!r}: the model's logits are not finite; check the weights of version {versions}"
        )


def as_logprob(value: float | None) -> float:
    """Log-prob from a third-party server's answer; NaN where it has none."""
    return math.nan if value is None or value <= NO_LOGPROB else value


def check_answer(request: GenerateRequest, output: TokenOutput, peer: str, *, vocab_size: int = 2**31) -> None:
    """Check an output that a server sent: counts, token ids and log-probs that can be those of the request.

    Args:
        request: The request.
        output: Its output.
        peer: Who sent it, for the error.
        vocab_size: Size of the vocabulary, where it is known.

    Raises:
        GenerationError: they cannot; says which.
    """
    count, most, num_prompt = len(output.token_ids), request.sampling_params.max_new_tokens, len(output.prompt_logprobs)
    is_whole = output.finish_reason not in (FinishReason.ABORT, FinishReason.TIMEOUT)
    wanted = len(request.prompt_token_ids) - 1 if request.returns_prompt_logprobs else 0

    def wrong() -> str | None:
        if count > most:
            return f"{count} tokens, and {most} were asked for"
        steps = len(output.logprobs) if output.columns and not count else count
        if not len(output.logprobs) == len(output.weight_versions) == steps:
            return f"{len(output.logprobs)} log-probs and {len(output.weight_versions)} versions of {count} tokens"
        if len(output.top_logprobs) not in (0, count):
            return f"the likeliest tokens of {len(output.top_logprobs)} places of {count}"
        if num_prompt not in ((wanted,) if is_whole else (0, wanted)):
            return f"{num_prompt} log-probs of the prompt, and {wanted} were asked for"
        ids = (*output.token_ids, *(token for top in output.top_logprobs for token, _ in top))
        if (bad := next((i for i in ids if type(i) is not int or not 0 <= i < vocab_size), None)) is not None:
            return f"the token id {bad!r:.40}, which is outside the vocabulary [0, {vocab_size})"
        logprobs = (
            *output.logprobs,
            *output.prompt_logprobs,
            *(value for top in output.top_logprobs for _, value in top),
        )
        highest = math.inf if steps != count else _SLACK  # those of densities may be positive
        if (bad := next((x for x in logprobs if type(x) not in (int, float) or x > highest), None)) is not None:
            return f"the log-prob {bad!r:.40}, which is above 0 or no number"
        if any(math.isnan(x) for x in output.prompt_logprobs):
            return "a log-prob of the prompt that is not a number"
        return None

    if (fault := wrong()) is not None:
        raise GenerationError(f"request {request.request_id!r}: {peer} answered with {fault}")


def check_length(output: TokenOutput, max_new_tokens: int) -> None:
    """Check that an output with the reason `length` has all its tokens, and was not cut by a limit of the engine.

    Raises:
        GenerationError: it is shorter; says both lengths.
    """
    if output.finish_reason is FinishReason.LENGTH and len(output.token_ids) < max_new_tokens:
        raise GenerationError(
            f"request {output.request_id!r}: the engine ended it for its length after {len(output.token_ids)} of "
            f"{max_new_tokens} tokens; raise what its cache or its own limits hold, or ask for fewer"
        )


def check_sampling(request_id: str, params: SamplingParams) -> None:
    """Check the ranges of sampling parameters.

    Raises:
        RequestError: one is out of range; says which field, its value, and what is allowed.
    """

    def need(is_fine: bool, field: str, allowed: str) -> None:
        if not is_fine:
            raise RequestError(f"request {request_id!r}: {field}={getattr(params, field)!r} must be {allowed}")

    need(params.max_new_tokens >= 1, "max_new_tokens", "at least 1")
    is_warm = math.isfinite(params.temperature) and params.temperature >= LEAST_TEMPERATURE
    need(is_warm or params.temperature == 0, "temperature", f"0 (greedy), or {LEAST_TEMPERATURE} or above")
    need(0 < params.top_p <= 1, "top_p", "above 0 and at most 1")
    need(0 <= params.top_k < SEED_RANGE, "top_k", "0 (off) or above, in 64 bits")
    need(0 <= params.min_p <= 1, "min_p", "0 (off) to 1")
    for field in ("presence_penalty", "frequency_penalty"):
        need(math.isfinite(getattr(params, field)), field, "a finite number")
    need(0 < params.repetition_penalty < math.inf, "repetition_penalty", "finite and above 0")
    need(all(0 <= i < SEED_RANGE for i in params.stop_token_ids), "stop_token_ids", "token ids, 0 or above, in 64 bits")
    asked = [name for name in ("json_schema", "regex", "choice") if getattr(params, name) not in (None, ())]
    if len(asked) > 1:
        raise RequestError(f"request {request_id!r}: {' and '.join(asked)} are set; an output has one structure")
    need(all(params.choice), "choice", "texts that are not empty")
    if asked and params.ignore_eos:
        raise RequestError(f"request {request_id!r}: ignore_eos with {asked[0]}, whose output ends there; leave it out")
    need(params.seed is None or -SEED_RANGE <= params.seed < SEED_RANGE, "seed", "None or a 64-bit integer")


def versions_of(spans: Sequence[Mapping[str, Any]], count: int, engine_name: str) -> list[int]:
    """Weight version of every token, from spans `[start, end)` with a version each.

    Raises:
        WeightUpdateError: the spans do not cover all tokens; a version is never guessed.
    """
    versions = [int(span["version"]) for span in spans or () for _ in range(span["start"], span["end"])]
    if len(versions) != count:
        raise WeightUpdateError(
            f"{engine_name} reported the weight versions of {len(versions)} tokens, and there are {count}"
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
    "lora_bias": False,
    "target_parameters": None,
    "trainable_token_indices": None,
}
"""Settings of peft that are supported at this value only."""
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model unchanged. Others (`pissa`, `olora`) change it, and the
adapter belongs to the changed one; peft writes `true` where it converts such an adapter to the base on disk."""


def read_adapter_config(adapter: str, folder: str | Path) -> dict[str, Any]:
    """Read `adapter_config.json` of a LoRA adapter in peft's format, and check that it is plain: see `check_plain`.

    Raises:
        ModelFolderError: it cannot be read, or a setting is not supported.
    """
    try:
        config: dict[str, Any] = json.loads((Path(folder) / "adapter_config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelFolderError(
            f"adapter {adapter!r}: folder {str(folder)!r} has no adapter_config.json that can be read ({error}); is it "
            "one of peft's?"
        ) from error
    check_plain(adapter, config)
    return config


def check_plain(adapter: str, config: Mapping[str, Any], *, is_scaled_by_root: bool = True) -> None:
    """Check that an adapter is plain LoRA, which engines compute as peft does.

    Args:
        adapter: Name of the adapter.
        config: Its `adapter_config.json`.
        is_scaled_by_root: Whether the engine supports `use_rslora`.

    Raises:
        ModelFolderError: a setting is not supported; says which, and the supported value.
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
            "with; save it with peft's path_initial_model_for_weight_conversion"
        )


def check_positions(text_config: Any, max_model_len: int) -> None:
    """Check that no token's position encoding depends on its batch neighbours (`rl_csrc.decoder.longrope_limit`).

    Raises:
        ConfigError: `max_model_len` is beyond the limit of longrope.
    """
    from rl_csrc.inference.decoder import longrope_limit  # imports torch, which a client does not need

    limit = longrope_limit(getattr(text_config, "rope_parameters", None))
    if limit is not None and max_model_len > limit:
        raise ConfigError(
            f"max_model_len={max_model_len}: this model (longrope) turns all tokens of a batch by other frequencies "
            f"once one of them is beyond {limit}, so that what is computed would depend on neighbours; set it to "
            f"{limit} at most, or use the backend vllm"
        )
