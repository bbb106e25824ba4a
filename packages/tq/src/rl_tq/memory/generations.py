"""Generation numbers of extents, in memory shared by server and clients, by which stale locations are recognized.

The server changes an extent's number when any of its rows is cleared or moved, before it replies. A client whose
location has another number asks the server again.
"""

from __future__ import annotations

import secrets

from rl_csrc.ipc import SharedMemory

NUM_GENERATIONS = 1 << 16
_WORD_BYTES = 8


class ExtentGenerations:
    """Generation numbers at the server: one per extent, in memory that clients can read."""

    def __init__(self) -> None:
        self.memory = SharedMemory.create(_WORD_BYTES * NUM_GENERATIONS, name="rl-generations")
        self._words = self.memory.words(is_writable=True)
        # A random start, so that numbers of another server, or of this one before a restart, do not match.
        self._next = secrets.randbits(62)
        self._free = list(range(NUM_GENERATIONS - 1, -1, -1))
        self._slots: dict[int, int] = {}

    def open(self, extent: int) -> None:
        """Assign a generation number to a new extent, if there is a free slot."""
        if self._free:
            self._slots[extent] = self._free.pop()
            self.change(extent)

    def change(self, extent: int) -> None:
        """Invalidate every location of an extent."""
        slot = self._slots.get(extent)
        if slot is not None:
            self._next += 1
            self._words[slot] = self._next

    def close(self, extent: int) -> None:
        """Invalidate the locations of a freed extent, and free its slot."""
        self.change(extent)
        slot = self._slots.pop(extent, None)
        if slot is not None:
            self._free.append(slot)

    def of(self, extent: int) -> tuple[int, int] | None:
        """Slot and generation of an extent; None if it has none."""
        slot = self._slots.get(extent)
        return None if slot is None else (slot, self._words[slot])

    def end(self) -> None:
        """Invalidate all locations, as the queue is closed."""
        for extent in list(self._slots):
            self.close(extent)
        self.memory.close()


class GenerationReader:
    """Generation numbers as a client reads them."""

    def __init__(self, fd: int) -> None:
        memory = SharedMemory.attach(fd, nbytes=_WORD_BYTES * NUM_GENERATIONS)
        self._words = memory.words()
        memory.close()

    def is_valid(self, slot: int, generation: int) -> bool:
        """Whether nothing of the extent was cleared since it had this generation."""
        return 0 <= slot < NUM_GENERATIONS and self._words[slot] == generation
