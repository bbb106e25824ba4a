"""References by key."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_tq_transfer_queue._fields import even_parts, joined_info

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class KVBatchMeta:
    """Samples of one partition by their keys."""

    keys: list[str] = field(default_factory=list[str])
    tags: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(f"keys and tags must have same length, but got {len(self.keys)} and {len(self.tags)}")
        for what, names in (("keys", self.keys), ("fields", self.fields or [])):
            if len(set(names)) < len(names):
                raise ValueError(f"Got duplicated {what}: {names}")
        self.tags = copy.deepcopy(self.tags)
        self.extra_info = copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """The samples of these keys, in this order."""
        if len(set(keys_to_select)) != len(keys_to_select):
            raise ValueError(f"Contain duplicate keys: {keys_to_select}")
        position = {key: i for i, key in enumerate(self.keys)}
        if missing := [key for key in keys_to_select if key not in position]:
            raise RuntimeError(f"Keys {missing} not found in current batch.")
        return self._at([position[key] for key in keys_to_select])

    def reorder(self, indexes: list[int]) -> None:
        """Put the samples in another order, in place."""
        if len(indexes) != self.size:
            raise ValueError(
                f"Attempted to reorder with indexes length {len(indexes)} that does not match the batch size "
                f"{self.size}."
            )
        if len(set(indexes)) != len(indexes):
            raise ValueError("Contain duplicate indexes.")
        self.keys = [self.keys[i] for i in indexes]
        self.tags = [self.tags[i] for i in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """`chunks` contiguous parts; the first ones have one sample more where it does not divide."""
        return [self._at(part) for part in even_parts(self.size, chunks)]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """The samples of all parts, in order. Empty parts do not count."""
        parts = [part for part in data if part]
        if not parts:
            return cls()
        first = parts[0]
        for part in parts:
            if part.fields is not None and set(part.fields) != set(first.fields or []):
                raise ValueError(f"Field names do not match for concatenation: {first.fields} and {part.fields}.")
            if part.partition_id != first.partition_id:
                raise ValueError(
                    f"Partition do not match for concatenation: {first.partition_id!r} and {part.partition_id!r}."
                )
        return cls(
            [key for part in parts for key in part.keys],
            [tag for part in parts for tag in part.tags],
            first.partition_id,
            first.fields,
            joined_info([part.extra_info or {} for part in parts], "KVBatchMeta") or None,
        )

    def _at(self, positions: Sequence[int]) -> KVBatchMeta:
        return KVBatchMeta(
            [self.keys[i] for i in positions], [self.tags[i] for i in positions], self.partition_id, self.fields,
            self.extra_info,
        )  # fmt: skip
