"""Tensor frames: named tensors, ragged tensors and bytes in one self-describing block of memory (``FRAMES.md``).

``encode`` copies nothing: it returns a header and references to the tensors' memory, ready for ``writev``, a file or
shared memory. ``decode`` copies nothing either: it checks every length and offset, then returns views into the block.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch

from rl_csrc.errors import DeadlineError, FrameError, PeerDiedError
from rl_csrc.native import cpu, plain_memory

if TYPE_CHECKING:
    import socket

ALIGNMENT = 64
"""Alignment in bytes of header, regions and frame length."""
PREFIX_BYTES = 64
"""Bytes to read before the length of a frame is known."""

DTYPES: tuple[torch.dtype, ...] = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
)
"""Dtypes by code: code ``i`` is ``DTYPES[i - 1]``, code 0 means none. Codes are never reused."""

Buffer: TypeAlias = "torch.Tensor | bytes | bytearray | memoryview | mmap.mmap | Any"
"""A contiguous CPU tensor, or anything with the buffer protocol."""


class Ragged(NamedTuple):
    """Ragged tensor: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``. A doubly ragged one nests two of these."""

    values: torch.Tensor | Ragged
    """The rows one after the other, or the inner ``Ragged`` whose rows this one groups."""
    offsets: torch.Tensor
    """int64 or int32, [rows + 1], starts at 0, never decreases, ends at the number of values."""


Value: TypeAlias = "torch.Tensor | Ragged | tuple[torch.Tensor, torch.Tensor] | bytes | bytearray | memoryview"
Decoded: TypeAlias = "torch.Tensor | Ragged | memoryview"


class Frame:
    """Encoded frame: a header, and in order the memory regions that follow it. Keeps the tensors it refers to alive."""

    __slots__ = ("_native",)

    def __init__(self, native: Any) -> None:
        self._native = native

    @property
    def nbytes(self) -> int:
        """Size of the whole frame in bytes, header and padding included: what ``write_into`` needs."""
        return self._native.nbytes

    @property
    def header(self) -> bytes:
        """Prefix, entries, shapes and names; a multiple of 64 bytes."""
        return self._native.header

    @property
    def buffers(self) -> list[memoryview]:
        """Payload regions in the order of the frame, read-only, without the padding between them."""
        return self._native.buffers()

    def segments(self) -> list[bytes | memoryview]:
        """Header, buffers and padding, for a gathered write: their concatenation is the frame."""
        parts: list[bytes | memoryview] = [self.header]
        for buffer in self.buffers:
            parts.append(buffer)
            if gap := -buffer.nbytes % ALIGNMENT:
                parts.append(bytes(gap))
        return parts

    def write_into(self, out: Buffer, *, checksum: bool = False, num_threads: int = 1) -> int:
        """Copy the frame to the start of a writable buffer and return the bytes written.

        The header is written last, so a reader of shared memory sees no frame until it is complete. ``checksum``
        computes the payload's digest while copying. Raises ``FrameError`` if the buffer is too small.
        """
        self._native.write_into(out, checksum, num_threads)
        return self.nbytes

    def to_bytes(self) -> bytearray:
        """Frame as one new `bytearray`."""
        out = bytearray(self.nbytes)
        self.write_into(out)
        return out

    def send(self, connection: socket.socket | int, *, timeout_s: float) -> int:
        """Write the frame to a stream socket or a file by gathered writes, copying nothing, and return its bytes.

        A pipe works too if it is non-blocking; a blocking one may hold the call beyond its deadline.
        Raises ``DeadlineError`` if the other side did not take all of it in time: the stream is then unusable.
        """
        fd = connection if isinstance(connection, int) else connection.fileno()
        written = self._native.write_fd(fd, timeout_s)
        if written < self.nbytes:
            raise DeadlineError(
                f"{_peer(connection)} took {written} of {self.nbytes} bytes of a frame within {timeout_s} s: "
                "close the connection, the rest cannot follow"
            )
        return written


class FrameView(Mapping[str, Any]):
    """Decoded frame: a read-only mapping from name to view, in the order of encoding.

    A value is a tensor, a ``Ragged`` or (for bytes) a memoryview. It is created at each access, in well under a
    microsecond, shares the buffer's memory and keeps it alive. ``to_dict`` creates all of them.
    """

    __slots__ = ("_native",)

    def __init__(self, native: Any) -> None:
        self._native = native

    @property
    def nbytes(self) -> int:
        """Size of the frame in bytes; the buffer may be longer."""
        return self._native.nbytes

    @property
    def tag(self) -> int:
        """Unsigned 64-bit number that the caller of `encode` stored."""
        return self._native.tag

    @property
    def has_digest(self) -> bool:
        """Whether the frame stores its payload's digest, which ``verify=True`` compares."""
        return self._native.has_digest

    def __getitem__(self, name: str) -> Any:
        return _nest(self._native.get(name))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._native

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.names())

    def __len__(self) -> int:
        return len(self._native)

    def to_dict(self) -> dict[str, Any]:
        """Return all values at once, faster than one by one."""
        values = self._native.values()
        for name, value in values.items():
            if isinstance(value, tuple):
                values[name] = _nest(value)
        return values

    def __repr__(self) -> str:
        return f"FrameView({len(self)} values, {self.nbytes} bytes)"


def encode(mapping: Mapping[str, Value], *, checksum: bool = False, tag: int = 0) -> Frame:
    """Encode named values as a frame, without copying tensors that are contiguous and on the CPU.

    Args:
        mapping: name to dense tensor, ``(values, offsets)``, ``Ragged``, jagged nested tensor, or bytes.
            Non-contiguous and lazily conjugated tensors are copied once.
        checksum: store the payload's digest now (one read of every byte); ``write_into(checksum=True)`` computes it
            while copying.
        tag: an unsigned 64-bit number of the caller's own (a version, a generation), kept in the prefix.

    Raises ``FrameError`` (a ``ValueError``) for a dtype, device, name or offsets that a frame cannot hold.
    """
    if not 0 <= tag < 1 << 64:
        raise FrameError(f"tag is {tag}; it must be an unsigned 64-bit number")
    plain = mapping if type(mapping) is dict else dict(mapping)
    native = cpu.EncodedFrame(plain, _normalise, tag)
    if checksum:
        native.checksum()
    return Frame(native)


def decode(buffer: Buffer, *, verify: bool = False) -> FrameView:
    """Decode a frame: check it, and return a mapping of views into it.

    For any bytes, the result is views inside the buffer or a ``FrameError``. The header is copied before it is checked;
    offsets of ragged values are checked in place, so first copy a frame out of memory that an untrusted process can
    still write. The buffer may be longer than the frame, and must start at a multiple of 8 bytes.

    With ``verify=True`` the payload is compared with its stored digest as well; ``FrameError`` if none was stored.
    """
    return FrameView(cpu.DecodedFrame(buffer, verify))


def receive(connection: socket.socket, *, timeout_s: float, max_nbytes: int, out: Buffer | None = None) -> FrameView:
    """Read one frame from a stream socket into ``out`` (or a new buffer) and decode it.

    Raises ``FrameError`` for a frame longer than ``max_nbytes`` or than ``out``, ``DeadlineError`` when the time is
    up, and ``PeerDiedError`` when the other side closed the connection inside a frame.
    """
    deadline = time.monotonic() + timeout_s
    prefix = bytearray(PREFIX_BYTES)
    _read_exactly(connection, memoryview(prefix), deadline, timeout_s)
    if (magic := bytes(prefix[:8])) != b"\x89RLF\r\n\x1a\n":
        raise FrameError(f"the stream gave {magic!r} where a frame should start: the two sides are out of step")
    nbytes = int.from_bytes(prefix[16:24], "little")
    if nbytes < PREFIX_BYTES:
        raise FrameError(f"the frame says it has {nbytes} bytes; it cannot have fewer than {PREFIX_BYTES}")
    store = torch.empty(min(nbytes, max_nbytes), dtype=torch.uint8) if out is None else out
    target = cpu.memory_view(store)
    if nbytes > min(max_nbytes, target.nbytes):
        raise FrameError(f"the frame has {nbytes} bytes; this receiver takes at most {min(max_nbytes, target.nbytes)}")
    target[:PREFIX_BYTES] = prefix
    _read_exactly(connection, target[PREFIX_BYTES:nbytes], deadline, timeout_s)
    return decode(store)


def save(path: str | Path, mapping: Mapping[str, Value], *, checksum: bool = True, tag: int = 0) -> int:
    """Write a frame to a new or replaced file, atomically, and return its bytes."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    frame = encode(mapping, checksum=checksum, tag=tag)
    with partial.open("wb", buffering=0) as file:
        frame.send(file.fileno(), timeout_s=3600.0)
    partial.replace(path)
    return frame.nbytes


def load(path: str | Path, *, verify: bool = False) -> FrameView:
    """Map a file that ``save`` wrote and return views of it. Pages are private: writing to a view changes no file."""
    with Path(path).open("rb") as file:
        if not file.seek(0, 2):
            raise FrameError(f"{path} is empty: it is not a frame")
        return decode(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), verify=verify)


def _nest(value: Any) -> Decoded:
    if not isinstance(value, tuple):
        return value
    inner, *levels = cast("tuple[Any, ...]", value)
    for offsets in levels:
        inner = Ragged(inner, offsets)
    return inner


def _normalise(name: str, value: object) -> object:
    """Value as the native encoder takes it; `FrameError` with the reason if a frame cannot hold it."""
    if isinstance(value, memoryview):
        return memoryview(value.tobytes())
    if isinstance(value, torch.Tensor):
        if value.is_nested and value.layout == torch.jagged:
            return _plain(name, value.values()), _plain(name, cast("Any", value).offsets())
        return _plain(name, value)
    if not isinstance(value, tuple) or len(value) != 2:
        raise FrameError(
            f"{name!r} is a {type(value).__name__}; a frame holds tensors, (values, offsets) pairs and bytes"
        )
    inner, offsets = cast("tuple[Any, Any]", value)
    plain = _normalise(name, inner) if isinstance(inner, tuple) else _plain(name, inner)
    return Ragged(cast("Any", plain), _checked_offsets(name, plain, _plain(name, offsets)))


def _plain(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_nested:
        kind = f"a {value.layout} tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise FrameError(f"{name!r} holds {kind}; a frame holds strided tensors (and jagged ones as a whole value)")
    if value.device.type != "cpu" or value.dtype not in DTYPES or value.ndim > 32:
        raise FrameError(
            f"{name!r} is {value.ndim}-dimensional {value.dtype} on {value.device}; a frame holds CPU tensors of up to "
            "32 dimensions and of the dtypes in rl_csrc.frames.DTYPES: move or convert it first"
        )
    return plain_memory(value)


def _checked_offsets(name: str, inner: object, offsets: torch.Tensor) -> torch.Tensor:
    if isinstance(inner, Ragged) and isinstance(inner.values, Ragged):
        raise FrameError(f"{name!r} is nested three deep; ragged values have one or two levels of offsets")
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.ndim != 1 or not len(offsets):
        raise FrameError(
            f"{name!r} has {offsets.dtype} offsets {list(offsets.shape)}; they must be int32 or int64 [rows + 1]"
        )
    if isinstance(inner, torch.Tensor) and not inner.ndim:
        raise FrameError(f"{name!r} has 0-dimensional values; ragged values need a first dimension to cut")
    num_values = len(inner.offsets) - 1 if isinstance(inner, Ragged) else len(cast("torch.Tensor", inner))
    if int(offsets[0]) or int(offsets[-1]) != num_values or bool((offsets.diff() < 0).any()):
        raise FrameError(f"{name!r} has offsets that do not rise from 0 to the number of values, {num_values}")
    return offsets


def _read_exactly(connection: socket.socket, target: memoryview, deadline: float, timeout_s: float) -> None:
    received = 0
    before = connection.gettimeout()
    try:
        while received < target.nbytes:
            connection.settimeout(max(deadline - time.monotonic(), 1e-6))
            n = connection.recv_into(target[received:])
            if n == 0:
                raise PeerDiedError(
                    f"{_peer(connection)} closed the connection after {received} of {target.nbytes} bytes"
                )
            received += n
    except TimeoutError as error:
        raise DeadlineError(
            f"{_peer(connection)} sent {received} of {target.nbytes} bytes within {timeout_s} s: close the connection"
        ) from error
    finally:
        connection.settimeout(before)


def _peer(connection: socket.socket | int) -> str:
    if isinstance(connection, int):
        return f"file descriptor {connection}"
    try:
        return f"peer {connection.getpeername() or 'of a socket pair'}"
    except OSError:
        return "the peer"
