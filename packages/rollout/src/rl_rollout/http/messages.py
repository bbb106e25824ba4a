"""Messages between clients and servers: JSON, and the values that it stands for."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import sys
import uuid
from array import array
from difflib import get_close_matches
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_type_hints

import msgspec

from rl_rollout import errors
from rl_rollout.errors import RequestError, RolloutError
from rl_rollout.types import Capabilities, FinishReason, GenerateRequest, SamplingParams, TokenChunk, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


M = TypeVar("M", bound=msgspec.Struct)


def _message_of(value: type, **changed: tuple[Any, ...]) -> Any:
    """The message of a value type: its fields, with their defaults, and no others."""
    hints = get_type_hints(value)
    fields: list[tuple[Any, ...]] = []
    for field in dataclasses.fields(value):
        told = changed.get(field.name, (hints[field.name],))
        default = () if field.default is dataclasses.MISSING else (field.default,)
        fields.append((field.name, told[0], *(told[1:] or default)))
    return msgspec.defstruct(
        f"{value.__name__}Message", fields, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True
    )


SamplingMessage = _message_of(SamplingParams)
RequestMessage = _message_of(
    GenerateRequest, request_id=(str, ""), sampling_params=(SamplingMessage, SamplingMessage())
)


class BatchMessage(msgspec.Struct, forbid_unknown_fields=True):
    """`/generate_batch`."""

    requests: list[msgspec.Raw] = []
    """Read one by one: a bad one spoils no other."""
    progress: bool = False


class AbortMessage(msgspec.Struct, forbid_unknown_fields=True):
    """`/abort`; null is all."""

    request_ids: list[str] | None = None


class PauseMessage(msgspec.Struct, forbid_unknown_fields=True):
    """`/pause`."""

    mode: str = ""


class UpdateMessage(msgspec.Struct, forbid_unknown_fields=True):
    """`/update_weights`: this process opens the receiving end of `address`."""

    address: str
    version: int


class SleepMessage(msgspec.Struct, forbid_unknown_fields=True):
    """`/sleep`."""

    level: int = 1


class WakeMessage(msgspec.Struct, forbid_unknown_fields=True):
    """`/wake`."""

    tags: tuple[str, ...] = ("weights", "kv_cache")


class PoolingMessage(msgspec.Struct, forbid_unknown_fields=True):
    """`/pooling` of a reward model: one of `input` and `messages`."""

    input: str | list[Any] | None = None
    messages: list[Any] | None = None
    model: str | None = None


_EXTRAS = ("top_logprobs", "prompt_logprobs")
"""Fields of an output that are sent as they are, if they were asked for; routed experts are packed."""

STATUS_OF = {
    errors.RequestError: 400,
    errors.UnsupportedError: 501,
    errors.ConfigError: 400,
    errors.ModelFolderError: 400,
    errors.WeightUpdateError: 409,
    errors.OverloadedError: 429,
    errors.GenerationError: 500,
    errors.ServerLostError: 503,
    errors.RequestTimeoutError: 504,
}
"""HTTP status of each error; every other one is 500."""


def line_of(message: Mapping[str, Any]) -> bytes:
    """A message as a line of JSON, in a tenth of the time that the standard library takes. NaN becomes null."""
    if any(name in message for name in _EXTRAS):  # may hold minus infinity, which must not become null too
        return json.dumps(message).encode() + b"\n"
    return msgspec.json.encode(message) + b"\n"


def message_of(line: bytes) -> dict[str, Any]:
    """The reverse."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:  # it does not know the standard library's Infinity
        return json.loads(line)


_UNKNOWN = re.compile("unknown field `(.*?)`")


def read_body(body: bytes, kind: type[M], path: str) -> M:
    """A message in JSON; an empty body is an empty object.

    Raises:
        RequestError: it is none; names the field, and the nearest known one.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{path}: {error}{_hint(str(error), kind)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body of {path} is not JSON, or nested too deeply: {error}") from error


def _hint(told: str, kind: type[msgspec.Struct]) -> str:
    if (found := _UNKNOWN.search(told)) is None:
        return ""
    known = [*kind.__struct_fields__, *(SamplingMessage.__struct_fields__ if kind is RequestMessage else ())]
    near = get_close_matches(found[1], known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def request_to_body(request: GenerateRequest) -> bytes:
    """A request as JSON; only what differs from the defaults is sent."""
    fields = {name: getattr(request, name) for name in RequestMessage.__struct_fields__}
    params = {name: getattr(request.sampling_params, name) for name in SamplingMessage.__struct_fields__}
    return msgspec.json.encode(RequestMessage(**{**fields, "sampling_params": SamplingMessage(**params)}))


def request_from_body(body: bytes, path: str = "the request") -> GenerateRequest:
    """Read one request; one without an id is given one.

    Raises:
        RequestError: unknown field, wrong type, or no prompt.
    """
    message: Any = read_body(body, RequestMessage, path)
    fields: dict[str, Any] = {name: getattr(message, name) for name in RequestMessage.__struct_fields__}
    given = message.sampling_params
    sampling: dict[str, Any] = {name: getattr(given, name) for name in SamplingMessage.__struct_fields__}
    fields["request_id"] = message.request_id or uuid.uuid4().hex
    fields["sampling_params"] = SamplingParams(**sampling)
    return GenerateRequest(**fields)


class _Id(msgspec.Struct):
    request_id: Any = None


def request_id_of(body: bytes) -> Any:
    """The id in a request that cannot be served, whatever else it holds; None where there is none."""
    try:
        return msgspec.json.decode(body, type=_Id).request_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def output_to_json(output: TokenOutput) -> dict[str, Any]:
    """The fields of a `TokenOutput`."""
    return {
        "request_id": output.request_id,
        "token_ids": output.token_ids,
        "logprobs": output.logprobs,
        "weight_versions": output.weight_versions,
        "finish_reason": output.finish_reason,
        **{name: getattr(output, name) for name in _EXTRAS if getattr(output, name)},
        **({"routed_experts": experts_to_json(output.routed_experts)} if output.routed_experts else {}),
    }


def output_from_json(message: Mapping[str, Any]) -> TokenOutput:
    """The reverse of `output_to_json`."""
    return TokenOutput(
        request_id=message["request_id"],
        token_ids=tuple(message["token_ids"]),
        logprobs=_numbers(message["logprobs"]),
        weight_versions=tuple(message["weight_versions"]),
        finish_reason=FinishReason(message["finish_reason"]),
        **{name: _tuples(message[name]) for name in _EXTRAS if name in message},
        routed_experts=experts_from_json(message.get("routed_experts", [])),
    )


def capabilities_from_json(message: Mapping[str, Any]) -> Capabilities:
    """The reverse of `dataclasses.asdict`."""
    return Capabilities(**{name: _tuples(found) for name, found in message.items()})


def _tuples(found: Any) -> Any:
    """Nested lists as nested tuples."""
    return tuple(map(_tuples, found)) if isinstance(found, list) else found


def _numbers(found: list[Any]) -> tuple[Any, ...]:
    """Numbers, with NaN where there is null: JSON has none."""
    return tuple(found) if None not in found else tuple(math.nan if each is None else each for each in found)


def chunk_to_json(chunk: TokenChunk) -> dict[str, Any]:
    """The fields of a `TokenChunk`; the reason only where there is one."""
    told = {"token_ids": chunk.token_ids, "logprobs": chunk.logprobs, "weight_versions": chunk.weight_versions}
    return told if chunk.finish_reason is None else {**told, "finish_reason": chunk.finish_reason}


def chunk_from_json(message: Mapping[str, Any]) -> TokenChunk:
    """The reverse of `chunk_to_json`."""
    reason = message.get("finish_reason")
    return TokenChunk(
        token_ids=tuple(message["token_ids"]),
        logprobs=_numbers(message["logprobs"]),
        weight_versions=tuple(message["weight_versions"]),
        finish_reason=None if reason is None else FinishReason(reason),
    )


def partial_from_json(request_id: str, messages: Sequence[Mapping[str, Any]]) -> TokenOutput | None:
    """Partial output of a lost request from its progress messages; None without any."""
    if not messages:
        return None
    return TokenOutput(
        request_id=request_id,
        token_ids=tuple(i for message in messages for i in message["token_ids"]),
        logprobs=tuple(x for message in messages for x in _numbers(message["logprobs"])),
        weight_versions=tuple(v for message in messages for v in message["weight_versions"]),
        finish_reason=FinishReason.ABORT,
    )


def error_to_json(error: BaseException) -> dict[str, Any]:
    """`{"error": {...}}`, the shape that OpenAI's clients read too."""
    return {"error": {"type": type(error).__name__, "message": str(error), "code": status_of(error)}}


def error_from_json(message: Mapping[str, Any], peer: str) -> RolloutError:
    """The error that a server reported, as the class that it has here."""
    kind = getattr(errors, str(message.get("type")), None)
    if not (isinstance(kind, type) and issubclass(kind, RolloutError)):
        return RolloutError(f"{peer}: {message.get('type')}: {message.get('message')}")
    return kind(str(message.get("message")))


def status_of(error: BaseException) -> int:
    """HTTP status that an error is answered with."""
    return next((status for kind, status in STATUS_OF.items() if isinstance(error, kind)), 500)


Experts = tuple[tuple[tuple[int, ...], ...], ...]
"""[tokens][layers][experts per token] expert ids."""

_CODES: dict[str, Literal["B", "h"]] = {"uint8": "B", "int16": "h"}
"""Of Python's arrays, by dtype."""


def experts_to_json(experts: Experts) -> dict[str, Any]:
    """Pack ids of at least one token; all tokens have the same layers, and all layers the same number of experts."""
    flat = list(chain.from_iterable(chain.from_iterable(experts)))
    dtype = "uint8" if min(flat) >= 0 and max(flat) < 2**8 else "int16"
    numbers = _little_endian(array(_CODES[dtype], flat))
    shape = [len(experts), len(experts[0]), len(experts[0][0])]
    return {"shape": shape, "dtype": dtype, "data": base64.b64encode(numbers.tobytes()).decode()}


def experts_from_json(found: Any) -> Experts:
    """The reverse of `experts_to_json`.

    Raises:
        RolloutError: it is neither that nor nested lists.
    """
    if isinstance(found, list):
        return tuple(tuple(map(tuple, token)) for token in found)
    try:
        shape, code = found["shape"], _CODES[found["dtype"]]
        numbers = array(code, base64.b64decode(found["data"], validate=True))
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(f"routed_experts cannot be read: {error!r}; wanted shape, dtype and data") from error
    if prod(shape) != len(numbers):
        raise RolloutError(f"routed_experts has {len(numbers)} numbers for the shape {shape}")
    rows: Any = memoryview(_little_endian(numbers)).cast("B").cast(code, shape).tolist()
    return tuple(tuple(map(tuple, token)) for token in rows)


def _little_endian(numbers: array[int]) -> array[int]:
    """To the order of the wire, or from it."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
