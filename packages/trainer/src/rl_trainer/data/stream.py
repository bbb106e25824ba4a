"""Rows that are read as they are needed, in a shuffled order that a number alone restores."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

from rl_trainer.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rl_trainer.data.records import Record, Source
    from rl_trainer.data.rows import Row


class StreamedRows:
    """The endless sequence of a source's rows, epoch after epoch, each shuffled within a window that moves over it.

    `rows[index]` reads on to that place. What lies before it is gone through without being parsed, from the beginning
    if the place has been passed; so a run that resumes costs one pass over what it had read of the epoch, not memory.

    Args:
        source: The records.
        make: Makes a row of a record and of where it stands.
        seed: Of the shuffle.
        buffer_size: Records that the window holds; 1 keeps the order of the source.
    """

    def __init__(
        self, source: Source, make: Callable[[Mapping[str, Any], str], Row], *, seed: int, buffer_size: int
    ) -> None:
        self._source, self._make, self._seed, self._buffer_size = source, make, seed, buffer_size
        self.epoch_size: int | None = None
        """Records of the source; None until it has been read to its end."""
        self._restart(0, 0)

    def _restart(self, epoch: int, index: int) -> None:
        self._index = index
        self._records = self._from(epoch)

    def __getitem__(self, index: int) -> Row:
        """The row at a place.

        Raises:
            DataError: the record there is no row, or the source is empty.
        """
        if index < self._index:
            epoch = index // self.epoch_size if self.epoch_size else 0
            self._restart(epoch, epoch * (self.epoch_size or 0))
        record = next(itertools.islice(self._records, index - self._index, None))
        self._index = index + 1
        return self._make(record.read(), record.where)

    def _from(self, epoch: int) -> Iterator[Record]:
        while True:
            size = 0
            for record in self._shuffled(epoch):
                size += 1
                yield record
            if size == 0:
                raise DataError(f"{self._source.name} has no rows")
            self.epoch_size, epoch = size, epoch + 1

    def _shuffled(self, epoch: int) -> Iterator[Record]:
        draw = random.Random(f"{self._seed}/{epoch}")
        records = self._source.records()
        window = list(itertools.islice(records, self._buffer_size))
        for record in records:
            place = draw.randrange(len(window))
            yield window[place]
            window[place] = record
        draw.shuffle(window)
        yield from window
