"""Codec of values for RPC and files: MessagePack with extension types.

Carried are None, bool, numbers, str, bytes, list, tuple, dict, set, tensors (dense and nested), dtypes, shapes, numpy's
arrays and numbers, and the classes of this package that calls take and return. Nothing else is, so that reading never
runs code; a pickle would.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_MAX_DEPTH = 200
_LENGTH = struct.Struct("<Q")
_MAGIC = b"RLTQ-TQ\x01"
_PLAIN = frozenset({type(None), bool, float, str, bytes})
(_TUPLE, _DICT, _SET, _FROZENSET, _INT, _COMPLEX, _DTYPE, _SIZE, _TENSOR, _NESTED, _ARRAY, _NUMBER, _RECORD,
 _COUNTER) = range(1, 15)  # fmt: skip

_RECORDS: dict[str, tuple[type[Any], Callable[[Any], dict[str, Any]], Callable[[dict[str, Any]], Any]]] = {}


def register(
    kind: type[Any], fields: Callable[[Any], dict[str, Any]], make: Callable[[dict[str, Any]], Any] | None = None
) -> None:
    """Register a class: it is encoded as its name and fields."""
    _RECORDS[kind.__name__] = (kind, fields, make or (lambda values: kind(**values)))


def encode(value: Any) -> bytes:
    """Encode a value as bytes.

    Raises:
        TypeError: it, or something in it, is not carried.
    """
    return _encoder.encode(_packed(value, 0))


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Decode the bytes of `encode`.

    Raises:
        ValueError: the bytes are no value.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, TypeError, LookupError, RuntimeError, OverflowError) as error:
        raise ValueError(f"these bytes are not a value of rl-tq's TransferQueue layer: {error}") from error


def write_records(file: BinaryIO, values: Iterable[Any]) -> None:
    """Write values to a file, one after the other."""
    file.write(_MAGIC)
    for value in values:
        data = encode(value)
        file.write(_LENGTH.pack(len(data)))
        file.write(data)


def read_records(file: BinaryIO) -> Iterator[Any]:
    """The values that `write_records` wrote.

    Raises:
        ValueError: the file is another one, or cut off.
    """
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError(f"{file.name} is not a file of this version: write the checkpoint again with save_checkpoint")
    while head := file.read(_LENGTH.size):
        nbytes = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
        start = file.tell()
        left = file.seek(0, 2) - start
        file.seek(start)
        if not 0 <= nbytes <= left:
            raise ValueError(f"{file.name} is damaged: a record of {nbytes} bytes begins where {left} are left")
        yield decode(file.read(nbytes))


def _packed(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise TypeError(f"a value is nested more than {_MAX_DEPTH} deep")
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else _extension(_INT, str(value))
    if kind is list:
        return [_packed(item, depth + 1) for item in value]
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: _packed(item, depth + 1) for key, item in value.items()}
        return _extension(_DICT, _pairs(value, depth))
    if kind is Counter:
        return _extension(_COUNTER, _pairs(value, depth))
    for of, code in ((tuple, _TUPLE), (set, _SET), (frozenset, _FROZENSET)):
        if kind is of:
            return _extension(code, [_packed(item, depth + 1) for item in value])
    if kind is complex:
        return _extension(_COMPLEX, [value.real, value.imag])
    if kind is torch.Size:
        return _extension(_SIZE, list(value))
    if isinstance(value, torch.dtype):
        return _extension(_DTYPE, str(value).removeprefix("torch."))
    if isinstance(value, torch.Tensor):
        return _packed_tensor(value, depth)
    if kind is np.ndarray and not value.dtype.hasobject:
        plain = np.ascontiguousarray(value)
        return _extension(_ARRAY, [value.dtype.str, list(value.shape), plain.tobytes()])
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return _extension(_NUMBER, [value.dtype.str, value.tobytes()])
    record = _RECORDS.get(kind.__name__)
    if record is not None and record[0] is kind:
        fields = {name: _packed(item, depth + 1) for name, item in record[1](value).items()}
        return _extension(_RECORD, [kind.__name__, fields])
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be carried, as reading it would run its code: give tensors, "
        "arrays, numbers, text, bytes, or lists, tuples, sets and dicts of these"
    )


def _pairs(value: Any, depth: int) -> list[Any]:
    return [[_packed(key, depth + 1), _packed(item, depth + 1)] for key, item in value.items()]


def _packed_tensor(value: torch.Tensor, depth: int) -> msgspec.msgpack.Ext:
    if value.is_nested:
        rows = [_packed(row, depth + 1) for row in value.unbind()]
        return _extension(_NESTED, ["jagged" if value.layout is torch.jagged else "strided", rows])
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return _extension(_TENSOR, [str(value.dtype).removeprefix("torch."), list(value.shape), data])


def _extension(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encoder.encode(value))


def _unpacked(code: int, data: memoryview) -> Any:
    value = _decoder.decode(data)
    match code:
        case 1:  # _TUPLE
            return tuple(value)
        case 2:  # _DICT
            return {key: item for key, item in value}  # noqa: C416 - pairs are lists
        case 3:  # _SET
            return set(value)
        case 4:  # _FROZENSET
            return frozenset(value)
        case 5:  # _INT
            return int(value)
        case 6:  # _COMPLEX
            return complex(*value)
        case 7:  # _DTYPE
            return _dtype(value)
        case 8:  # _SIZE
            return torch.Size(value)
        case 9:  # _TENSOR
            name, shape, raw = value
            if not raw:
                return torch.empty(shape, dtype=_dtype(name))
            return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(_dtype(name)).view(shape)
        case 10:  # _NESTED
            layout = torch.jagged if value[0] == "jagged" else torch.strided
            return torch.nested.nested_tensor(value[1], layout=layout)
        case 11:  # _ARRAY
            dtype, shape, raw = value
            return np.frombuffer(bytearray(raw), dtype=_array_dtype(dtype)).reshape(shape)
        case 12:  # _NUMBER
            return np.frombuffer(value[1], dtype=_array_dtype(value[0]))[0]
        case 13:  # _RECORD
            return _RECORDS[value[0]][2](value[1])
        case 14:  # _COUNTER
            return Counter({key: item for key, item in value})  # noqa: C416 - pairs are lists
        case _:
            raise ValueError(f"there is no type {code}")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def _array_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError(f"arrays of objects are not carried: {name!r}")
    return dtype


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Any, ext_hook=_unpacked)
