"""Replay: part of a batch are groups that earlier steps have learned from, so that fewer have to be generated.

Rollout replay as of arXiv 2506.05316, section 4.2, reusing history as RhymeRL does (2508.18588): a group whose rewards
differ is kept, with the log-probs of the weights that sampled it, and may be drawn again while its tokens are young
enough: one that is `max_age` versions old has been learned from `1 + max_age` times at most, across resumes too. A
prompt still counts as used once, by the step that generated it (`rows` in prompts.jsonl).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_trainer.errors import InputError
from rl_trainer.metrics import HeldGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_tq.base import TransferQueue
    from rl_tq.types import BatchMeta
    from rl_trainer.config import ReplaySection

PARTITION = "history"
"""Of the queue: rows that may be learned from again."""
_CLAIM_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """A group that was learned from and may be again."""

    group: HeldGroup
    """Which."""
    meta: BatchMeta
    """Its rows in `PARTITION`: the columns that generation wrote, and no other."""

    @property
    def oldest(self) -> int:
        """Weight version of its oldest token."""
        return min(tags["weight_version_min"] for tags in self.meta.tags)


class Replay:
    """The groups that may be learned from again.

    Args:
        section: How many, how often, and how old.
        batch_size: Groups of a step.
        seed: Of the run: seeds the draws.
        queue: Has the rows.
        copy: `(rows, partition) -> rows`: the same columns once more, of rows that nothing else is written to.
    """

    def __init__(
        self,
        section: ReplaySection,
        *,
        batch_size: int,
        seed: int,
        queue: TransferQueue,
        copy: Callable[[BatchMeta, str], BatchMeta],
    ) -> None:
        self.section, self._batch_size, self._seed = section, batch_size, seed
        self._queue, self._copy = queue, copy
        self._used: dict[int, Used] = {}
        self._drawn: list[int] = []
        self.columns: tuple[str, ...] = ()
        """Those that generation writes."""

    def draw(self, step: int) -> list[Used]:
        """The groups that a step learns from once more: at random, the same ones for the same seed and history."""
        known = [group for group in sorted(self._used) if step - self._used[group].oldest <= self.section.max_age]
        count = min(int(self.section.share * self._batch_size), len(known))
        self._drawn = sorted(random.Random(f"{self._seed}/replay/{step}").sample(known, count))
        return self.drawn

    @property
    def drawn(self) -> list[Used]:
        """What was drawn last: for a step to come, where batches are made ahead."""
        return [self._used[group] for group in self._drawn]

    def rows_of(self, used: Sequence[Used], partition: str) -> list[BatchMeta]:
        """Rows of these groups for a step to write to."""
        return [self._copy(each.meta, partition) for each in used]

    def keep(self, batch: BatchMeta, groups: Sequence[HeldGroup], version: int) -> None:
        """Take over the fresh groups of a batch that was learned from, for weights of `version` or newer."""
        self.columns = batch.columns
        rows: dict[int, list[int]] = {}
        for row in rows_with_signal(batch):
            rows.setdefault(batch.tags[row]["group_id"], []).append(row)
        for group in groups:
            if group.group_id in rows:
                meta = self._copy(batch.reorder(rows[group.group_id]), PARTITION)
                self._used[group.group_id] = Used(group=group, meta=meta)
        for number, used in [*self._used.items()]:
            if version - used.oldest > self.section.max_age:
                self._queue.clear(used.meta)
                del self._used[number]

    def state(self) -> dict[str, Any]:
        """For a checkpoint; the rows are in the queue's snapshot."""
        groups = [used.group.as_tuple() for used in self._used.values()]
        return {"columns": [*self.columns], "groups": groups, "drawn": self._drawn}

    def restore(self, state: Mapping[str, Any]) -> int:
        """Take over the history of an earlier process; returns its highest group id, or 0."""
        groups = [HeldGroup.from_tuple(tuple(group)) for group in state.get("groups", ())]
        self.columns = tuple(state.get("columns", ()))
        metas = claim_held(self._queue, PARTITION, groups, self.columns)
        for group in groups:
            self._used[group.group_id] = Used(group=group, meta=metas[group.group_id])
        self._drawn = [group for group in state.get("drawn", ()) if group in self._used]
        return max(self._used, default=0)


def claim_held(
    queue: TransferQueue, partition: str, groups: Sequence[HeldGroup], columns: Sequence[str]
) -> dict[int, BatchMeta]:
    """The rows of each of `groups` in a queue that began with a checkpoint's snapshot; all other rows are cleared.

    What else is there was written after the step that the checkpoint is of, and will be generated again. The references
    are to `columns`.

    Raises:
        InputError: a group is not there, so the snapshot is not this checkpoint's.
    """
    if not groups:
        return {}
    num_rows = queue.stats()["partitions"].get(partition, {}).get("rows", 0)
    found: dict[int, BatchMeta] = {}
    if num_rows:
        rows = queue.get_meta(
            partition=partition, columns=columns, batch_size=num_rows, task="resume", timeout_s=_CLAIM_WAIT_S
        )
        rows = replace(rows, task="", leases=())
        wanted = {(group.group_id, group.attempt) for group in groups}
        left = rows.filter(lambda tags: (tags["group_id"], tags["attempt"]) not in wanted)
        kept = rows.filter(lambda tags: (tags["group_id"], tags["attempt"]) in wanted)
        found = {int(str(group)): meta for group, meta in kept.groupby("group_id").items()} if len(kept) else {}
        if len(left):
            queue.clear(left)
    if lost := [group.group_id for group in groups if group.group_id not in found]:
        raise InputError(f"the checkpoint's queue has no rows of the groups {lost}; resume from another checkpoint")
    return found


def rows_with_signal(batch: BatchMeta) -> list[int]:
    """Rows of the groups whose rewards differ: of the others every group-relative advantage is 0 (arXiv 2503.14476)."""
    rewards: dict[int, set[float]] = {}
    for tags in batch.tags:
        rewards.setdefault(tags["group_id"], set()).add(tags["reward"])
    return [index for index, tags in enumerate(batch.tags) if len(rewards[tags["group_id"]]) > 1]
