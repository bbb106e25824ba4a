"""Generation numbers of extents, in memory that server and clients share: whether a location is still good.

Each extent has a number, which the server changes when any of its rows is cleared or moved and before that is answered:
a location that says another number is asked for anew.
"""

from __future__ import annotations

import secrets

from rl_csrc.ipc import SharedMemory

NUM_GENERATIONS = 1 << 16
_WORD_BYTES = 8


class ExtentGenerations:
    """The server's end: one number per extent, in memory that clients can read."""

    def __init__(self) -> None:
        self.memory = SharedMemory.create(_WORD_BYTES * NUM_GENERATIONS, name="rl-generations")
        self._words = self.memory.words(is_writable=True)
        # Numbers that no other server, nor this one before it was started again, is likely to have given.
        self._next = secrets.randbits(62)
        self._free = list(range(NUM_GENERATIONS - 1, -1, -1))
        self._slots: dict[int, int] = {}

    def open(self, extent: int) -> None:
        """Give a new extent a generation, if there is one left."""
        if self._free:
            self._slots[extent] = self._free.pop()
            self.change(extent)

    def change(self, extent: int) -> None:
        """Have every location that names an extent be noticed as old."""
        slot = self._slots.get(extent)
        if slot is not None:
            self._next += 1
            self._words[slot] = self._next

    def close(self, extent: int) -> None:
        """An extent is freed."""
        self.change(extent)
        slot = self._slots.pop(extent, None)
        if slot is not None:
            self._free.append(slot)

    def of(self, extent: int) -> tuple[int, int] | None:
        """Slot and generation of an extent; None if it has none."""
        slot = self._slots.get(extent)
        return None if slot is None else (slot, self._words[slot])

    def end(self) -> None:
        """The queue is closed: no location is good any more."""
        for extent in list(self._slots):
            self.close(extent)
        self.memory.close()


class GenerationReader:
    """A client's end."""

    def __init__(self, fd: int) -> None:
        memory = SharedMemory.attach(fd, nbytes=_WORD_BYTES * NUM_GENERATIONS)
        self._words = memory.words()
        memory.close()

    def is_valid(self, slot: int, generation: int) -> bool:
        """Whether nothing of the extent was cleared since it had this generation."""
        return 0 <= slot < NUM_GENERATIONS and self._words[slot] == generation
