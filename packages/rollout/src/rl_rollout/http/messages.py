"""Messages between clients and servers: JSON, and the values that it stands for."""

from __future__ import annotations

import dataclasses
import math
import re
import struct
import uuid
from difflib import get_close_matches
from itertools import chain
from math import prod
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec

from rl_rollout import errors
from rl_rollout.errors import RequestError, RolloutError
from rl_rollout.types import Capabilities, FinishReason, GenerateRequest, SamplingParams, TokenChunk, TokenOutput

NO_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading raises of bytes that are not the message that is wanted."""

M = TypeVar("M", bound=msgspec.Struct)


def _message_of(value: type, **changed: tuple[Any, ...]) -> Any:
    """The message of a value type: its fields, with their defaults; `changed` tells other types, and further fields."""
    hints = get_type_hints(value)
    fields: list[tuple[Any, ...]] = []
    for field in dataclasses.fields(value):
        told = changed.get(field.name, (hints[field.name],))
        default = () if field.default is dataclasses.MISSING else (field.default,)
        fields.append((field.name, told[0], *(told[1:] or default)))
    fields += [(name, *told) for name, told in changed.items() if name not in hints]
    return msgspec.defstruct(
        f"{value.__name__}Message", fields, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True
    )


SamplingMessage = _message_of(SamplingParams)
RequestMessage = _message_of(
    GenerateRequest, request_id=(str, ""), sampling_params=(SamplingMessage, SamplingMessage())
)


class ExpertsMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Routed experts: packed numbers in place of digits."""

    shape: tuple[int, int, int]
    """Tokens, layers, experts per token."""
    dtype: Literal["uint8", "int16"]
    data: bytes
    """Little-endian; base64 in JSON."""


_CODES = {"uint8": "B", "int16": "h"}
"""Formats of `struct`, by dtype."""
_LOGPROB = float | Literal["-inf"] | None
"""JSON has neither NaN, which is null, nor infinity."""
_LOGPROBS = tuple[float | None, ...]
"""Of tokens that were drawn."""

OutputMessage = _message_of(
    TokenOutput,
    logprobs=(_LOGPROBS,),
    top_logprobs=(tuple[tuple[tuple[int, _LOGPROB], ...], ...], ()),
    prompt_logprobs=(tuple[_LOGPROB, ...], ()),
    routed_experts=(ExpertsMessage | None, None),
)
ChunkMessage = _message_of(
    TokenChunk, logprobs=(_LOGPROBS,), finish_reason=(FinishReason | None, None), request_id=(str, "")
)
CapabilitiesMessage = _message_of(Capabilities)


class ErrorDetail(msgspec.Struct, forbid_unknown_fields=True):
    """Class, sentence and HTTP status."""

    type: str
    message: str
    code: int = 500


class ErrorMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An error in place of an answer."""

    error: ErrorDetail
    request_id: Any = None
    """As it came, where several requests share a connection."""


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
    except NO_MESSAGE as error:
        raise RequestError(f"the body of {path} is not JSON, or nested too deeply: {error}") from error


def _hint(told: str, kind: type[msgspec.Struct]) -> str:
    if (found := _UNKNOWN.search(told)) is None:
        return ""
    known = [*kind.__struct_fields__, *(SamplingMessage.__struct_fields__ if kind is RequestMessage else ())]
    near = get_close_matches(found[1], known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def _fields(kind: Any, value: Any) -> dict[str, Any]:
    """What a message and the value that it stands for have in common, by the fields of one of them."""
    return {name: getattr(value, name) for name in getattr(kind, "__struct_fields__", None) or kind.__slots__}


def request_to_body(request: GenerateRequest) -> bytes:
    """A request as JSON; only what differs from the defaults is sent."""
    params = SamplingMessage(**_fields(SamplingMessage, request.sampling_params))
    return msgspec.json.encode(RequestMessage(**_fields(RequestMessage, request) | {"sampling_params": params}))


def request_from_body(body: bytes, path: str = "the request") -> GenerateRequest:
    """Read one request; one without an id is given one.

    Raises:
        RequestError: unknown field, wrong type, or no prompt.
    """
    fields = _fields(RequestMessage, read_body(body, RequestMessage, path))
    fields["request_id"] = fields["request_id"] or uuid.uuid4().hex
    fields["sampling_params"] = SamplingParams(**_fields(SamplingMessage, fields["sampling_params"]))
    return GenerateRequest(**fields)


class _Id(msgspec.Struct):
    request_id: Any = None


def request_id_of(body: bytes) -> Any:
    """The id in a request that cannot be served, whatever else it holds; None where there is none."""
    try:
        return msgspec.json.decode(body, type=_Id).request_id
    except NO_MESSAGE:
        return None


def output_to_body(output: TokenOutput) -> bytes:
    """An output as JSON; extras only where there are some."""
    fields = _fields(OutputMessage, output)
    fields["top_logprobs"] = tuple(tuple((token, _told(x)) for token, x in top) for top in output.top_logprobs)
    fields["prompt_logprobs"] = tuple(map(_told, output.prompt_logprobs))
    fields["routed_experts"] = pack_experts(output.routed_experts) if output.routed_experts else None
    return msgspec.json.encode(OutputMessage(**fields))


def output_from_body(body: bytes) -> TokenOutput:
    """The reverse.

    Raises:
        NO_MESSAGE: it is none.
        RolloutError: its routed experts do not fit their shape.
    """
    fields = _fields(OutputMessage, msgspec.json.decode(body, type=OutputMessage))
    fields["logprobs"] = _numbers(fields["logprobs"])
    fields["top_logprobs"] = tuple(tuple((i, _number(x)) for i, x in top) for top in fields["top_logprobs"])
    fields["prompt_logprobs"] = tuple(map(_number, fields["prompt_logprobs"]))
    fields["routed_experts"] = unpack_experts(experts) if (experts := fields["routed_experts"]) else ()
    return TokenOutput(**fields)


def chunk_to_body(chunk: TokenChunk, request_id: str = "") -> bytes:
    """A piece of an output as JSON, with its request's id where several share a connection."""
    return msgspec.json.encode(ChunkMessage(**_fields(TokenChunk, chunk), request_id=request_id))


def chunk_from_body(body: bytes) -> tuple[str, TokenChunk]:
    """Request id and chunk.

    Raises:
        NO_MESSAGE: it is none.
    """
    message: Any = msgspec.json.decode(body, type=ChunkMessage)
    fields = _fields(TokenChunk, message)
    fields["logprobs"] = _numbers(message.logprobs)
    return message.request_id, TokenChunk(**fields)


def _told(logprob: float) -> Any:
    return "-inf" if logprob == -math.inf else logprob


def _number(told: Any) -> float:
    return math.nan if told is None else float(told)


def _numbers(told: tuple[Any, ...]) -> tuple[float, ...]:
    return tuple(map(_number, told)) if None in told else told


def capabilities_from_json(found: Any, peer: str) -> Capabilities:
    """What a server says that it can do.

    Raises:
        RolloutError: a field is not known here, or of another type.
    """
    try:
        return Capabilities(**_fields(Capabilities, msgspec.convert(found, CapabilitiesMessage)))
    except msgspec.ValidationError as error:
        raise RolloutError(f"{peer}: capabilities: {error}; run the same rl-rollout at both ends") from error


def error_to_body(error: BaseException, request_id: Any = None) -> bytes:
    """`{"error": {...}}`, the shape that OpenAI's clients read too."""
    detail = ErrorDetail(type(error).__name__, str(error), status_of(error))
    return msgspec.json.encode(ErrorMessage(detail, request_id))


def error_from_body(body: bytes, peer: str) -> tuple[Any, RolloutError]:
    """Request id and the error that a server told, as the class that it has here; or what it answered instead."""
    try:
        message = msgspec.json.decode(body, type=ErrorMessage)
    except NO_MESSAGE:
        return None, RolloutError(f"{peer} answered what is no message: {body[:500].decode(errors='replace')}")
    kind = getattr(errors, message.error.type, None)
    if isinstance(kind, type) and issubclass(kind, RolloutError):
        return message.request_id, kind(message.error.message)
    return message.request_id, RolloutError(f"{peer}: {message.error.type}: {message.error.message}")


def status_of(error: BaseException) -> int:
    """HTTP status that an error is answered with."""
    return next((status for kind, status in STATUS_OF.items() if isinstance(error, kind)), 500)


Experts = tuple[tuple[tuple[int, ...], ...], ...]
"""[tokens][layers][experts per token] expert ids."""


def pack_experts(experts: Experts) -> ExpertsMessage:
    """Pack ids of at least one token; all tokens have the same layers, and all layers the same number of experts."""
    flat = list(chain.from_iterable(chain.from_iterable(experts)))
    dtype = "uint8" if min(flat) >= 0 and max(flat) < 2**8 else "int16"
    shape = len(experts), len(experts[0]), len(experts[0][0])
    return ExpertsMessage(shape, dtype, struct.pack(f"<{len(flat)}{_CODES[dtype]}", *flat))


def unpack_experts(packed: ExpertsMessage) -> Experts:
    """The reverse.

    Raises:
        RolloutError: the numbers do not fill the shape.
    """
    _, num_layers, num_experts = packed.shape
    code = _CODES[packed.dtype]
    count = len(packed.data) // struct.calcsize(code)
    if min(packed.shape) < 1 or count != prod(packed.shape):
        raise RolloutError(f"routed_experts has {count} numbers for the shape {packed.shape}")
    flat = struct.unpack_from(f"<{count}{code}", packed.data)
    layers = [flat[i : i + num_experts] for i in range(0, count, num_experts)]
    return tuple(tuple(layers[i : i + num_layers]) for i in range(0, len(layers), num_layers))
