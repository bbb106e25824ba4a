"""Inter-process communication on one Linux host: UNIX sockets, peer credentials, descriptor passing, sealed memory.

Nothing here has a name in the file system: a socket's name and a memfd vanish with the last process that holds them,
so that not even SIGKILL leaves anything behind. Formats of messages are the callers' business.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import socket
import struct
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rl_csrc.errors import ArgumentError
from rl_csrc.native import cpu

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_MAX_NAME_BYTES = 107
"""sizeof(sun_path) - 1: the first byte of an abstract name is 0 (unix(7))."""
_CREDENTIALS = struct.Struct("iII")
"""struct ucred of SO_PEERCRED."""
_FD_BYTES = 4
_ONE_FD_SPACE = socket.CMSG_SPACE(_FD_BYTES)
# As plain integers: the arithmetic of enumerations takes longer than the call.
_RECEIVE_FLAGS = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNCATED = int(socket.MSG_CTRUNC)
_SEALS = 0x1 | 0x2 | 0x4
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW: a mapping can never run past the end of the memory."""
_MADV_POPULATE_WRITE = 23

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


# Sockets in the abstract namespace


class Credentials(NamedTuple):
    """Peer credentials of a UNIX socket as the kernel recorded them at `connect` or `listen` (unix(7))."""

    pid: int
    uid: int
    """Effective user id."""
    gid: int

    @property
    def is_same_user(self) -> bool:
        """Whether the peer runs as this process's user."""
        return self.uid == os.geteuid()


def peer_credentials(connection: socket.socket) -> Credentials:
    """Process, user and group of the other end of a connected UNIX socket (SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Credentials(*_CREDENTIALS.unpack(raw))


def bind(name: str) -> socket.socket:
    """Bind an abstract name; return a non-blocking stream socket, closed in children, that does not listen yet.

    Connections are refused until `listen` is called, so a server can finish its setup first.

    Raises:
        OSError: another process holds the name (`EADDRINUSE`).
        ArgumentError: the name has more than 107 bytes.
    """
    listener = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        listener.bind(_abstract(name))
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def accept(listener: socket.socket) -> tuple[socket.socket, Credentials] | None:
    """Accept the next connection, non-blocking and closed in children, with its credentials; None if there is none.

    Any process in the network namespace can connect: check `is_same_user` before reading.

    Raises:
        OSError: the process (`EMFILE`) or the system (`ENFILE`) is out of file descriptors.
    """
    try:
        connection, _ = listener.accept()
    except (BlockingIOError, InterruptedError, ConnectionAbortedError):
        return None
    connection.setblocking(False)
    return close_in_children(connection), peer_credentials(connection)


def connect(name: str, *, timeout_s: float | None = None) -> tuple[socket.socket, Credentials]:
    """Connect to an abstract name; return the socket, closed in children, and the listener's credentials.

    Without `timeout_s` the socket is non-blocking and the call does not wait. With it the socket blocks, and neither
    connecting nor any later send waits longer.

    Raises:
        ConnectionRefusedError: nothing listens at that name.
        BlockingIOError: the backlog of the listener is full.
        PermissionError: the listener is a process of another user.
        ArgumentError: the name has more than 107 bytes.
    """
    connection = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        if timeout_s is None:
            connection.setblocking(False)
        else:
            limit_sends(connection, timeout_s)
        connection.connect(_abstract(name))
        peer = peer_credentials(connection)
        if not peer.is_same_user:
            raise PermissionError(
                errno.EACCES,
                f"process {peer.pid} of user {peer.uid} listens at {name!r}, and this process is user {os.geteuid()}'s",
            )
    except BaseException:
        connection.close()
        raise
    return connection, peer


def limit_sends(connection: socket.socket, timeout_s: float) -> None:
    """Set the deadline of blocking sends and of a UNIX `connect` (SO_SNDTIMEO), at least a millisecond."""
    timeout_s = max(timeout_s, 1e-3)  # 0 means no deadline to the kernel
    packed = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)


def receive_into(connection: socket.socket, buffer: memoryview, *, max_fds: int = 1) -> tuple[int, list[int], bool]:
    """Receive once: bytes read (0: the peer closed), file descriptors received (SCM_RIGHTS), whether some were dropped.

    The caller owns the descriptors; they are closed on exec. The kernel drops those beyond `max_fds` and those for
    which the process has no free slot. The counterpart is `socket.send_fds`.

    Raises:
        BlockingIOError, OSError: as `recvmsg` does.
    """
    space = _ONE_FD_SPACE if max_fds == 1 else socket.CMSG_SPACE(max_fds * _FD_BYTES)
    size, ancillary, flags, _ = connection.recvmsg_into([buffer], space, _RECEIVE_FLAGS)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(data) // _FD_BYTES
            fds += struct.unpack(f"{count}i", data[: count * _FD_BYTES])
    return size, fds, bool(flags & _TRUNCATED)


_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_HOOKS: list[bool] = []


def close_in_children(connection: socket.socket) -> socket.socket:
    """Have this socket closed in every child that is forked from now on; returns the socket.

    A copy in a child would hide this process's death from its peers.
    """
    if not _HOOKS:
        _HOOKS.append(True)
        os.register_at_fork(after_in_child=_close_all)
    _SOCKETS.add(connection)
    return connection


def _close_all() -> None:
    for connection in list(_SOCKETS):
        connection.close()
    _SOCKETS.clear()


def _abstract(name: str) -> str:
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise ArgumentError(
            f"the socket name {name!r} has {len(name.encode())} bytes; at most {_MAX_NAME_BYTES} are possible"
        )
    return f"\0{name}"


def send_now(connection: socket.socket, data: memoryview | bytes) -> int:
    """Send what a socket takes at once. Keeps the interpreter lock, which a thread that computes may hold for 5 ms.

    Raises:
        BlockingIOError, OSError: as `send` does.
    """
    return cpu.send_now(connection.fileno(), data)


def receive_now(connection: socket.socket) -> bytes:
    """Receive available bytes, 64 KiB at most; empty at the end of the stream. Holds the lock as `send_now` does.

    Raises:
        BlockingIOError, OSError: as `recv` does.
    """
    return cpu.receive_now(connection.fileno())


class Waker:
    """Self-pipe to wake a thread from `poll`: readable from `wake` to `clear`. Thread-safe; closed in children."""

    def __init__(self) -> None:
        self._reader, self._writer = map(close_in_children, socket.socketpair())
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Descriptor to poll for reading."""
        return self._reader.fileno()

    def writer_fileno(self) -> int:
        """Descriptor to which a native thread sends a byte to wake."""
        return self._writer.fileno()

    def wake(self) -> None:
        """Make it readable. Publish data for the other thread first."""
        with contextlib.suppress(BlockingIOError):  # the socket is full, so it is readable already
            send_now(self._writer, b"!")

    def clear(self) -> None:
        """Consume every `wake` so far. Look for data after this call, not before."""
        with contextlib.suppress(BlockingIOError):
            while receive_now(self._reader):
                pass

    def close(self) -> None:
        """Free the descriptors. Idempotent."""
        self._reader.close()
        self._writer.close()


# Shared memory, passed between processes by file descriptor

_BEFORE_UNMAP: dict[int, Callable[[], object] | None] = {}
"""Address of each mapping, and the callback to run before it is unmapped."""


class SharedMemory:
    """Shared memory of a fixed size: a sealed memfd, or a file. Mappings outlive this object and its descriptor.

    Args:
        fd: File descriptor, owned by this object and closed with it. It is not checked; `attach` checks it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        self._close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, nbytes: int, *, name: str = "rl-csrc") -> SharedMemory:
        """Create a memfd of `nbytes` zeros, sealed against resizing; no page is touched yet. `name` is shown in /proc.

        Raises:
            OSError: the system refuses.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        memory = cls._sized(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return memory

    @classmethod
    def create_file(cls, path: Path, nbytes: int) -> SharedMemory:
        """Create a new file of `nbytes` zeros, for this user only. Files have no seals; it must not exist yet."""
        return cls._sized(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), nbytes)

    @classmethod
    def attach(cls, fd: int, *, nbytes: int) -> SharedMemory:
        """Take a descriptor received from another process, after checking it: reads of memory that shrinks are SIGBUS.

        Raises:
            ArgumentError: it is not memory of `nbytes` bytes sealed against shrinking; it was closed.
        """
        memory = cls(fd)
        try:
            is_sealed = bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:  # no memfd
            is_sealed = False
        if is_sealed and memory.nbytes == nbytes > 0:
            return memory
        found = f"{'sealed' if is_sealed else 'unsealed'} memory of {memory.nbytes} bytes"
        memory.close()
        raise ArgumentError(f"the descriptor is {found}; expected sealed memory of {nbytes}")

    @property
    def resident_nbytes(self) -> int:
        """Allocated size in bytes, in memory or on disk: the pages that were written."""
        return 512 * os.fstat(self.fd).st_blocks

    def map(self, *, is_shared: bool = True, when_gone: Callable[[], None] | None = None) -> torch.Tensor:
        """Map the memory as a tensor, uint8 [nbytes]; it is unmapped when the last tensor that shares it is destroyed.

        With `is_shared`, writes are visible to every process; otherwise they are private to this mapping (copy on
        write). `when_gone` is called, in any thread, after the unmapping.

        Raises:
            OSError: the system refuses.
        """
        kind = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE
        return torch.frombuffer(self._map(mmap.PROT_READ | mmap.PROT_WRITE, kind, when_gone), dtype=torch.uint8)

    def words(self, *, is_writable: bool = False) -> memoryview:
        """Map the memory as shared unsigned 64-bit integers, for counters and generations that change atomically.

        Without `is_writable` the mapping is read-only.

        Raises:
            ArgumentError: the size is no multiple of 8.
            OSError: the system refuses.
        """
        if self.nbytes % 8:
            raise ArgumentError(f"{self.nbytes} bytes are not a whole number of 64-bit words; make the memory larger")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        words = memoryview(self._map(protection, mmap.MAP_SHARED, None)).cast("B").cast("Q")
        return words if is_writable else words.toreadonly()

    def close(self) -> None:
        """Close the descriptor now. Idempotent."""
        self._close()

    @classmethod
    def _sized(cls, fd: int, nbytes: int) -> SharedMemory:
        try:
            os.ftruncate(fd, nbytes)
        except OSError:
            os.close(fd)
            raise
        return cls(fd)

    def _map(self, protection: int, kind: int, when_gone: Callable[[], None] | None) -> Any:
        # The mmap of Python (before 3.13) keeps a descriptor per mapping, of which a process has few.
        address = _LIBC.mmap(None, self.nbytes, protection, kind, self.fd, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"mapping {self.nbytes} bytes of shared memory failed: {os.strerror(number)}")
        _BEFORE_UNMAP[address] = None
        mapping = (ctypes.c_uint8 * self.nbytes).from_address(address)
        weakref.finalize(mapping, _unmap, address, self.nbytes, when_gone).atexit = False
        return mapping


def before_unmap(address: int, work: Callable[[], object] | None) -> bool:
    """Set the callback to run before the mapping at an address is unmapped; False if there is no such mapping."""
    if address not in _BEFORE_UNMAP:
        return False
    _BEFORE_UNMAP[address] = work
    return True


def _unmap(address: int, nbytes: int, when_gone: Callable[[], None] | None) -> None:
    work = _BEFORE_UNMAP.pop(address)
    if work is not None:
        work()
    _LIBC.munmap(address, nbytes)
    if when_gone is not None:
        when_gone()


def populate(address: int, nbytes: int) -> None:
    """Allocate the pages of mapped memory now (MADV_POPULATE_WRITE, Linux 5.14; a no-op on older kernels).

    Otherwise the first write to a page that a full file system cannot provide is a SIGBUS.

    Raises:
        OSError: there is not enough memory for all of it (`ENOSPC`).
    """
    first = address - address % mmap.PAGESIZE
    if nbytes <= 0 or _LIBC.madvise(first, address + nbytes - first, _MADV_POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL:
        raise OSError(errno.ENOSPC, f"no room for {nbytes} bytes of memory more: {os.strerror(number)}")


def discard_writes(memory: torch.Tensor) -> None:
    """Discard the private pages of a copy-on-write mapping: it shows the shared contents again.

    Raises:
        ArgumentError: the tensor does not start and end at a page.
    """
    if memory.data_ptr() % mmap.PAGESIZE or memory.nbytes % mmap.PAGESIZE:
        raise ArgumentError(f"{memory.nbytes} bytes at {memory.data_ptr():#x} are not whole pages of {mmap.PAGESIZE}")
    if _LIBC.madvise(memory.data_ptr(), memory.nbytes, mmap.MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"discarding {memory.nbytes} bytes failed: {os.strerror(number)}")
