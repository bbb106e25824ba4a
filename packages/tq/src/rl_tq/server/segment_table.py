"""Segment table: shared-memory segments, the extents in them, and the clients that may read each.

A segment has an owner, which puts extents into it, and readers, which were sent its descriptor. Once all its extents
are freed, every reader is notified, and releases it when none of its tensors shares the memory; the owner reuses it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from rl_csrc.ipc import SharedMemory
from rl_tq.errors import TransferQueueError
from rl_tq.memory.arena import create_segment
from rl_tq.memory.generations import ExtentGenerations

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    from rl_tq.durability import Snapshot
    from rl_tq.metadata.state import Record, State
    from rl_tq.protocol.service import Message


@dataclass(slots=True, eq=False, kw_only=True)
class Client:
    """Client of the segment table."""

    own: dict[int, int] = field(default_factory=dict[int, int])
    """The client's number of a segment that it owns, to the table's number."""
    known: set[int] = field(default_factory=set[int])
    """Segments whose descriptors it has."""


@dataclass(slots=True, kw_only=True)
class _Held:
    segment: SharedMemory
    is_packed: bool
    owner: Client | None
    """Client that puts into it; None: gone."""
    theirs: int
    """The owner's number of it."""
    file: str | None = None
    """File name, if it has one."""
    extents: dict[int, int] = field(default_factory=dict[int, int])
    """Extent number to its live bytes, the oldest first."""
    live_nbytes: int = 0
    """Live bytes of all extents."""
    put_nbytes: int = 0
    """Bytes put since it was empty."""
    is_sealed: bool = False
    readers: set[Client] = field(default_factory=set[Client])
    """Clients that may read it; once it is free, those that have not released it."""
    is_free: bool = False
    """Whether all extents are freed and the readers were notified."""


class SegmentTable:
    """Table of segments and extents. `send(client, message, segment)` sends a message, with a segment's descriptor."""

    def __init__(self, send: Callable[[Any, Message, SharedMemory | None], None], directory: Path | None) -> None:
        self._send = send
        self._directory = directory
        self._segments: dict[int, _Held] = {}
        self._extents: dict[int, tuple[int, int, int]] = {}
        """Extent number to (segment, offset, size in bytes)."""
        self._numbers = count(1)
        self.generations = ExtentGenerations()

    def close(self) -> None:
        """Free everything."""
        self.generations.end()
        self._segments.clear()

    # Putting

    def admit(self, member: Client, theirs: int, segment: SharedMemory, *, is_packed: bool, file: str | None) -> None:
        """Add a segment that a client created."""
        number = next(self._numbers)
        self._segments[number] = _Held(segment=segment, is_packed=is_packed, owner=member, theirs=theirs, file=file)
        member.own[theirs] = number

    def add(self, member: Client, theirs: int, offset: int, nbytes: int, *, is_last: bool) -> int:
        """Add an extent that a client wrote, and return its number.

        Raises:
            TransferQueueError: its segment never arrived, or the extent is outside the segment.
        """
        number = member.own.get(theirs)
        if number is None:
            raise TransferQueueError(
                f"the server (process {os.getpid()}) could not take the memory of this put: it has no file descriptor "
                f"left with {len(self._segments)} segments; clear rows, put more rows at once, or raise `ulimit -n`"
            )
        held = self._segments[number]
        held.is_free, held.is_sealed = False, is_last
        if not (offset >= 0 and nbytes > 0 and offset + nbytes <= held.segment.nbytes):
            self._free_if_done([number])
            raise TransferQueueError(f"an extent of {nbytes} bytes is not inside its segment")
        extent = next(self._numbers)
        self._extents[extent] = (number, offset, nbytes)
        held.extents[extent] = nbytes
        held.live_nbytes += nbytes
        held.put_nbytes += nbytes
        self.generations.open(extent)
        return extent

    def alias(self, extent: int) -> int:
        """Alias: second number for an extent's memory, which is freed with the last of them."""
        number = next(self._numbers)
        self._extents[number] = self._extents[extent]
        self._segments[self.segment_of(extent)].extents[number] = 0
        self.generations.open(number)
        return number

    def segment_of(self, extent: int) -> int:
        """Segment of an extent."""
        return self._extents[extent][0]

    def shrink(self, extent: int, live_nbytes: int) -> None:
        """Set the live bytes of an extent."""
        held = self._segments[self.segment_of(extent)]
        held.live_nbytes += live_nbytes - held.extents[extent]
        held.extents[extent] = live_nbytes

    def usage(self, number: int) -> tuple[Collection[int], int, int]:
        """Extents of a segment, the oldest first, its live bytes, and the bytes put since it was empty."""
        held = self._segments.get(number)
        return (
            (held.extents, held.live_nbytes, held.put_nbytes) if held is not None and not held.is_free else ((), 0, 0)
        )

    def ask_to_seal(self, number: int) -> None:
        """Ask the owner of a segment to seal it."""
        held = self._segments[number]
        if held.owner is not None and not held.is_sealed:
            self._send(held.owner, {"op": "fill no more", "segment": held.theirs}, None)

    def seal(self, member: Client, theirs: int) -> None:
        """Seal a segment: nothing more is put into it."""
        number = member.own[theirs]
        self._segments[number].is_sealed = True
        self._free_if_done([number])

    def retire(self, member: Client, theirs: int) -> None:
        """Note that the owner dropped a free segment."""
        number = member.own.pop(theirs)
        self._segments[number].owner = None
        self._drop_if_idle(number)

    # Looking

    def where(self, extent: int) -> list[int] | None:
        """Segment, offset, size, slot and generation of an extent: what a client needs to read it without a request."""
        generation = self.generations.of(extent)
        return None if generation is None else [*self._extents[extent], *generation]

    def announce(self, member: Client, extents: Iterable[int]) -> list[tuple[int, int, int, int]]:
        """(extent, segment, offset, size) of extents, after sending the client the segments that are new to it."""
        places = [(extent, *self._extents[extent]) for extent in extents]
        for number in {place[1] for place in places} - member.known:
            held = self._segments[number]
            self._send(member, {"op": "segment", "segment": number, "is_packed": held.is_packed}, held.segment)
            member.known.add(number)
            held.readers.add(member)
        return places

    def release(self, member: Client, numbers: Iterable[int]) -> None:
        """Note that a client no longer reads segments."""
        for number in numbers:
            held = self._segments.get(number)
            if held is not None and member in held.readers:
                held.readers.discard(member)
                if held.is_free:
                    self._drop_if_idle(number)

    def counts(self) -> Message:
        """Memory statistics."""
        return {
            "segments": sum(not held.is_free for held in self._segments.values()),
            "spare_segments": sum(held.is_free for held in self._segments.values()),
            "shared_bytes": sum(held.segment.nbytes for held in self._segments.values()),
            "resident_bytes": sum(held.segment.resident_nbytes for held in self._segments.values()),
        }

    # Freeing

    def free(self, extents: Iterable[int]) -> None:
        """Free extents without rows."""
        touched: set[int] = set()
        for extent in extents:
            number, _, _ = self._extents.pop(extent)
            self.generations.close(extent)
            held = self._segments[number]
            held.live_nbytes -= held.extents.pop(extent)
            touched.add(number)
        self._free_if_done(touched)

    def leave(self, member: Client) -> None:
        """Remove a client that left. Its extents stay."""
        for number in member.own.values():
            self._segments[number].owner = None
            self._segments[number].is_sealed = True
        self.release(member, list(self._segments))
        self._free_if_done([*member.own.values()])

    def _free_if_done(self, numbers: Iterable[int]) -> None:
        """Free sealed segments without extents: notify their readers."""
        for number in numbers:
            held = self._segments.get(number)
            if held is None or held.is_free or not held.is_sealed or held.extents:
                continue
            held.is_free = True
            held.put_nbytes = 0
            for reader in held.readers:
                reader.known.discard(number)
                self._send(reader, {"op": "freed", "segments": [number]}, None)
            self._drop_if_idle(number)

    def _drop_if_idle(self, number: int) -> None:
        """Return a free segment without readers to its owner; delete it if the owner is gone."""
        held = self._segments.get(number)
        if held is None or not held.is_free or held.readers:
            return
        if held.owner is not None:
            self._send(held.owner, {"op": "reuse", "segment": held.theirs}, None)
        else:
            if self._directory is not None and held.file is not None:
                (self._directory / held.file).unlink(missing_ok=True)
            del self._segments[number]

    # Journal and recovery

    def record(self, extent: int) -> Record:
        """Journal record of the place of an extent."""
        number, offset, nbytes = self._extents[extent]
        held = self._segments[number]
        return ["note_place", extent, held.file, offset, nbytes, held.is_packed]

    def records(self) -> Iterator[Record]:
        """Journal records of the places of all extents."""
        return map(self.record, self._extents)

    def reopen(self, state: State, places: dict[int, list[Any]]) -> None:
        """Recover the extents of a state from the files of an earlier server, and delete its other files."""
        directory = self._directory
        assert directory is not None
        self._take(
            {extent: places[extent] for extent in state.extents}, max(places, default=0),
            lambda file: (SharedMemory(os.open(directory / file, os.O_RDWR | os.O_CLOEXEC)), file),
        )  # fmt: skip
        kept = {directory / held.file for held in self._segments.values() if held.file is not None}
        for path in directory.glob("*.segment"):
            if path not in kept:
                path.unlink()

    def restore(self, state: State, snapshot: Snapshot) -> None:
        """Restore the extents of a state from a snapshot, into memory or files of this queue."""
        places = {number: snapshot.places[number] for number in state.extents}

        def make(file: str) -> tuple[SharedMemory, str | None]:
            segment, own = create_segment(self._directory, snapshot.nbytes(file))
            snapshot.read(file, 0, segment.map(is_shared=True))
            return segment, own

        self._take(places, max(snapshot.places, default=0), make)

    def _take(
        self, places: dict[int, list[Any]], last_number: int, make: Callable[[str], tuple[SharedMemory, str | None]]
    ) -> None:
        """Add extents from files; `make(file)` returns a segment with the file's content, and its own file name."""
        by_file: dict[str, int] = {}
        for extent, (file, offset, nbytes, is_packed) in places.items():
            if file not in by_file:
                number = by_file[file] = last_number + len(by_file) + 1
                segment, own = make(file)
                self._segments[number] = _Held(
                    segment=segment, is_packed=is_packed, owner=None, theirs=0, file=own, is_sealed=True
                )
            self._extents[extent] = (by_file[file], offset, nbytes)
            self.generations.open(extent)
            held = self._segments[by_file[file]]
            held.extents[extent] = nbytes
            held.live_nbytes += nbytes
            held.put_nbytes = held.segment.nbytes
        self._numbers = count(last_number + len(by_file) + 1)
