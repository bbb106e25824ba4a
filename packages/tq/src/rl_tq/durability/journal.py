"""A queue's bookkeeping on disk: a file of records, one JSON array per line, that gives the same state when replayed.

Appended to before whoever asked for a change is answered, all changes of one turn of the server in one write. What was
written survives the death of every process; nothing is synced, so a machine that loses power may lose the last of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
from typing import TYPE_CHECKING

from rl_tq.errors import AddressError, TransferQueueError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from rl_tq.metadata.state import Record

NAME = "journal"
VERSION = 1
_COMPACT_BYTES = 32 << 20
_RESERVE_BYTES = 1 << 20
_KEEP_SIZE = 1
_LIBC = ctypes.CDLL(None)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class Journal:
    """The journal of one directory. One process at a time has it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_fd)
            raise AddressError(
                f"{directory} is served by another process: close that queue, or take another directory"
            ) from error
        self._fd = -1
        self._nbytes = self._compacted_nbytes = self._reserved = 0

    def load(self) -> list[Record]:
        """Every record that was written whole; what a process that died left half written at the end is cut off.

        Raises:
            TransferQueueError: the journal is damaged before its end, or of another version.
        """
        path = self.directory / NAME
        data = path.read_bytes() if path.exists() else b""
        end = data.rfind(b"\n") + 1
        records: list[Record] = []
        for number, line in enumerate(data[:end].splitlines(), 1):
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise TransferQueueError(
                    f"line {number} of {path} is no record ({error}): the file was damaged; serve a copy from before, "
                    "or another directory"
                ) from error
        if records and records[0] != ["version", VERSION]:
            raise TransferQueueError(f"{path} begins with {records[0]!r}; this rl-tq reads version {VERSION}")
        return records[1:]

    def rewrite(self, records: Iterable[Record], *, is_synced: bool = False) -> None:
        """Replace the journal by the records of a state, at once or not at all; if synced, also when power is lost."""
        path, partial = self.directory / NAME, self.directory / f"{NAME}.partial"
        if self._fd < 0 and path.exists():  # its writer died, and the room that it kept may be all there is
            os.truncate(path, path.stat().st_size)
        try:
            with partial.open("wb") as file:
                file.write(_lines([["version", VERSION]]))
                for record in records:
                    file.write(_lines([record]))
                if is_synced:
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        if is_synced:
            directory_fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.fsync(directory_fd)
            os.close(directory_fd)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._nbytes = self._compacted_nbytes = os.fstat(self._fd).st_size
        self._reserved = self._nbytes
        self._reserve()

    def append(self, records: Iterable[Record]) -> None:
        """Write records after the others, in one call."""
        data = memoryview(_lines(records))
        self._nbytes += len(data)
        self._reserve()
        while data:
            data = data[os.write(self._fd, data) :]

    def _reserve(self) -> None:
        """Keep room for records that follow, so that a file system full of values still takes what clears them."""
        if self._reserved - self._nbytes < _RESERVE_BYTES // 2:
            wanted = max(self._nbytes, self._reserved) + _RESERVE_BYTES
            if _LIBC.fallocate(self._fd, _KEEP_SIZE, self._reserved, wanted - self._reserved) == 0:
                self._reserved = wanted

    def shorten(self, records: Callable[[], Iterable[Record]]) -> None:
        """Once most of it is history, replace it by the records of the state; where they have no room, much later."""
        if self._nbytes > _COMPACT_BYTES + 4 * self._compacted_nbytes:
            try:
                self.rewrite(records())
            except OSError:
                self._compacted_nbytes = self._nbytes

    def close(self) -> None:
        """Let go of the directory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _lines(records: Iterable[Record]) -> bytes:
    return "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records).encode()
