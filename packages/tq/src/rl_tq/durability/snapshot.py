"""A queue as it was at one moment, in a directory of the form that `file` serves: a journal and segment files.

The journal is replaced last, and atomically: whoever is killed while it writes leaves the snapshot that was there
before, and files that the next one removes.
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any, Self

import torch

from rl_tq.durability.journal import NAME, Journal
from rl_tq.errors import AddressError, QueueFullError, TransferQueueError
from rl_tq.memory.arena import PACKED_BYTES, SEGMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rl_tq.metadata.state import Record, State

_ALIGNMENT = 64


def write_snapshot(directory: Path, records: Sequence[Record], extents: Mapping[int, torch.Tensor]) -> None:
    """Write the records that make a state, and its extents, uint8 [n] each, to stable storage.

    Raises:
        AddressError: somebody writes or serves there.
        QueueFullError: the file system has no room; what was there before stays.
    """
    journal = Journal(directory)
    try:
        before = set(directory.glob("*.segment"))
        files: list[_File] = []
        try:
            places = _write_extents(directory, files, _alike(records), extents)
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
    """A segment file that is being written."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / f"{uuid.uuid4().hex}.segment"
        self.nbytes = 0
        self._file = self.path.open("xb", buffering=0)

    def append(self, memory: torch.Tensor) -> int:
        """Write an extent; returns where it begins."""
        start = self.nbytes + -self.nbytes % _ALIGNMENT
        for data in (memoryview(bytes(start - self.nbytes)), _buffer(memory)):
            left = data
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


def _alike(records: Iterable[Record]) -> dict[int, str]:
    """Extent to the partition that it was spilled for, or nothing: extents of one file are alike in that."""
    return {record[2]: record[1] if record[11] else "" for record in records if record[0] == "put"}


def _write_extents(
    directory: Path, files: list[_File], alike: Mapping[int, str], extents: Mapping[int, torch.Tensor]
) -> list[Record]:
    places: list[Record] = []
    shared: dict[str, _File] = {}
    known: dict[tuple[int, int], Record] = {}
    for number, memory in extents.items():
        same = known.get((memory.data_ptr(), len(memory)))
        if same is not None:  # one memory may be several extents
            places.append([same[0], number, *same[2:]])
            continue
        is_packed = len(memory) <= PACKED_BYTES
        file = shared.get(alike[number]) if is_packed else None
        if file is None or file.nbytes + len(memory) > SEGMENT_BYTES:
            if file is not None:
                file.finish()
            file = _File(directory)
            files.append(file)
            if is_packed:
                shared[alike[number]] = file
        start = file.append(memory)
        place = ["note_place", number, file.path.name, start, len(memory), is_packed]
        places.append(place)
        known[memory.data_ptr(), len(memory)] = place
        if not is_packed:
            file.finish()
    for file in shared.values():
        file.finish()
    return places


class Snapshot:
    """One that is read. Nobody else writes it meanwhile."""

    def __init__(self, directory: Path) -> None:
        """Open it.

        Raises:
            AddressError: there is none, or somebody writes or serves it.
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
        """What makes its state."""
        placed = [record for record in records if record[0] == "note_place"]
        if any(len(record) != 6 or type(record[1]) is not int for record in placed):
            self._journal.close()
            raise TransferQueueError(f"{directory} has a place that is none: the snapshot was damaged; take another")
        self.places: dict[int, list[Any]] = {record[1]: record[2:] for record in placed}
        """Extent to its file, offset, bytes, and whether it shares the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    def nbytes(self, file: str) -> int:
        """Size of a file."""
        return (self._directory / file).stat().st_size

    def read(self, file: str, start: int, out: torch.Tensor) -> None:
        """Fill uint8 [n] with what a file has from `start` on."""
        with (self._directory / file).open("rb") as opened:
            opened.seek(start)
            read = opened.readinto(_buffer(out))
        if read != len(out):
            raise AddressError(f"{self._directory / file} ends after {start + read} bytes: the snapshot was damaged")

    def where(self, number: int) -> tuple[str, int]:
        """File and offset of an extent; several numbers may stand for one."""
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


def spill_directory_of(state: State, extent: int) -> str | None:
    """Where an extent belongs, if in files."""
    held = state.extents[extent]
    options = state.options.get(held.partition)
    return options.spill_directory if held.is_spilled and options is not None else None
