"""Decoder of `forward_backward` requests: rows of tokens, targets and the columns of a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from rl_tinker.errors import RequestError, UnsupportedError
from rl_tinker.types import LossName
from rl_tinker.wire.protobuf import FLOAT32, INT64, message

_DTYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
_NEEDED = {LossName.CROSS_ENTROPY: ("weights",)}
"""Columns that a loss needs, besides `target_tokens`; the others need those of `_OF_SAMPLES`."""
_OF_SAMPLES = ("logprobs", "advantages")
_OPTIONAL = ("weights",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One datum of a request. N tokens, K targets at each."""

    tokens: np.ndarray
    """(N,) int64 token ids."""
    targets: np.ndarray
    """(N,) or (N, K) int64 ids of the tokens that are scored at each position."""
    inputs: dict[str, np.ndarray]
    """float32 columns of the loss, shaped like `targets`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """Decoded request."""

    model_id: str
    seq_id: int
    loss: LossName
    settings: dict[str, float]
    """Settings of the loss, such as clip thresholds."""
    forward_only: bool
    rows: list[Row]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(row.tokens.size for row in self.rows)


def decode_forward_backward(body: bytes) -> ForwardBackward:
    """Decode the body of a `forward_backward` request.

    Raises:
        RequestError: it is no such message, or a row's columns do not fit; names the row and the column.
        UnsupportedError: a loss, or an input other than text, that this server does not have.
    """
    request = message("ForwardBackwardRequest")()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise RequestError(f"the body is no ForwardBackwardRequest in protobuf: {error}") from error
    if request.loss_fn not in tuple(LossName):
        available = ", ".join(LossName)
        raise UnsupportedError(f"loss_fn={request.loss_fn!r} is not available here; available: {available}")
    loss = LossName(request.loss_fn)
    if not request.data:
        raise RequestError("data is empty; give at least one datum")
    return ForwardBackward(
        model_id=request.model_id,
        seq_id=request.seq_id,
        loss=loss,
        settings=_settings(request),
        forward_only=request.forward_only,
        rows=[_row(index, datum, loss) for index, datum in enumerate(request.data)],
    )


def number_of(body: bytes) -> tuple[str, int]:
    """Model and number of a `forward_backward` request whose other fields may be wrong; ("", 0) if it is none."""
    request = message("ForwardBackwardRequest")()
    try:
        request.ParseFromString(body)
    except DecodeError:
        return "", 0
    return request.model_id, request.seq_id


def _settings(request: Any) -> dict[str, float]:
    settings = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        if value.text:
            raise UnsupportedError(
                f"loss_fn_config[{name!r}] is the text {value.text!r}; losses here take numbers only"
            )
        settings[name] = value.number
    return settings


def _row(index: int, datum: Any, loss: LossName) -> Row:
    where = f"datum {index}"
    tokens = tokens_of(datum.model_input, where)
    columns = {name: _tensor(tensor, f"{where}, {name}", name) for name, tensor in datum.loss_fn_inputs.items()}
    targets = columns.pop("target_tokens", None)
    if targets is None:
        raise RequestError(f"{where} has no loss_fn_inputs['target_tokens']; {loss} scores them")
    if targets.ndim not in (1, 2) or targets.shape[0] != tokens.size:
        raise RequestError(
            f"{where}: target_tokens has shape {targets.shape}, and model_input {tokens.size} tokens; give one target "
            "(or a row of K) for each token"
        )
    if targets.ndim == 2 and loss != LossName.CROSS_ENTROPY:
        raise RequestError(f"{where}: target_tokens has shape {targets.shape}; {loss} takes one target for each token")
    needed = _NEEDED.get(loss, _OF_SAMPLES)
    if missing := [name for name in needed if name not in columns]:
        raise RequestError(f"{where} has no loss_fn_inputs[{missing[0]!r}], which {loss} needs")
    used = {name: columns[name].astype(np.float32) for name in (*needed, *_OPTIONAL) if name in columns}
    for name, column in used.items():
        if column.shape != targets.shape:
            raise RequestError(f"{where}: {name} has shape {column.shape}, and target_tokens {targets.shape}")
        if not np.isfinite(column).all():
            raise RequestError(f"{where}: {name} has a value that is not finite")
    if unknown := columns.keys() - set(needed) - {*_OPTIONAL}:
        raise RequestError(f"{where}: loss_fn_inputs[{min(unknown)!r}] is not read by {loss}; it reads {needed}")
    return Row(tokens=tokens, targets=targets.astype(np.int64), inputs=used)


def tokens_of(chunks: Any, where: str) -> np.ndarray:
    """(N,) int64 tokens of the chunks of a model input.

    Raises:
        UnsupportedError: a chunk is an image or audio.
        RequestError: there is no token.
    """
    parts: list[np.ndarray] = []
    for chunk in chunks:
        if chunk.HasField("image") or chunk.HasField("dmel"):
            raise UnsupportedError(f"{where}: images and audio are not available here; give encoded text")
        raw = chunk.encoded_text.tokens
        if len(raw) % 4:
            raise RequestError(f"{where}: the tokens are {len(raw)} bytes, no multiple of 4 (int32)")
        parts.append(np.frombuffer(raw, "<i4").astype(np.int64))
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not tokens.size:
        raise RequestError(f"{where}: model_input has no tokens")
    return tokens


def _tensor(tensor: Any, where: str, name: str) -> np.ndarray:
    """Values of a tensor, dense; unlisted entries of a sparse one are 0."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise RequestError(f"{where}: dtype {tensor.dtype} is neither float32 (1) nor int64 (2)")
    if (dtype.kind == "i") != (name == "target_tokens"):
        raise RequestError(f"{where}: target_tokens is int64, and every other input is float32")
    shape = tuple(tensor.shape)
    try:
        if tensor.HasField("sparse_csr"):
            return _densified(tensor.sparse_csr, shape, dtype)
        values = np.frombuffer(tensor.dense, dtype)
        return values.reshape(shape or (values.size,))
    except (ValueError, IndexError) as error:
        raise RequestError(f"{where}: the values do not fit the shape {shape}: {error}") from error


def _densified(csr: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    values, rows, columns = (
        np.frombuffer(csr.values, dtype),
        np.frombuffer(csr.crow_indices, "<i8"),
        np.frombuffer(csr.col_indices, "<i8"),
    )
    if len(shape) != 2 or rows.size != shape[0] + 1:
        raise ValueError(f"{rows.size} row pointers")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def check_ranges(request: ForwardBackward, *, vocab_size: int, max_len: int) -> None:
    """Check the rows of a request against the model.

    Raises:
        RequestError: a token id outside the vocabulary, or a row that is too long; names the datum.
    """
    for index, row in enumerate(request.rows):
        if row.tokens.size > max_len:
            raise RequestError(f"datum {index} has {row.tokens.size} tokens; the longest allowed is {max_len}")
        for what, ids in (("model_input", row.tokens), ("target_tokens", row.targets)):
            if ids.min() < 0 or ids.max() >= vocab_size:
                wrong = int(ids.min() if ids.min() < 0 else ids.max())
                raise RequestError(f"datum {index}: {what} has token id {wrong}; the vocabulary has {vocab_size}")
