"""Durability: the journal of a queue's bookkeeping, and snapshots, on disk.

A journal is a file of records, one JSON array per line; replaying it gives the same state. Records are appended before
the reply to a change is sent, all changes of one server turn in one write. It survives the death of every process, but
is not synced: a power failure may lose its end.

A snapshot is a synced directory in the format that `file` serves: a journal and segment files. The journal is replaced
last, atomically: a process killed while writing leaves the previous snapshot, and files that the next one removes.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch

from rl_tq.errors import AddressError, QueueFullError, TransferQueueError
from rl_tq.memory.arena import PACKED_BYTES, SEGMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from pathlib import Path

    from rl_tq.metadata.state import Record

NAME = "journal"
VERSION = 3
_COMPACT_BYTES = 32 << 20
_RESERVE_BYTES = 1 << 20
_KEEP_SIZE = 1
_LIBC = ctypes.CDLL(None)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


@contextmanager
def _naming(path: Path) -> Generator[None]:
    """Name the file in the error of a failed write, which the operating system leaves out."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


class Journal:
    """Journal of one directory, locked by one process at a time."""

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
        """Complete records of the journal; a partial last line, left by a process that died, is dropped.

        Raises:
            TransferQueueError: the journal is damaged before its end, or of another version.
        """
        path = self.directory / NAME
        data = path.read_bytes() if path.exists() else b""
        end = data.rfind(b"\n") + 1
        records: list[Record] = []
        for number, line in enumerate(data[:end].splitlines(), 1):
            try:
                record = json.loads(line)
                if not isinstance(record, list) or not record or not isinstance(record[0], str):
                    raise ValueError("it is not a list that begins with a name")
                records.append(record)
            except (ValueError, RecursionError) as error:
                raise TransferQueueError(
                    f"line {number} of {path} is not a record ({error}): the file was damaged; serve an earlier copy "
                    "or another directory"
                ) from error
        if records and records[0] != ["version", VERSION]:
            raise TransferQueueError(f"{path} begins with {records[0]!r}; this rl-tq reads version {VERSION}")
        return records[1:]

    def rewrite(self, records: Iterable[Record], *, is_synced: bool = False) -> None:
        """Replace the journal with the records of a state, atomically; with `is_synced`, also against power failure."""
        path, partial = self.directory / NAME, self.directory / f"{NAME}.partial"
        if self._fd < 0 and path.exists():  # release space that a writer which died had reserved
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
        except OSError as error:
            error.filename = error.filename or str(partial)
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
        """Append records, in one write."""
        data = memoryview(_lines(records))
        self._nbytes += len(data)
        self._reserve()
        with _naming(self.directory / NAME):
            while data:
                data = data[os.write(self._fd, data) :]

    def _reserve(self) -> None:
        """Reserve disk space for later records, so that a full file system can still record the clears that free it."""
        if self._reserved - self._nbytes < _RESERVE_BYTES // 2:
            wanted = max(self._nbytes, self._reserved) + _RESERVE_BYTES
            if _LIBC.fallocate(self._fd, _KEEP_SIZE, self._reserved, wanted - self._reserved) == 0:
                self._reserved = wanted

    def shorten(self, records: Callable[[], Iterable[Record]]) -> None:
        """Compact the journal once most of it is obsolete; if there is no space for that, retry much later."""
        if self._nbytes > _COMPACT_BYTES + 4 * self._compacted_nbytes:
            try:
                self.rewrite(records())
            except OSError:
                self._compacted_nbytes = self._nbytes

    def close(self) -> None:
        """Close the files and release the lock on the directory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _lines(records: Iterable[Record]) -> bytes:
    return "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records).encode()


_ALIGNMENT = 64


def write_snapshot(directory: Path, records: Sequence[Record], extents: Mapping[int, torch.Tensor]) -> None:
    """Write a snapshot: the records of a state and its extents, uint8 [n] each, synced to disk.

    Raises:
        AddressError: another process writes or serves in that directory.
        QueueFullError: the file system has no room; what was there before stays.
    """
    journal = Journal(directory)
    try:
        before = set(directory.glob("*.segment"))
        files: list[_File] = []
        try:
            places = _write_extents(directory, files, extents)
            journal.rewrite([*records, *places], is_synced=True)
        except OSError as error:
            for file in files:
                file.discard()
            raise QueueFullError(
                f"a snapshot of {sum(map(len, extents.values()))} bytes could not be written to {directory}: "
                f"{error.strerror}; what was there before is as it was"
            ) from error
        for path in before:
            path.unlink()
    finally:
        journal.close()


class _File:
    """Segment file of a snapshot being written."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / f"{uuid.uuid4().hex}.segment"
        self.nbytes = 0
        self._file = self.path.open("xb", buffering=0)

    def append(self, memory: torch.Tensor) -> int:
        """Append an extent; returns its offset in the file."""
        start = self.nbytes + -self.nbytes % _ALIGNMENT
        for data in (memoryview(bytes(start - self.nbytes)), _buffer(memory)):
            left = data
            with _naming(self.path):
                while left:
                    left = left[self._file.write(left) :]
        self.nbytes = start + len(memory)
        return start

    def finish(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        self._file.close()
        self.path.unlink()


def _write_extents(directory: Path, files: list[_File], extents: Mapping[int, torch.Tensor]) -> list[Record]:
    places: list[Record] = []
    shared: _File | None = None
    known: dict[tuple[int, int], Record] = {}
    for number, memory in extents.items():
        same = known.get((memory.data_ptr(), len(memory)))
        if same is not None:  # several extents may alias one memory
            places.append([same[0], number, *same[2:]])
            continue
        is_packed = len(memory) <= PACKED_BYTES
        file = shared if is_packed else None
        if file is None or file.nbytes + len(memory) > SEGMENT_BYTES:
            if file is not None:
                file.finish()
            file = _File(directory)
            files.append(file)
            if is_packed:
                shared = file
        start = file.append(memory)
        place = ["note_place", number, file.path.name, start, len(memory), is_packed]
        places.append(place)
        known[memory.data_ptr(), len(memory)] = place
        if not is_packed:
            file.finish()
    if shared is not None:
        shared.finish()
    return places


class Snapshot:
    """Snapshot opened for reading; locked against writers."""

    def __init__(self, directory: Path) -> None:
        """Open the snapshot in a directory.

        Raises:
            AddressError: there is none, or another process writes or serves it.
            TransferQueueError: it is damaged.
        """
        if not (directory / NAME).exists():
            raise AddressError(f"{directory} holds no snapshot: give the directory that snapshot() wrote")
        self._directory = directory
        self._journal = Journal(directory)
        try:
            records = self._journal.load()
        except BaseException:
            self._journal.close()
            raise
        self.records = [record for record in records if record[0] != "note_place"]
        """Records of its state."""
        placed = [record for record in records if record[0] == "note_place"]
        if any(len(record) != 6 or type(record[1]) is not int for record in placed):
            self._journal.close()
            raise TransferQueueError(f"{directory} has a place that is none: the snapshot was damaged; take another")
        self.places: dict[int, list[Any]] = {record[1]: record[2:] for record in placed}
        """Extent number to [file, offset, size in bytes, whether the file is shared]."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    def nbytes(self, file: str) -> int:
        """Size of a file."""
        return (self._directory / file).stat().st_size

    def read(self, file: str, start: int, out: torch.Tensor) -> None:
        """Fill `out`, uint8 [n], with the bytes of a file from `start` on."""
        with (self._directory / file).open("rb") as opened:
            opened.seek(start)
            read = opened.readinto(_buffer(out))
        if read != len(out):
            raise AddressError(f"{self._directory / file} ends after {start + read} bytes: the snapshot was damaged")

    def where(self, number: int) -> tuple[str, int]:
        """File and offset of an extent; aliased extents have the same."""
        file, start, *_ = self.places[number]
        return file, start

    def extent(self, number: int) -> torch.Tensor:
        """A copy of an extent, uint8 [n]."""
        file, start, nbytes, _ = self.places[number]
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self.read(file, start, memory)
        return memory


def _buffer(memory: torch.Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)
