"""The values that rl-tq takes and gives. Pure index arithmetic: no tensor, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What a storage wants to remember about the whole reference; opaque."""

    def __post_init__(self) -> None:
        for name in ("tags", "rows"):
            length = len(getattr(self, name))
            if length not in (0, len(self.sample_ids)):
                raise ValueError(
                    f"a reference to {len(self.sample_ids)} rows has {length} {name}: give one per row, or none"
                )

    def __len__(self) -> int:
        return len(self.sample_ids)

    def reorder(self, index: Sequence[int]) -> BatchMeta:
        """Rows at `index`, in that order: a permutation, a subset, or with repeats.

        Raises:
            IndexError: a position is not in -B..B-1.
        """
        return replace(
            self,
            sample_ids=_take(self.sample_ids, index),
            tags=_take(self.tags, index) if self.tags else (),
            rows=_take(self.rows, index) if self.rows else (),
        )

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
            tags = tuple({**m, **other.tags[i]} for m, i in zip(mine, theirs, strict=True))
        return replace(
            self,
            columns=tuple(dict.fromkeys((*self.columns, *other.columns))),
            tags=tags,
            rows=self.rows or (_take(other.rows, theirs) if other.rows else ()),
            generation=self.generation or other.generation,
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
        shared = set(parts[0].columns).intersection(*(p.columns for p in parts))
        has_tags = any(p.tags for p in parts)
        has_rows = all(p.rows or not p.sample_ids for p in parts)
        return replace(
            parts[0],
            sample_ids=tuple(chain.from_iterable(p.sample_ids for p in parts)),
            columns=tuple(c for c in parts[0].columns if c in shared),
            tags=tuple(chain.from_iterable(p.tags or ({},) * len(p) for p in parts)) if has_tags else (),
            rows=tuple(chain.from_iterable(p.rows for p in parts)) if has_rows else (),
        )

    def _slice(self, start: int, stop: int) -> BatchMeta:
        return replace(
            self, sample_ids=self.sample_ids[start:stop], tags=self.tags[start:stop], rows=self.rows[start:stop]
        )

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


def _take(values: Sequence[Any], index: Sequence[int]) -> tuple[Any, ...]:
    return tuple([values[i] for i in index])
