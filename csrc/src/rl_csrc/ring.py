"""A ring of fixed-size slots in shared memory: one writer, and readers that each see every slot.

The memory is a memfd: it has no name in the file system, and the last process to let go of it frees it, however it
ended. Waiting sleeps on a futex; every wait has a deadline, and a peer that died is noticed within a tenth of a
second.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, cast

from rl_csrc import _cpu
from rl_csrc._sharing import receive_fd, send_fd
from rl_csrc.errors import ArgumentError, ClosedError, DeadlineError, PeerDiedError

if TYPE_CHECKING:
    import socket

    import torch

PAGE_BYTES = 4096


class ReaderStatus(StrEnum):
    """What the writer knows about a reader's place."""

    EXPECTED = "expected"
    """Counted on, not attached yet: slots are kept for it."""
    ATTACHED = "attached"
    EVICTED = "evicted"
    """Shut out by the writer while it was still alive."""
    JOINING = "joining"
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One reader as the writer sees it."""

    index: int
    """Its place in the ring, from 0."""
    status: ReaderStatus
    pid: int
    """Process id in the reader's own pid namespace; 0 if it never attached."""
    num_unread: int
    """Slots published that it has not released."""

    def __str__(self) -> str:
        who = f"pid {self.pid}" if self.pid else "never attached"
        return f"reader {self.index} ({who}, {self.num_unread} slots unread)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A published slot, valid until the reader releases it."""

    data: torch.Tensor
    """uint8 [nbytes], a view of the shared memory."""
    sequence: int
    """Slots published before this one."""
    tag: int
    """The writer's own 64-bit number."""


class RingWriter:
    """The writing end. One process, one thread.

    ``acquire`` a slot, fill it, ``publish`` it. A slot comes free again when every reader has released it. Readers
    attach through the descriptor: ``share`` sends it over a UNIX socket, and an inherited descriptor works as well.
    """

    def __init__(
        self, *, num_slots: int, slot_nbytes: int, num_readers: int = 1, name: str = "rl-ring", prefault: bool = True
    ) -> None:
        """Make a ring and reserve its memory (``OSError`` if the machine has not enough).

        Args:
            num_slots: 2 is double buffering.
            slot_nbytes: bytes of a slot, rounded up to whole pages.
            num_readers: readers that are waited for. Slots are kept for them from the first on, before they attach.
                More may
                join later (up to 64 in all) and get what is published after they did.
            name: shown in ``/proc/<pid>/maps``; need not be unique.
            prefault: touch every page now; the first touch of a page is many times slower than the later ones.
        """
        if num_slots < 1 or slot_nbytes < 1 or not 0 <= num_readers <= _cpu.max_ring_readers:
            raise ArgumentError(
                f"num_slots={num_slots}, slot_nbytes={slot_nbytes}, num_readers={num_readers}: a ring has at least one "
                f"slot of at least one byte, and 0 to {_cpu.max_ring_readers} readers"
            )
        self._slot_nbytes = slot_nbytes + -slot_nbytes % PAGE_BYTES
        self._native = _cpu.RingWriter(name, num_slots, self._slot_nbytes, num_readers, prefault)
        self._is_acquired = False

    @property
    def fd(self) -> int:
        """The memfd. Stays owned by this object."""
        return self._native.fd

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot, a multiple of 4096."""
        return self._slot_nbytes

    def share(self, connection: socket.socket) -> None:
        """Send the ring's descriptor to a reader over a UNIX socket (``RingReader.receive`` is the other end)."""
        send_fd(connection, self.fd)

    def acquire(self, *, timeout_s: float) -> torch.Tensor:
        """Wait for the next slot to be free and return its memory, uint8 [slot_nbytes].

        Raises ``DeadlineError`` that names the slowest reader, or ``PeerDiedError`` that names a dead one: ``evict``
        it to go on without it.
        """
        self._check(self._native.wait_slot(timeout_s), timeout_s, "free a slot")
        self._is_acquired = True
        return self._native.slot()

    def publish(self, nbytes: int, *, tag: int = 0) -> int:
        """Hand the acquired slot, of which ``nbytes`` count, to the readers. Returns its sequence number."""
        if not self._is_acquired:
            raise ArgumentError("publish was called without a slot: acquire one, fill it, then publish it once")
        if not 0 <= nbytes <= self._slot_nbytes:
            raise ArgumentError(f"nbytes is {nbytes}; a slot of this ring holds 0 to {self._slot_nbytes}")
        self._is_acquired = False
        return self._native.publish(nbytes, tag)

    def wait_drained(self, *, timeout_s: float) -> None:
        """Wait until every reader has released everything. Raises as ``acquire`` does."""
        self._check(self._native.wait_drained(timeout_s), timeout_s, "read everything")

    def readers(self) -> list[Reader]:
        """Return the readers that are expected, attached or evicted."""
        places = (self._reader(index) for index in range(_cpu.max_ring_readers))
        return [reader for reader in places if reader.status != ReaderStatus.FREE]

    def evict(self, index: int) -> None:
        """Go on without a reader. If its process lives, its next call raises ``ClosedError``."""
        self._native.evict(range(_cpu.max_ring_readers)[index])

    def close(self) -> None:
        """Say that nothing more will come. What was published stays readable. Collecting this object does it too."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reader(self, index: int) -> Reader:
        _, status, pid, tail = self._native.reader(index)
        return Reader(index=index, status=ReaderStatus(status), pid=pid, num_unread=max(self._native.head - tail, 0))

    def _check(self, outcome: tuple[str, int], timeout_s: float, what: str) -> None:
        kind, culprit = outcome
        if kind == "late":
            raise DeadlineError(
                f"{self._reader(culprit)} did not {what} within {timeout_s} s: wait longer, or evict it"
            )
        if kind == "died":
            raise PeerDiedError(f"{self._reader(culprit)} died: evict({culprit}) goes on without it")


class RingReader:
    """A reading end. ``next`` gives slots in order; ``release`` lets the writer use the oldest of them again."""

    def __init__(self, fd: int, *, prefault: bool = True) -> None:
        """Attach to the ring behind a descriptor (duplicated). ``ArgumentError`` if it holds none or is full."""
        try:
            self._native = _cpu.RingReader(fd, prefault)
        except (ValueError, RuntimeError) as error:
            raise ArgumentError(f"descriptor {fd} cannot be attached as a ring: {error}") from error

    @classmethod
    def receive(cls, connection: socket.socket, *, timeout_s: float, prefault: bool = True) -> Self:
        """Take the descriptor that ``RingWriter.share`` sends, and attach."""
        with receive_fd(connection, timeout_s=timeout_s) as fd:
            return cls(fd, prefault=prefault)

    @property
    def index(self) -> int:
        """This reader's place; -1 after ``detach``."""
        return self._native.index

    def next(self, *, timeout_s: float) -> Slot:
        """Wait for the next slot. Several may be held at a time, up to all of the ring.

        Raises ``DeadlineError`` or ``PeerDiedError`` naming the writer, and ``ClosedError`` once everything was read
        that was published before the writer closed, or if this reader was evicted.
        """
        found = self._native.next(timeout_s)
        if isinstance(found, tuple):
            data, sequence, tag = cast("tuple[Any, int, int]", found)
            return Slot(data=data, sequence=sequence, tag=tag)
        writer = f"the ring's writer (pid {self._native.writer_pid})"
        if found == "late":
            raise DeadlineError(
                f"{writer} published nothing within {timeout_s} s; it is alive: wait longer, or give up"
            )
        if found == "died":
            raise PeerDiedError(f"{writer} died; every slot it published was read")
        if self._native.is_evicted:
            raise ClosedError(f"{writer} evicted this reader ({self.index}): it was too slow; attach again to go on")
        raise ClosedError(f"{writer} closed the ring, or this reader detached: there is nothing more to read")

    def release(self) -> None:
        """Give the oldest slot that ``next`` returned back. Its view must not be read after that."""
        if not self._native.release():
            raise ArgumentError("release was called with no slot held: call it once for each slot that next returned")

    def detach(self) -> None:
        """Leave. Slots not read are let go. Also done when this object is collected."""
        self._native.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()
