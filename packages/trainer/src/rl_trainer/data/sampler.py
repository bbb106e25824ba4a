"""Samplers: the order in which prompts are drawn, which resumes exactly from a saved state."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rl_trainer.data.datasets import PART, Complaints, LocatedRows
from rl_trainer.data.rows import Row
from rl_trainer.errors import DataError, InputError
from rl_trainer.inputs import digest_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_trainer.config import Config
    from rl_trainer.data.datasets import Datasets, StreamedRows

    Measure = Callable[[list[Any]], list[int | str]]


class Order(ABC):
    """Sampler: an endless sequence of row indices.

    Args:
        position: Indices drawn so far: where to begin. Alone it restores every order but the curriculum, which has
            pass rates in its `state_dict` as well.
        returned: Indices that were drawn by an earlier run and not used: handed out first.
    """

    def __init__(self, *, position: int = 0, returned: Sequence[int] = ()) -> None:
        self.position = position
        self.returned = list(returned)
        self.num_too_long = self.num_bad = 0

    def take(self, count: int) -> list[int]:
        """Draw the next `count` indices."""
        return [self.returned.pop(0) if self.returned else self._next() for _ in range(count)]

    def give_back(self, indices: Sequence[int]) -> None:
        """Return indices that were drawn and not used: they are drawn first again."""
        self.returned = [*indices, *self.returned]

    @abstractmethod
    def _next(self) -> int:
        """Next index from `position` on that is wanted; advances the position."""

    def observe(self, index: int, rewards: Sequence[float]) -> None:
        """Observe the rewards of a row's group; a curriculum uses them."""
        return

    def state_dict(self) -> dict[str, Any]:
        """State as JSON values: a sampler that loads it draws the same indices."""
        return {"position": self.position, "returned": list(self.returned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.position, self.returned = state["position"], list(state["returned"])


class PromptOrder(Order):
    """Epoch sampler: every row once per epoch, each epoch in another order."""

    def __init__(self, *, num_rows: int, seed: int | str, position: int = 0, returned: Sequence[int] = ()) -> None:
        super().__init__(position=position, returned=returned)
        self._num_rows, self._seed = num_rows, seed
        self._epoch = -1
        self._shuffled: list[int] = []

    def _next(self) -> int:
        index = self.at(self.position)
        self.position += 1
        return index

    def at(self, position: int) -> int:
        """The index at a position."""
        epoch, offset = divmod(position, self._num_rows)
        if epoch != self._epoch:
            self._shuffled = list(range(self._num_rows))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._shuffled)
            self._epoch = epoch
        return self._shuffled[offset]


class MixtureOrder(Order):
    """Mixture sampler: draws a part by weight, then that part's next row; each part has its own epochs."""

    def __init__(self, *, parts: Sequence[str], weights: Mapping[str, float], seed: int) -> None:
        super().__init__()
        self._rows: dict[str, list[int]] = {}
        for index, part in enumerate(parts):
            self._rows.setdefault(part, []).append(index)
        self._names = sorted(self._rows)
        self._weights = [weights[name] for name in self._names]
        self._seed = seed
        self._orders = {n: PromptOrder(num_rows=len(self._rows[n]), seed=f"{seed}/{n}") for n in self._names}
        self._restart()

    def _restart(self) -> None:
        self._draw = random.Random(f"{self._seed}/mixture")
        self._drawn: Counter[str] = Counter()

    def _next(self) -> int:
        if self._drawn.total() > self.position:
            self._restart()
        while self._drawn.total() < self.position:  # after a restart: what was drawn before
            self._drawn[self._part()] += 1
        part = self._part()
        place = self._drawn[part]
        self._drawn[part] += 1
        self.position += 1
        return self._rows[part][self._orders[part].at(place)]

    def _part(self) -> str:
        return self._draw.choices(self._names, self._weights)[0]


class CurriculumOrder(Order):
    """Curriculum sampler: skips rows whose last group taught nothing, all completions right or all wrong.

    A row that was never tried is always taken. One whose last mean reward was not between `low` and `high` (both
    excluded) is taken again with probability `revisit` only, since the policy changes. An epoch without any row is
    followed by one that takes all.

    The position counts rows that were passed over, too.
    """

    def __init__(self, *, num_rows: int, seed: int, low: float, high: float, revisit: float) -> None:
        super().__init__()
        self._order = PromptOrder(num_rows=num_rows, seed=seed)
        self._num_rows, self._seed, self._low, self._high, self._revisit = num_rows, seed, low, high, revisit
        self._rates: dict[int, float] = {}

    def observe(self, index: int, rewards: Sequence[float]) -> None:
        """Remember the row's pass rate."""
        self._rates[index] = fmean(rewards)

    def _next(self) -> int:
        for _ in range(self._num_rows):
            place = self.position
            index = self._order.at(place)
            self.position += 1
            rate = self._rates.get(index)
            is_useful = rate is None or self._low < rate < self._high
            if is_useful or random.Random(f"{self._seed}/{place}").random() < self._revisit:
                return index
        self.position += 1
        return self._order.at(self.position - 1)

    def state_dict(self) -> dict[str, Any]:
        """Pass rates by row, in addition to the position."""
        return super().state_dict() | {"pass_rates": list(self._rates.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        super().load_state_dict(state)
        self._rates = dict(state.get("pass_rates", ()))


class StreamOrder(Order):
    """Stream sampler: one row after the other, without those whose prompts are too long.

    Prompts of more than `longest` tokens are passed over and counted in `num_too_long`; with `drops` so are rows that
    cannot be used, in `num_bad`.

    Raises (when it is drawn from):
        DataError: no row of a whole epoch is short enough.
    """

    _AHEAD = 64
    _REMEMBERED = 64

    def __init__(self, *, rows: StreamedRows, measure: Measure, longest: int, drops: bool = False) -> None:
        super().__init__()
        self._stream, self._measure, self._longest, self._drops = rows, measure, longest, drops
        self._read: dict[int, tuple[Row, int | str]] = {}
        self._given: dict[int, Row] = {}
        self._digests: deque[tuple[int, str]] = deque(maxlen=self._REMEMBERED)

    def state_dict(self) -> dict[str, Any]:
        """Digests of the rows gone through last, by index, in addition to the position."""
        return super().state_dict() | {"digests": [list(each) for each in self._digests]}

    def _next(self) -> int:
        num_passed = 0
        while True:
            index = self.position
            if index not in self._read:
                self._read_ahead(index)
            row, length = self._read.pop(index)
            self.position += 1
            if isinstance(length, int):  # what cannot be used is no row that a resumed run could compare
                self._digests.append((index, digest_rows([row])))
            if isinstance(length, int) and length <= self._longest:
                self._given[index] = row
                return index
            self.num_too_long += isinstance(length, int)
            self.num_bad += not isinstance(length, int)
            num_passed += 1
            if self._stream.epoch_size is not None and num_passed >= self._stream.epoch_size:
                raise DataError(
                    f"none of the {self._stream.epoch_size} rows of the stream has a prompt of at most "
                    f"data.max_prompt_tokens={self._longest} tokens"
                )

    def _read_ahead(self, index: int) -> None:
        """Read and measure the next rows; unusable rows have an error message in place of a length.

        Raises:
            DataError: there are such, and they are not to be left out.
        """
        rows: dict[int, Row] = {}
        complaints = Complaints(is_error=not self._drops)
        for at in range(index, index + self._AHEAD):
            try:
                rows[at] = self._stream[at]
            except DataError as error:
                self._read[at] = ({}, str(error))
                complaints.add(str(error))
        for (at, row), length in zip(rows.items(), self._measure([*rows.values()]), strict=True):
            self._read[at] = (row, length)
            if not isinstance(length, int):
                complaints.add(f"{self._stream.where(at)}: {length}")
        complaints.check(self._AHEAD - complaints.count)

    def __getitem__(self, index: int) -> Row:
        """The row of an index that was taken: once at no cost, later by reading it again."""
        return self._given.pop(index) if index in self._given else self._stream[index]

    def where(self, index: int) -> str:
        """Location of a row that was read lately, for messages."""
        return self._stream.where(index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts of a run: rows and their sampler."""

    rows: Sequence[Row] | StreamOrder
    order: Order
    eval_rows: list[Row]
    num_too_long: int
    """Rows that were left out already; a stream counts on."""
    num_bad: int = 0
    """Rows that were left out because they cannot be asked."""


def make_prompts(config: Config, datasets: Datasets, measure: Measure) -> Prompts:
    """Filter the rows by prompt length and build their sampler.

    Raises:
        InputError: no training or no held-out prompt is short enough, or none of a part of the mixture.
    """
    data, longest = config.data, config.data.max_prompt_tokens
    drops = data.on_bad_row == "drop"
    complaints = Complaints(is_error=not drops)
    fitting = partial(_fitting, datasets, measure, longest, complaints)
    eval_rows = fitting(datasets.eval, is_eval=True)
    if datasets.stream is not None:
        order = StreamOrder(rows=datasets.stream, measure=measure, longest=longest, drops=drops)
        complaints.check(len(datasets.eval) - complaints.count)
        left_out = len(datasets.eval) - len(eval_rows) - complaints.count
        return Prompts(rows=order, order=order, eval_rows=eval_rows, num_too_long=left_out, num_bad=complaints.count)
    rows = fitting(datasets.train)
    num_rows = len(datasets.train) + len(datasets.eval)
    complaints.check(num_rows - complaints.count)
    num_too_long = num_rows - len(rows) - len(eval_rows) - complaints.count
    if data.mixture:
        parts = [row[PART] for row in rows]
        if lost := set(data.mixture) - set(parts):
            raise InputError(
                f"no prompt of data.mixture.{min(lost)} has at most data.max_prompt_tokens={longest} tokens; raise it, "
                "or leave the part out"
            )
        weights = {name: part.weight for name, part in data.mixture.items()}
        order = MixtureOrder(parts=parts, weights=weights, seed=config.seed)
    elif data.curriculum is not None:
        low, high = data.curriculum.pass_rate
        order = CurriculumOrder(
            num_rows=len(rows), seed=config.seed, low=low, high=high, revisit=data.curriculum.revisit
        )
    else:
        order = PromptOrder(num_rows=len(rows), seed=config.seed)
    return Prompts(rows=rows, order=order, eval_rows=eval_rows, num_too_long=num_too_long, num_bad=complaints.count)


def _fitting(
    datasets: Datasets,
    measure: Measure,
    longest: int,
    complaints: Complaints,
    rows: Sequence[Row],
    *,
    is_eval: bool = False,
) -> list[Row]:
    """The rows whose prompts have at most `longest` tokens; rows that cannot be asked are added to `complaints`.

    Raises:
        InputError: there is none.
    """
    kept, places, lengths = list[Row](), list[str](), list[int]()
    for index, (row, length) in enumerate(zip(rows, measure(list(rows)), strict=True)):
        where = datasets.where(index, is_eval=is_eval)
        if not isinstance(length, int):
            complaints.add(f"{where}: {length}")
            continue
        lengths.append(length)
        if length <= longest:
            kept.append(row)
            places.append(where)
    if not kept:
        complaints.check(len(lengths))
        shortest = f"the shortest has {min(lengths)}" if lengths else f"none can be asked: {complaints.first[0]}"
        raise InputError(f"none of {len(rows)} prompts has at most data.max_prompt_tokens={longest} tokens; {shortest}")
    return LocatedRows(kept, places)
