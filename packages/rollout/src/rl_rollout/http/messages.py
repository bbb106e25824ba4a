"""Messages between clients and servers: msgspec Structs for their JSON, and conversion to `rl_rollout.types`."""

from __future__ import annotations

import dataclasses
import math
import re
import struct
import uuid
from difflib import get_close_matches
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_type_hints

import msgspec

from rl_rollout import errors
from rl_rollout.errors import RequestError, RolloutError
from rl_rollout.types import (
    Capabilities,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TensorPart,
    TokenChunk,
    TokenOutput,
)

if TYPE_CHECKING:
    from torch import Tensor

NO_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of decoding bytes that are not the expected message."""

M = TypeVar("M", bound=msgspec.Struct)


def _message_of(value: type, **changed: tuple[Any, ...]) -> Any:
    """Message Struct of a dataclass: its fields and defaults; `changed` has fields of other types, and further ones."""
    hints = get_type_hints(value)
    fields: list[tuple[Any, ...]] = []
    for field in dataclasses.fields(value):
        declared = changed.get(field.name, (hints[field.name],))
        default = () if field.default is dataclasses.MISSING else (field.default,)
        fields.append((field.name, declared[0], *(declared[1:] or default)))
    fields += [(name, *declared) for name, declared in changed.items() if name not in hints]
    return msgspec.defstruct(
        f"{value.__name__}Message", fields, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True
    )


SamplingMessage = _message_of(SamplingParams)
RequestMessage = _message_of(
    GenerateRequest, request_id=(str, ""), sampling_params=(SamplingMessage, SamplingMessage())
)


class ExpertsMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Routed experts as packed integers."""

    shape: tuple[int, int, int]
    """Tokens, layers, experts per token."""
    dtype: Literal["uint8", "int16"]
    """Dtype of the expert ids."""
    data: bytes
    """Little-endian expert ids; base64 in JSON."""


class TensorMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Tensor as bytes."""

    shape: tuple[int, ...]
    dtype: Literal["float32", "int64", "uint8"]
    data: bytes
    """Little-endian values, the last axis first; base64 in JSON."""


_CODES = {"uint8": "B", "int16": "h"}
"""Format characters of `struct`, by dtype."""
_LOGPROB = float | Literal["-inf"] | None
"""Log-prob in JSON, which has neither NaN (null) nor infinity."""
_LOGPROBS = tuple[float | None, ...]
"""Log-probs of sampled tokens, which are never minus infinity."""

OutputMessage = _message_of(
    TokenOutput,
    logprobs=(_LOGPROBS,),
    top_logprobs=(tuple[tuple[tuple[int, _LOGPROB], ...], ...], ()),
    prompt_logprobs=(tuple[_LOGPROB, ...], ()),
    routed_experts=(ExpertsMessage | None, None),
    columns=(dict[str, TensorMessage], {}),
)
ChunkMessage = _message_of(
    TokenChunk, logprobs=(_LOGPROBS,), finish_reason=(FinishReason | None, None), request_id=(str, "")
)
CapabilitiesMessage = _message_of(Capabilities)


class ErrorDetail(msgspec.Struct, forbid_unknown_fields=True):
    """Class, message and HTTP status of an error."""

    type: str
    message: str
    code: int = 500


class ErrorMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Error response."""

    error: ErrorDetail
    request_id: Any = None
    """Id of the request as it was sent, where several requests share a connection."""


class BatchMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/generate_batch`."""

    requests: list[msgspec.Raw] = []
    """Requests, decoded one by one: an invalid one does not affect the others."""
    progress: bool = False
    """Whether to report new tokens before the end."""


class AbortMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/abort`."""

    request_ids: list[str] | None = None
    """Requests to abort; null: all."""


class PauseMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/pause`."""

    mode: str = ""


class UpdateMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/update_weights`: the server's process opens its own receiver of `address`."""

    address: str
    version: int


class WeightsMessage(msgspec.Struct, forbid_unknown_fields=True):
    """`/weight_layout`: by name, dtype and shape of the tensors that updates will bring."""

    weights: dict[str, tuple[str, tuple[int, ...]]]


class SleepMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/sleep`."""

    level: int = 1


class WakeMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/wake`."""

    tags: tuple[str, ...] = ("weights", "kv_cache")


class PoolingMessage(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `/pooling` of a reward model: one of `input` and `messages`."""

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
"""HTTP status of each error class; 500 for every other."""


_UNKNOWN = re.compile("unknown field `(.*?)`")


def read_body(body: bytes, kind: type[M], path: str) -> M:
    """Decode a JSON body; an empty one is an empty object.

    Raises:
        RequestError: it is not such a message; names the field, and the nearest known one.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{path}: {error}{_hint(str(error), kind)}") from error
    except NO_MESSAGE as error:
        raise RequestError(f"the body of {path} is not JSON, or nested too deeply: {error}") from error


def _hint(message: str, kind: type[msgspec.Struct]) -> str:
    if (found := _UNKNOWN.search(message)) is None:
        return ""
    known = [*kind.__struct_fields__, *(SamplingMessage.__struct_fields__ if kind is RequestMessage else ())]
    near = get_close_matches(found[1], known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def _fields(kind: Any, value: Any) -> dict[str, Any]:
    """Fields of `value` by name, as far as `kind`, a message Struct or a dataclass, has them."""
    return {name: getattr(value, name) for name in getattr(kind, "__struct_fields__", None) or kind.__slots__}


def request_to_body(request: GenerateRequest) -> bytes:
    """Encode a request as JSON; fields at their defaults are left out."""
    params = SamplingMessage(**_fields(SamplingMessage, request.sampling_params))
    return msgspec.json.encode(RequestMessage(**_fields(RequestMessage, request) | {"sampling_params": params}))


def request_from_body(body: bytes, path: str = "the request") -> GenerateRequest:
    """Decode one request; one without an id gets a random one.

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
    """Request id in an invalid request, for its error; None without one."""
    try:
        return msgspec.json.decode(body, type=_Id).request_id
    except NO_MESSAGE:
        return None


def output_to_body(output: TokenOutput) -> bytes:
    """Encode an output as JSON; extra outputs only where there are some."""
    fields = _fields(OutputMessage, output)
    fields["top_logprobs"] = tuple(tuple((token, _json_number(x)) for token, x in top) for top in output.top_logprobs)
    fields["prompt_logprobs"] = tuple(map(_json_number, output.prompt_logprobs))
    fields["routed_experts"] = pack_experts(output.routed_experts) if output.routed_experts else None
    fields["columns"] = {name: pack_tensor(tensor) for name, tensor in output.columns.items()}
    return msgspec.json.encode(OutputMessage(**fields))


def output_from_body(body: bytes) -> TokenOutput:
    """Decode an output.

    Raises:
        NO_MESSAGE: the body is not an output.
        RolloutError: its routed experts or a column do not fit their shape.
    """
    fields = _fields(OutputMessage, msgspec.json.decode(body, type=OutputMessage))
    fields["logprobs"] = _numbers(fields["logprobs"])
    fields["top_logprobs"] = tuple(tuple((i, _number(x)) for i, x in top) for top in fields["top_logprobs"])
    fields["prompt_logprobs"] = tuple(map(_number, fields["prompt_logprobs"]))
    fields["routed_experts"] = unpack_experts(experts) if (experts := fields["routed_experts"]) else ()
    fields["columns"] = {name: unpack_tensor(name, packed) for name, packed in fields["columns"].items()}
    return TokenOutput(**fields)


def chunk_to_body(chunk: TokenChunk, request_id: str = "") -> bytes:
    """Encode a chunk of an output as JSON, with its request id where several requests share a connection."""
    return msgspec.json.encode(ChunkMessage(**_fields(TokenChunk, chunk), request_id=request_id))


def chunk_from_body(body: bytes) -> tuple[str, TokenChunk]:
    """Decode a chunk; returns its request id and the chunk.

    Raises:
        NO_MESSAGE: the body is not a chunk.
    """
    message: Any = msgspec.json.decode(body, type=ChunkMessage)
    fields = _fields(TokenChunk, message)
    fields["logprobs"] = _numbers(message.logprobs)
    return message.request_id, TokenChunk(**fields)


def _json_number(logprob: float) -> Any:
    return "-inf" if logprob == -math.inf else logprob


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _numbers(values: tuple[Any, ...]) -> tuple[float, ...]:
    return tuple(map(_number, values)) if None in values else values


def layout_from_json(found: Any, peer: str) -> list[list[TensorPart]] | None:
    """The slices of each weight receiver of a server; None: one takes all.

    Raises:
        RolloutError: it is something else.
    """
    try:
        return msgspec.convert(found, list[list[TensorPart]] | None)
    except msgspec.ValidationError as error:
        raise RolloutError(f"{peer}: parts: {error}; run the same rl-rollout at both ends") from error


def capabilities_from_json(found: Any, peer: str) -> Capabilities:
    """Capabilities in the answer of `/health`.

    Raises:
        RolloutError: a field is unknown here, or of another type.
    """
    try:
        return Capabilities(**_fields(Capabilities, msgspec.convert(found, CapabilitiesMessage)))
    except msgspec.ValidationError as error:
        raise RolloutError(f"{peer}: capabilities: {error}; run the same rl-rollout at both ends") from error


def error_to_body(error: BaseException, request_id: Any = None) -> bytes:
    """Encode an error as `{"error": {...}}`, which OpenAI's clients understand too."""
    detail = ErrorDetail(type(error).__name__, str(error), status_of(error))
    return msgspec.json.encode(ErrorMessage(detail, request_id))


def error_from_body(body: bytes, peer: str) -> tuple[Any, RolloutError]:
    """Decode an error response: its request id, and the error as its class of `rl_rollout.errors`."""
    try:
        message = msgspec.json.decode(body, type=ErrorMessage)
    except NO_MESSAGE:
        return None, RolloutError(f"{peer} answered with no known message: {body[:500].decode(errors='replace')}")
    kind = getattr(errors, message.error.type, None)
    if isinstance(kind, type) and issubclass(kind, RolloutError):
        return message.request_id, kind(message.error.message)
    return message.request_id, RolloutError(f"{peer}: {message.error.type}: {message.error.message}")


def status_of(error: BaseException) -> int:
    """HTTP status of an error."""
    return next((status for kind, status in STATUS_OF.items() if isinstance(error, kind)), 500)


Experts = tuple[tuple[tuple[int, ...], ...], ...]
"""[tokens][layers][experts per token] expert ids."""


def pack_experts(experts: Experts) -> ExpertsMessage:
    """Pack expert ids of at least one token; every token has equally many layers, every layer equally many experts."""
    flat = list(chain.from_iterable(chain.from_iterable(experts)))
    dtype = "uint8" if min(flat) >= 0 and max(flat) < 2**8 else "int16"
    shape = len(experts), len(experts[0]), len(experts[0][0])
    return ExpertsMessage(shape, dtype, struct.pack(f"<{len(flat)}{_CODES[dtype]}", *flat))


def unpack_experts(packed: ExpertsMessage) -> Experts:
    """Unpack routed experts.

    Raises:
        RolloutError: the number of ids does not fit the shape.
    """
    _, num_layers, num_experts = packed.shape
    code = _CODES[packed.dtype]
    count = len(packed.data) // struct.calcsize(code)
    if min(packed.shape) < 1 or count != prod(packed.shape):
        raise RolloutError(f"routed_experts has {count} numbers for the shape {packed.shape}")
    flat = struct.unpack_from(f"<{count}{code}", packed.data)
    layers = [flat[i : i + num_experts] for i in range(0, count, num_experts)]
    return tuple(tuple(layers[i : i + num_layers]) for i in range(0, len(layers), num_layers))


def pack_tensor(tensor: Tensor) -> TensorMessage:
    """Pack a float32, int64 or uint8 tensor on the CPU."""
    return TensorMessage(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.numpy().tobytes())  # pyright: ignore[reportArgumentType] - a server of ours made it


def unpack_tensor(name: str, packed: TensorMessage) -> Tensor:
    """Unpack a column.

    Raises:
        RolloutError: its bytes do not fit the shape.
    """
    import torch  # a client of token models does without it

    dtype = getattr(torch, packed.dtype)
    if min(packed.shape, default=1) < 1 or len(packed.data) != prod(packed.shape) * dtype.itemsize:
        raise RolloutError(f"column {name} has {len(packed.data)} bytes for {packed.dtype} of shape {packed.shape}")
    return torch.frombuffer(bytearray(packed.data), dtype=dtype).view(packed.shape).clone()
