"""Replay buffer: part of a batch are groups that earlier steps have learned from, so that fewer are generated.

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
    from rl_trainer.config.schema import ReplaySection

PARTITION = "history"
"""Partition of the queue with replayable rows."""
_CLAIM_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Replayable group: one that was learned from and may be again."""

    group: HeldGroup
    meta: BatchMeta
    """Its rows in `PARTITION`: the columns that generation wrote, and no other."""

    @property
    def oldest(self) -> int:
        """Weight version of its oldest token."""
        return min(tags["weight_version_min"] for tags in self.meta.tags)


class Replay:
    """Replay buffer: the groups that may be learned from again.

    `copy` gives copies of rows in a partition, so that a step may write columns to them.
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
        """Columns that generation writes."""

    def draw(self, step: int) -> list[Used]:
        """Draw the groups that a step replays: at random, the same ones for the same seed and history."""
        known = [group for group in sorted(self._used) if step - self._used[group].oldest <= self.section.max_age]
        count = min(int(self.section.share * self._batch_size), len(known))
        self._drawn = sorted(random.Random(f"{self._seed}/replay/{step}").sample(known, count))
        return self.drawn

    @property
    def drawn(self) -> list[Used]:
        """The last draw, which is for a later step where batches are generated ahead."""
        return [self._used[group] for group in self._drawn]

    def rows_of(self, used: Sequence[Used], partition: str) -> list[BatchMeta]:
        """Copies of the groups' rows, for a step to write columns to."""
        return [self._copy(each.meta, partition) for each in used]

    def keep(self, batch: BatchMeta, groups: Sequence[HeldGroup], version: int) -> None:
        """Keep the fresh groups of a batch, and drop those that are too old for weights of `version`."""
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
        """State for a checkpoint; the rows are in the queue's snapshot."""
        groups = [used.group for used in self._used.values()]
        return {"columns": [*self.columns], "groups": groups, "drawn": self._drawn}

    @property
    def group_ids(self) -> list[int]:
        """Ids of the groups in the buffer."""
        return [*self._used]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the groups of an earlier process."""
        groups = [HeldGroup(*group) for group in state.get("groups", ())]
        self.columns = tuple(state.get("columns", ()))
        metas = claim_held(self._queue, PARTITION, groups, self.columns)
        for group in groups:
            self._used[group.group_id] = Used(group=group, meta=metas[group.group_id])
        self._drawn = [group for group in state.get("drawn", ()) if group in self._used]


def claim_held(
    queue: TransferQueue, partition: str, groups: Sequence[HeldGroup], columns: Sequence[str]
) -> dict[int, BatchMeta]:
    """Claim the rows of `groups` in a queue that began with a checkpoint's snapshot, and clear all other rows.

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
