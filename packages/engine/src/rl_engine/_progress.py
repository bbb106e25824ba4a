"""What a run says of itself: lines, and on a terminal a bar beneath them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Progress:
    """Of one process; the bar is there where lines are printed and stderr is a terminal."""

    def __init__(self, report: Callable[[str], None], *, total: int, done: int, is_shown: bool) -> None:
        """Begin.

        Args:
            report: Takes one line at a time.
            total: Steps of the run.
            done: Steps taken before.
            is_shown: False says nothing: another rank does.
        """
        self._report, self._is_shown, self._bar = report, is_shown, None
        if is_shown and report is print and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, file=sys.stderr)

    def line(self, text: str) -> None:
        """Say something."""
        if self._bar is not None:
            self._bar.write(text)
        elif self._is_shown:
            self._report(text)

    def step(self, loss: float) -> None:
        """One more step is taken."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
