"""Values in files instead of memory: for partitions that are told to spill.

The files of a queue whose processes it does not outlive lose their name before anything is written, so that nothing is
left however a process ends. Those of a queue that outlives its processes (`file`) are named after its directory, and a
server that takes it up removes those that its journal does not name: what a process that died had not put.
"""

from __future__ import annotations

import hashlib
import uuid
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from rl_tq._backing import back
from rl_tq._segments import MEMORY, Arena, Block, Segment, Source, files_of
from rl_tq.errors import QueueFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


def source_of(directory: Path | None, spill: str | None) -> Source:
    """Where values lie: those that are spilled, or those of the queue of a directory, or of none."""
    if spill is not None:
        return _spilling(Path(spill), directory)
    return files_of(directory) if directory is not None else MEMORY


class Arenas:
    """A client's arena, and another one for each directory that it spills to. Thread-safe, as an `Arena`."""

    def __init__(
        self,
        announce: Callable[[int, Segment, bool, str | None], None],
        seal: Callable[[int], None],
        retire: Callable[[int], None],
        directory: Path | None,
    ) -> None:
        numbers = count(1)
        self._open: Callable[[Source], Arena] = lambda source: Arena(announce, seal, retire, source, numbers)
        self._directory = directory
        self._arenas: dict[str | None, Arena] = {None: self._open(source_of(directory, None))}

    def allocate(self, nbytes: int, spill: str | None) -> Block:
        """Memory of `nbytes`; of a file in the directory `spill`, if one is given.

        Raises:
            QueueFullError: there is none.
        """
        arena = self._arenas.get(spill)
        if arena is None:
            arena = self._arenas.setdefault(spill, self._open(source_of(self._directory, spill)))
        return arena.allocate(nbytes)

    def leave(self, number: int) -> None:
        """See `Arena`."""
        for arena in list(self._arenas.values()):
            arena.leave(number)

    def reuse(self, number: int) -> None:
        """See `Arena`."""
        for arena in list(self._arenas.values()):
            arena.reuse(number)

    def trim(self, age_s: float) -> None:
        """See `Arena`."""
        for arena in list(self._arenas.values()):
            arena.trim(age_s)

    @property
    def has_spare(self) -> bool:
        """See `Arena`."""
        return any(arena.has_spare for arena in list(self._arenas.values()))

    def close(self) -> None:
        """See `Arena`."""
        for arena in list(self._arenas.values()):
            arena.close()


def spilled_files(directory: Path, spill: str) -> Iterator[Path]:
    """The files in `spill` of the queue of a directory."""
    return Path(spill).glob(f"{_mark(directory)}*.segment")


def write_spilled(memory: torch.Tensor, spill: str) -> torch.Tensor:
    """A copy of uint8 [n], in a file without a name that lasts as long as the copy.

    Raises:
        QueueFullError: the file system has no room.
    """
    source = _spilling(Path(spill), None)
    segment, _ = source.create(len(memory))
    copy = segment.map(is_shared=True)
    back(copy.data_ptr(), 0, len(memory), source.where)
    copy.numpy()[:] = memory.numpy()
    return copy


def _spilling(spill: Path, directory: Path | None) -> Source:
    """Files in `spill`; with names, if they are of the queue of a directory."""

    def create(nbytes: int) -> tuple[Segment, str | None]:
        path = spill / f"{_mark(directory) if directory else ''}{uuid.uuid4().hex}.segment"
        try:
            spill.mkdir(mode=0o700, parents=True, exist_ok=True)
            segment = Segment.create(nbytes, path)
            if directory is None:
                path.unlink()
        except OSError as error:
            raise QueueFullError(
                f"no file can be made in the spill_directory {spill}: {error.strerror}; make room or give access "
                "there, or configure another one"
            ) from error
        return segment, str(path) if directory else None

    return Source(create, f"the file system of {spill}")


def _mark(directory: Path) -> str:
    return hashlib.sha256(str(directory).encode()).hexdigest()[:16] + "-"
