"""Finished groups that an earlier process left in the queue: found again, each with a reference to its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rl_trainer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_tq.base import TransferQueue
    from rl_tq.types import BatchMeta
    from rl_trainer.metrics import HeldGroup

COLUMNS = ("prompt_token_ids", "completion_token_ids", "loss_mask", "rollout_logprobs", "rewards", "group_id")
"""What every pipeline reads of a group."""
_WAIT_S = 10.0


def claim_held(
    queue: TransferQueue, partition: str, groups: Sequence[HeldGroup], columns: Sequence[str] = COLUMNS
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
            partition=partition, columns=columns, batch_size=num_rows, task="resume", timeout_s=_WAIT_S
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
