"""The values that rl-tq takes and gives. Pure index arithmetic: no tensor, no I/O."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

from rl_tq._balance import balanced_order

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from rl_tq._places import Place


class OnFull(StrEnum):
    """What a put of new rows does in a partition that has no room for them."""

    BLOCK = "block"
    """Wait for room until the deadline."""
    RAISE = "raise"
    """Raise `QueueFullError` at once."""
    DROP_OLDEST = "drop_oldest"
    """Clear the oldest rows (whole groups) that nobody holds a lease on; `stats()` counts them."""
    DROP_STALEST = "drop_stalest"
    """The same, those of the lowest tag `weight_version_min` first; rows without that tag are never dropped."""
    SPILL = "spill"
    """Write values that do not fit into `max_bytes` to files of `spill_directory`, up to `spill_bytes`; then wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOptions:
    """What a partition holds at most, and when its rows go. `TransferQueue.configure` sets it; a clear keeps it."""

    max_rows: int | None = None
    """Rows it holds at most; None: any number."""
    max_bytes: int | None = None
    """Bytes of the extents it holds in memory at most; None: any number."""
    spill_directory: str | None = None
    """With `on_full="spill"`, where values go that do not fit into `max_bytes`: an absolute path, made if it is not
    there. `shm` and `file` write there from the process that puts, the other storages from the one that serves. The
    files have no name and go with their processes; those of `file` stay, and are read when it is served again."""
    spill_bytes: int | None = None
    """Bytes of extents that lie in files at most. A put lies in memory or in files, whole; a credit is for both
    together, so that a put which draws on one may still have to wait until one of them has as much room."""
    rows_per_version: int | None = None
    """Rows that training consumes between two weight versions. With `max_lag`, the partition takes at most
    `(max_lag + 1) * rows_per_version` rows, so that a row is consumed at most `max_lag` versions after it was begun
    (the admission rule of AReaL, arXiv:2505.24298, section 5.1)."""
    max_lag: int | None = None
    """Rows whose tag `weight_version_min` is more than this behind `advance`'s version are cleared and counted (with
    their group), and a put of such rows raises `StaleVersionError`; None: any age is good."""
    on_full: OnFull = OnFull.BLOCK
    """What a put of new rows does where there is no room."""
    tasks: tuple[str, ...] = ()
    """The tasks that consume every row: once all of them acked a row, it is cleared. A claim for another task is
    refused. Empty: any task may claim, and only `clear` frees rows."""
    keep_steps: int = 0
    """A row that all `tasks` acked is cleared this many training steps later, so that `restore` can go back as far."""
    max_attempts: int = 3
    """A row that came back this many times (nack, expired lease, dead consumer) becomes a dead letter."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_rows", 1), ("max_bytes", 1), ("spill_bytes", 1), ("rows_per_version", 1), ("max_lag", 0),
            ("keep_steps", 0), ("max_attempts", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: it must be at least {least}" + (", or None" * (least == 1)))
        choices = [str(choice) for choice in OnFull]
        if str(self.on_full) not in choices:
            raise ValueError(f"on_full is {self.on_full!r}: choose one of {choices}")
        object.__setattr__(self, "on_full", OnFull(self.on_full))
        object.__setattr__(self, "tasks", tuple(self.tasks))
        if (self.rows_per_version is None) != (self.max_lag is None) and self.rows_per_version is not None:
            raise ValueError("rows_per_version bounds nothing without max_lag: give both, or max_rows")
        self._check_spill()
        if self.keep_steps and not self.tasks:
            raise ValueError(f"keep_steps is {self.keep_steps}, and no tasks are declared whose rows would be kept")

    def _check_spill(self) -> None:
        needed = {name: getattr(self, name) for name in ("max_bytes", "spill_directory", "spill_bytes")}
        missing = [name for name, value in needed.items() if value is None]
        if self.on_full is OnFull.SPILL and missing:
            raise ValueError(f"on_full is 'spill', and {missing} are not given: spilling needs all of {list(needed)}")
        if self.on_full is not OnFull.SPILL and (self.spill_directory or self.spill_bytes):
            raise ValueError(f"spill_directory and spill_bytes mean nothing with on_full {str(self.on_full)!r}")
        if self.spill_directory is not None and not self.spill_directory.startswith("/"):
            raise ValueError(f"spill_directory is {self.spill_directory!r}: give an absolute path")

    @property
    def byte_limit(self) -> int | None:
        """Bytes in memory and in files together."""
        return None if self.max_bytes is None else self.max_bytes + (self.spill_bytes or 0)

    @property
    def row_limit(self) -> int | None:
        """The smaller of `max_rows` and what `max_lag` allows."""
        limits = [self.max_rows] if self.max_rows is not None else []
        if self.max_lag is not None and self.rows_per_version is not None:
            limits.append((self.max_lag + 1) * self.rows_per_version)
        return min(limits, default=None)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "tasks": list(self.tasks), "on_full": str(self.on_full)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PartitionOptions:
        """The inverse of `to_json`.

        Raises:
            ValueError: an option has no meaning; names those there are.
        """
        known = [each.name for each in fields(cls)]
        unknown = sorted(set(value) - set(known))
        if unknown:
            raise ValueError(f"a partition has no options {unknown}; it has {known}")
        return cls(**value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Room that a producer was promised by `admit`: it may put that many rows without waiting."""

    number: int
    """Given once by one server."""
    partition: str
    """Where."""
    num_rows: int
    """Rows it is good for."""
    num_bytes: int
    """Bytes it is good for."""
    weight_version: int
    """The partition's weight version when it was given."""


@dataclass(frozen=True, slots=True)
class PerGroup:
    """A column of a put whose rows share their value with all rows of their group (tag `group_id`): stored once each.

    `values` is whatever a column may be, of one value per group, in the order in which the groups first stand in the
    put's tags (or in those of the `BatchMeta` that names its rows). What comes back has a value per row, as any column:
    rows of one column may be put in either way.

    `PerGroup()`, without values, is the value that rows of the group already have, put by whomever in whatever way: a
    row that comes later refers to it, and nothing is copied. It stays as long as one row refers to it.
    """

    values: Any = None
    """G values, one per group; None: those that are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What `restore` did."""

    num_returned: int
    """Acks taken back: rows that a task will be given again."""
    num_cleared: int
    """Rows acked after that step that were cleared since and cannot come back."""
    num_revoked: int
    """Leased rows taken from their holders, whose acks are refused from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMeta:
    """What a sampler sees of one row."""

    sample_id: str
    """Id of the row."""
    tags: Mapping[str, Any]
    """Its tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMeta:
    """A reference to rows and columns: what the controller passes around. Immutable, small, picklable.

    Every method returns a new reference and touches no tensor. One made by hand, of `partition`, `sample_ids` and
    `columns` alone, finds its rows by their ids; one made by a queue finds them by `rows`, so that a row which was
    cleared and put again under the same id is not mistaken for the old one.
    """

    partition: str
    """Partition the rows live in."""
    sample_ids: tuple[str, ...]
    """B ids, in order."""
    columns: tuple[str, ...]
    """Names of columns that all rows have."""
    tags: tuple[Mapping[str, Any], ...] = ()
    """B mappings of small values, in the same order; empty when there are none."""
    rows: tuple[int, ...] = ()
    """B row numbers, in the same order, never given twice by one server; empty in references made by hand."""
    generation: int = 0
    """Generation of the partition when the reference was made: a cleared one is stale. 0 in references made by hand."""
    task: str = ""
    """The task that the rows were claimed for; empty where they were not claimed."""
    leases: tuple[int, ...] = ()
    """B lease numbers, in the same order: what `ack` and `nack` show. Empty where the rows were not claimed."""
    places: tuple[Place, ...] = field(default=(), compare=False, repr=False)
    """Where the rows lay when the server told, for processes of its host: get needs no question while that holds."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What a storage wants to remember about the whole reference; opaque."""

    def __post_init__(self) -> None:
        size = len(self.sample_ids)
        for name, given in (("tags", self.tags), ("rows", self.rows), ("leases", self.leases)):
            if given and len(given) != size:
                raise ValueError(f"a reference to {size} rows has {len(given)} {name}: give one per row, or none")

    def __len__(self) -> int:
        return len(self.sample_ids)

    def reorder(self, index: Sequence[int]) -> BatchMeta:
        """Rows at `index`, in that order: a permutation, a subset, or with repeats.

        Raises:
            IndexError: a position is not in -B..B-1.
        """
        take = _taker(index)
        return self._with_rows(
            take(self.sample_ids),
            take(self.tags) if self.tags else (),
            take(self.rows) if self.rows else (),
            take(self.leases) if self.leases else (),
        )

    def filter(self, keep: Callable[[Mapping[str, Any]], bool]) -> BatchMeta:
        """Rows whose tags `keep` accepts, in this order; a row without tags has an empty mapping."""
        return self.reorder([i for i, tags in enumerate(self._all_tags()) if keep(tags)])

    def groupby(self, tag: str) -> dict[Hashable, BatchMeta]:
        """Rows by the value of a tag; groups and their rows in the order of first appearance.

        Raises:
            KeyError: a row has no such tag.
        """
        index: defaultdict[Hashable, list[int]] = defaultdict(list)
        for i, value in enumerate(self._values(tag)):
            index[value].append(i)
        return {value: self._at(positions) for value, positions in index.items()}

    def sort_by(self, tag: str, *, descending: bool = False) -> BatchMeta:
        """Rows in the order of a tag; equal ones stay in the order they have.

        Raises:
            KeyError: a row has no such tag.
        """
        values = self._values(tag)
        return self.reorder(sorted(range(len(self)), key=values.__getitem__, reverse=descending))

    def balanced(self, num_parts: int, *, tag: str = "num_tokens") -> BatchMeta:
        """Rows in an order in which `chunk(num_parts)` gives parts of nearly equal sums of a tag, and equal counts.

        Greedy: the longest row goes to the part with the smallest sum that has room (LPT with a cardinality bound).

        Raises:
            KeyError: a row has no such tag.
            ValueError: the length does not divide.
        """
        if num_parts < 1 or len(self) % num_parts:
            raise ValueError(f"{len(self)} rows cannot be balanced over {num_parts} equal parts: use another number")
        return self.reorder(balanced_order(self._values(tag), num_parts))

    def pad_to(self, multiple: int) -> tuple[BatchMeta, int]:
        """This reference lengthened by repeating its first rows until `multiple` divides it, and how many were added.

        The repeats are the last rows: give them no weight in a loss. They have the leases of the rows they repeat.

        Raises:
            ValueError: `multiple` is not positive, or there is no row to repeat.
        """
        if multiple < 1 or not len(self):
            raise ValueError(f"{len(self)} rows cannot be padded to a multiple of {multiple}")
        missing = -len(self) % multiple
        return self.reorder([*range(len(self)), *(i % len(self) for i in range(missing))]), missing

    def select_columns(self, columns: Sequence[str]) -> BatchMeta:
        """The same rows with only `columns`, in that order.

        Raises:
            KeyError: one of them is not in this reference.
        """
        missing = sorted(set(columns) - set(self.columns))
        if missing:
            raise KeyError(f"columns {missing} are not in this reference, which has {sorted(self.columns)}")
        return replace(self, columns=tuple(dict.fromkeys(columns)))

    def union(self, other: BatchMeta) -> BatchMeta:
        """The same rows, in this order, with the columns and tags of both. `other` may list the rows in another order.

        Where both have a tag, `other`'s value is taken.

        Raises:
            ValueError: the two do not refer to the same rows.
        """
        theirs = self._positions_in(other)
        tags = self.tags
        if other.tags:
            mine = self.tags or ({},) * len(self)
            others = other.tags if isinstance(theirs, range) else _taker(theirs)(other.tags)
            tags = tuple([m if m is t or m == t else {**m, **t} for m, t in zip(mine, others, strict=True)])
        return replace(
            self,
            columns=tuple(dict.fromkeys((*self.columns, *other.columns))),
            tags=tags,
            rows=self.rows or (_taker(theirs)(other.rows) if other.rows else ()),
            generation=self.generation or other.generation,
            task=self.task or other.task,
            leases=self.leases or (_taker(theirs)(other.leases) if other.leases else ()),
            places=_united([self.places, other.places]),
            extra={**self.extra, **other.extra},
        )

    def chunk(self, num_chunks: int) -> list[BatchMeta]:
        """`num_chunks` contiguous parts of equal length.

        Raises:
            ValueError: the length does not divide.
        """
        if num_chunks < 1 or len(self) % num_chunks:
            raise ValueError(
                f"{len(self)} rows cannot be cut into {num_chunks} equal chunks: use split, or another number"
            )
        size = len(self) // num_chunks
        return [self._slice(i * size, (i + 1) * size) for i in range(num_chunks)]

    def split(self, size: int) -> list[BatchMeta]:
        """Contiguous parts of `size` rows; the last may be shorter.

        Raises:
            ValueError: `size` is not positive.
        """
        if size < 1:
            raise ValueError(f"rows cannot be split into parts of {size}: use 1 or more")
        return [self._slice(i, i + size) for i in range(0, len(self), size)]

    @staticmethod
    def concat(parts: Sequence[BatchMeta]) -> BatchMeta:
        """The rows of all parts, in order, with the columns that all of them have.

        Raises:
            ValueError: there are no parts, or they come from several partitions or generations of one.
        """
        if not parts:
            raise ValueError("concat needs at least one part")
        homes = {(p.partition, p.generation) for p in parts}
        if len(homes) > 1:
            raise ValueError(f"concat needs parts of one generation of one partition, not {sorted(homes)}")
        tasks = {p.task for p in parts}
        if len(tasks) > 1:
            raise ValueError(f"concat needs parts claimed for one task, not {sorted(tasks)}")
        shared = set(parts[0].columns).intersection(*(p.columns for p in parts))
        has_tags = any(p.tags for p in parts)
        has_rows = all(p.rows or not p.sample_ids for p in parts)
        has_leases = all(p.leases or not p.sample_ids for p in parts)
        return replace(
            parts[0],
            sample_ids=tuple(chain.from_iterable(p.sample_ids for p in parts)),
            columns=tuple(c for c in parts[0].columns if c in shared),
            tags=tuple(chain.from_iterable(p.tags or ({},) * len(p) for p in parts)) if has_tags else (),
            rows=tuple(chain.from_iterable(p.rows for p in parts)) if has_rows else (),
            leases=tuple(chain.from_iterable(p.leases for p in parts)) if has_leases else (),
            places=_united([p.places for p in parts]),
        )

    def _at(self, positions: list[int]) -> BatchMeta:
        """Rows at ascending positions."""
        first, last = positions[0], positions[-1]
        return self._slice(first, last + 1) if last - first + 1 == len(positions) else self.reorder(positions)

    def _slice(self, start: int, stop: int) -> BatchMeta:
        part = slice(start, stop)
        return self._with_rows(self.sample_ids[part], self.tags[part], self.rows[part], self.leases[part])

    def _with_rows(
        self,
        sample_ids: tuple[str, ...],
        tags: tuple[Mapping[str, Any], ...],
        rows: tuple[int, ...],
        leases: tuple[int, ...],
    ) -> BatchMeta:
        # Many small references are made at once: the fields are set as they are, without a constructor's checks, which
        # the lengths of what was taken satisfy.
        meta = object.__new__(BatchMeta)
        _SET_PARTITION(meta, self.partition)
        _SET_SAMPLE_IDS(meta, sample_ids)
        _SET_COLUMNS(meta, self.columns)
        _SET_TAGS(meta, tags)
        _SET_ROWS(meta, rows)
        _SET_GENERATION(meta, self.generation)
        _SET_TASK(meta, self.task)
        _SET_LEASES(meta, leases)
        _SET_PLACES(meta, self.places)
        _SET_EXTRA(meta, self.extra)
        return meta

    def _all_tags(self) -> Sequence[Mapping[str, Any]]:
        return self.tags or ({},) * len(self)

    def _values(self, tag: str) -> list[Any]:
        try:
            return list(map(itemgetter(tag), self._all_tags()))
        except KeyError:
            lacking = [name for name, tags in zip(self.sample_ids, self._all_tags(), strict=True) if tag not in tags]
            raise KeyError(
                f"{len(lacking)} of {len(self)} rows have no tag {tag!r}, {lacking[0]!r} among them"
            ) from None

    def _positions_in(self, other: BatchMeta) -> Sequence[int]:
        """Where each of our rows stands in `other`."""
        if self.partition != other.partition:
            raise ValueError(f"union needs one partition, not {self.partition!r} and {other.partition!r}")
        by_number = bool(self.rows and other.rows)
        mine: Sequence[int | str] = self.rows if by_number else self.sample_ids
        others: Sequence[int | str] = other.rows if by_number else other.sample_ids
        if mine == others:
            return range(len(mine))
        position = {key: i for i, key in enumerate(others)}
        if len(mine) != len(others) or set(mine) != position.keys():
            only = [list(set(a) - set(b))[:3] for a, b in ((mine, others), (others, mine))]
            raise ValueError(
                f"union needs the same rows on both sides: {len(mine)} and {len(others)} rows of {self.partition!r}, "
                f"only left {only[0]}, only right {only[1]}"
            )
        return [position[key] for key in mine]


(
    _SET_PARTITION, _SET_SAMPLE_IDS, _SET_COLUMNS, _SET_TAGS, _SET_ROWS, _SET_GENERATION, _SET_TASK, _SET_LEASES,
    _SET_PLACES, _SET_EXTRA,
) = [getattr(BatchMeta, each.name).__set__ for each in fields(BatchMeta)]  # fmt: skip


def _taker(index: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the values at `index` out of a sequence."""
    if len(index) > 1:  # itemgetter gives a tuple only then
        return itemgetter(*index)
    return lambda values: tuple([values[i] for i in index])


def _united(places: Sequence[tuple[Place, ...]]) -> tuple[Place, ...]:
    """All of them, each once."""
    distinct = list({id(each): each for each in places if each}.values())
    if len(distinct) < 2:
        return distinct[0] if distinct else ()
    return tuple({(p.extent, p.first_row, p.start, p.stamp): p for p in chain.from_iterable(distinct)}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Base of `rl_tq.policies`: plain values that travel to the server as JSON.

    A policy of your own is a subclass, a frozen dataclass of JSON values that overrides `choose`, installed under its
    `name` in the entry point group `rl_tq.policies` where the server runs.
    """

    name: ClassVar[str]

    def check(self, batch_size: int) -> None:
        """Raise ValueError if no claim of `batch_size` rows can be made this way."""

    def choose(self, rows: Sequence[RowMeta], batch_size: int) -> Sequence[int] | None:
        """For policies of one's own: positions in the ready rows (oldest first), or None to wait until they change.

        Runs in the server, under its lock, at every change while a claim waits: be quick. Those of `rl_tq.policies` do
        without: the server keeps indexes for them.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must override choose(rows, batch_size)")

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            "name": self.name,
            **{key: value.to_json() if isinstance(value, Policy) else value for key, value in values.items()},
        }
