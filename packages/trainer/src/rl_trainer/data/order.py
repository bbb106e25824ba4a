"""In which order prompts are used: a seeded shuffle per epoch whose position can be saved and restored."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class PromptOrder:
    """An endless sequence of row indices, reshuffled each epoch; `position` alone restores it."""

    num_rows: int
    """Rows of the dataset."""
    seed: int
    """Seeds every epoch's shuffle."""
    position: int = 0
    """Indices drawn so far."""
    returned: list[int] = field(default_factory=list)
    """Indices that were drawn by an earlier run and not used: handed out first."""
    _epoch: int = field(default=-1, init=False)
    _shuffled: list[int] = field(default_factory=list, init=False)

    def take(self, count: int) -> list[int]:
        """The next `count` indices."""
        return [self.returned.pop(0) if self.returned else self._next() for _ in range(count)]

    def _next(self) -> int:
        epoch, offset = divmod(self.position, self.num_rows)
        if epoch != self._epoch:
            self._shuffled = list(range(self.num_rows))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._shuffled)
            self._epoch = epoch
        self.position += 1
        return self._shuffled[offset]
