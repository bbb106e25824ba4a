"""`BatchMeta`: references to rows and columns. Pure index arithmetic, without tensors or I/O."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain, compress
from operator import itemgetter, ne
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence


class PackedLocation(NamedTuple):
    """Location of some rows in wire form. It stays packed, because most references are only acked or passed on."""

    layout: bytes
    """Packed schema of the extent's columns."""
    numbers: bytes
    """Packed numbers of the location."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMeta:
    """Reference to rows and columns, which the controller passes around. Immutable, small, picklable.

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
    places: tuple[PackedLocation, ...] = field(default=(), compare=False, repr=False)
    """Locations of the rows when the server replied: on its host, a get needs no request while they are valid."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Opaque data of the storage about the reference."""

    def __post_init__(self) -> None:
        size = len(self.sample_ids)
        for name, given in (("tags", self.tags), ("rows", self.rows), ("leases", self.leases)):
            if given and len(given) != size:
                raise ValueError(f"a reference to {size} rows has {len(given)} {name}: give one per row, or none")

    def __len__(self) -> int:
        return len(self.rows) or len(self.sample_ids)

    def __getattr__(self, name: str) -> Any:
        """Default sample ids, made from the row numbers on first use: it takes as long as the rest of a claim."""
        if name != "sample_ids":
            raise AttributeError(f"'BatchMeta' object has no attribute {name!r}")
        sample_ids = tuple([f"row{row}" for row in self.rows])
        _SET_SAMPLE_IDS(self, sample_ids)
        return sample_ids

    def reorder(self, index: Sequence[int]) -> BatchMeta:
        """Rows at `index`, in that order: a permutation, a subset, or with repeats.

        Raises:
            IndexError: a position is not in -B..B-1.
        """
        if isinstance(index, range) and index.step == 1 and 0 <= index.start <= index.stop <= len(self):
            take = itemgetter(slice(index.start, index.stop))
        else:
            take = _taker(index)
        names = self._names
        return batch_meta(
            self.partition, None if names is None else take(names), self.columns,
            take(self.tags) if self.tags else (), take(self.rows) if self.rows else (), self.generation, self.task,
            take(self.leases) if self.leases else (), self.places, self.extra,
        )  # fmt: skip

    def filter(self, keep: Callable[[Mapping[str, Any]], bool]) -> BatchMeta:
        """Rows whose tags `keep` accepts, in this order; a row without tags has an empty mapping."""
        return self.reorder([i for i, tags in enumerate(self._all_tags()) if keep(tags)])

    def groupby(self, tag: str) -> dict[Hashable, BatchMeta]:
        """Rows by the value of a tag; groups and their rows in the order of first appearance.

        Raises:
            KeyError: a row has no such tag.
        """
        index = self.positions(tag)
        are_together = not any(isinstance(rows, list) for rows in index.values())
        together = self if are_together else self.reorder(list(chain.from_iterable(index.values())))
        return dict(zip(index, together._cut(accumulate(map(len, index.values()))), strict=True))

    def positions(self, tag: str) -> dict[Hashable, Sequence[int]]:
        """Positions of the rows by the value of a tag, in the order of first appearance.

        Those of a value are a `range` where the rows of every value follow one another.

        Raises:
            KeyError: a row has no such tag.
        """
        values = self._values(tag)
        starts = list(compress(range(1, len(values)), map(ne, values[1:], values)))
        groups = [*values[:1], *[values[start] for start in starts]]
        if len(set(groups)) == len(groups):
            return dict(zip(groups, map(range, [0, *starts], [*starts, len(values)]), strict=False))
        index: defaultdict[Hashable, list[int]] = defaultdict(list)
        for i, value in enumerate(values):
            index[value].append(i)
        return dict(index)

    def balanced(self, num_parts: int, *, tag: str = "num_tokens") -> BatchMeta:
        """Load balancing: reorder rows so that `chunk(num_parts)` gives parts with nearly equal sums of a tag.

        Greedy: the longest row goes to the part with the smallest sum that is not full (LPT with equal counts).

        Raises:
            KeyError: a row has no such tag.
            ValueError: the length is not a multiple of `num_parts`.
        """
        if num_parts < 1 or len(self) % num_parts:
            raise ValueError(f"{len(self)} rows cannot be balanced over {num_parts} equal parts: use another number")
        return self.reorder(balanced_order(self._values(tag), num_parts))

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
            places=_merged([self.places, other.places]),
            extra={**self.extra, **other.extra},
        )

    def chunk(self, num_chunks: int) -> list[BatchMeta]:
        """`num_chunks` contiguous parts of equal length.

        Raises:
            ValueError: the length is not a multiple of `num_chunks`.
        """
        if num_chunks < 1 or len(self) % num_chunks:
            raise ValueError(
                f"{len(self)} rows cannot be cut into {num_chunks} equal chunks: use split, or another number"
            )
        size = len(self) // num_chunks
        return self._cut([(i + 1) * size for i in range(num_chunks)])

    def split(self, size: int) -> list[BatchMeta]:
        """Contiguous parts of `size` rows; the last may be shorter.

        Raises:
            ValueError: `size` is not positive.
        """
        if size < 1:
            raise ValueError(f"rows cannot be split into parts of {size}: use 1 or more")
        return self._cut(range(size, len(self) + size, size))

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
            places=_merged([p.places for p in parts]),
        )

    def _cut(self, stops: Iterable[int]) -> list[BatchMeta]:
        """Contiguous parts that end at these positions."""
        partition, columns, generation, task = self.partition, self.columns, self.generation, self.task
        places, extra = self.places, self.extra
        names, tags, rows, leases = self._names, self.tags, self.rows, self.leases
        parts: list[BatchMeta] = []
        start = 0
        for stop in stops:
            parts.append(
                batch_meta(
                    partition, None if names is None else names[start:stop], columns, tags[start:stop],
                    rows[start:stop], generation, task, leases[start:stop], places, extra,
                )
            )  # fmt: skip
            start = stop
        return parts

    @property
    def _names(self) -> tuple[str, ...] | None:
        """Sample ids; None if they are defaults that were not made yet."""
        try:
            return _GET_SAMPLE_IDS(self)
        except AttributeError:
            return None

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
        """Position in `other` of each row of this reference."""
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
_GET_SAMPLE_IDS = vars(BatchMeta)["sample_ids"].__get__


def batch_meta(
    partition: str,
    sample_ids: tuple[str, ...] | None,
    columns: tuple[str, ...],
    tags: tuple[Mapping[str, Any], ...],
    rows: tuple[int, ...],
    generation: int,
    task: str,
    leases: tuple[int, ...],
    places: tuple[PackedLocation, ...],
    extra: Mapping[str, Any],
) -> BatchMeta:
    """Construct a `BatchMeta` without validation, in a quarter of the constructor's time.

    `sample_ids` None: `row` and the number of each row.
    """
    meta = object.__new__(BatchMeta)
    _SET_PARTITION(meta, partition)
    if sample_ids is not None:
        _SET_SAMPLE_IDS(meta, sample_ids)
    _SET_COLUMNS(meta, columns)
    _SET_TAGS(meta, tags)
    _SET_ROWS(meta, rows)
    _SET_GENERATION(meta, generation)
    _SET_TASK(meta, task)
    _SET_LEASES(meta, leases)
    _SET_PLACES(meta, places)
    _SET_EXTRA(meta, extra)
    return meta


def _taker(index: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Function that returns the values at `index` of a sequence, as a tuple."""
    if len(index) > 1:  # itemgetter gives a tuple only then
        return itemgetter(*index)
    return lambda values: tuple([values[i] for i in index])


def _merged(places: Sequence[tuple[PackedLocation, ...]]) -> tuple[PackedLocation, ...]:
    """Union of locations."""
    distinct = list({id(each): each for each in places if each}.values())
    if len(distinct) < 2:
        return distinct[0] if distinct else ()
    return tuple(dict.fromkeys(chain.from_iterable(distinct)))


_FRACTION = 1 << 20


def balanced_order(lengths: Sequence[float], num_parts: int) -> list[int]:
    """Positions reordered so that `num_parts` contiguous parts have equal counts and nearly equal sums of `lengths`.

    As `rl_csrc.rows.balanced_order`; `len(lengths)` must be a multiple. Non-integers count with a precision of 1e-6.
    """
    from rl_csrc import rows  # imports torch, which references otherwise do not need

    is_whole = isinstance(sum(lengths), int)
    sizes = cast("list[int]", [*lengths]) if is_whole else [int(length * _FRACTION) for length in lengths]
    return rows.balanced_order(sizes, num_parts)
