"""Conformance suite for storages: policies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rl_tq import policies
from rl_tq.errors import QueueFullError, SchemaError, StaleVersionError, WaitTimeoutError
from rl_tq.testing._served import Served, until

if TYPE_CHECKING:
    from rl_tq.base import TransferQueue
    from rl_tq.types import BatchMeta, Credit, Policy


class PoliciesContract(Served):
    """Contract of policies: which rows a claim gets."""

    # Policies

    def test_policies(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Rows that each policy returns, in order; each policy on separate rows."""

        def given(batch_size: int, policy: Policy, tags: list[dict[str, Any]]) -> list[int]:
            partition = f"p{next(numbers)}"
            queue.put({"a": torch.arange(len(tags))}, partition=partition, tags=tags)
            meta = peer.get_meta(
                partition=partition, columns=["a"], batch_size=batch_size, task="t", sampler=policy, timeout_s=0.0
            )
            return peer.get(meta)["a"].tolist()

        numbers = iter(range(100))
        assert given(2, policies.AllReady(), [{} for _ in range(4)]) == [0, 1, 2, 3]
        groups = [{"group_id": g} for g in (0, 1, 2, 1, 0, 2)]
        assert given(4, policies.GroupComplete(group_size=2), groups) == [1, 3, 0, 4]
        with pytest.raises(ValueError, match="groups have 4 rows"):
            given(6, policies.GroupComplete(group_size=4), groups)

    def test_a_staleness_policy_decides_about_groups(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """It admits them, chooses what a claim gets, and gives up those that are too old, in flight or finished."""
        policy = policies.GroupAge(max_staleness=1, batch_size=2)
        queue.configure("p", staleness=policy, tasks=["train"])
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "batch_size": 2, "task": "train"}

        def put(*given: Credit, oldest: int = 1) -> BatchMeta:
            tags = [{"group_id": each.group_id, "weight_version_min": oldest} for each in given for _ in range(2)]
            return peer.put({"a": torch.zeros(len(tags))}, partition="p", credit=given, tags=tags)

        def groups(meta: BatchMeta) -> list[Any]:
            return [tags["group_id"] for tags in meta.tags]

        queue.advance("p", 1)
        four = [queue.admit(partition="p", num_rows=2, group_id=group, timeout_s=0.0) for group in range(4)]
        assert [(credit.group_id, credit.weight_version) for credit in four] == [(group, 1) for group in range(4)]
        with pytest.raises(WaitTimeoutError, match=r"0 groups are finished and 4 in flight .* at weight version 1"):
            peer.admit(partition="p", num_rows=2, group_id=4, timeout_s=0.0)
        with pytest.raises(SchemaError, match="group 1 of partition 'p' has a credit"):
            queue.admit(partition="p", num_rows=2, group_id=1)
        with pytest.raises(SchemaError, match="name the group"):
            queue.admit(partition="p", num_rows=2)
        with pytest.raises(SchemaError, match="no staleness policy"):
            queue.admit(partition="q", num_rows=2, group_id=1)
        queue.put({"a": torch.zeros(1)}, partition="p", tags=[{"group_id": 0}])  # without a credit: it is not claimed
        put(four[2])
        with pytest.raises(WaitTimeoutError, match="1 groups are finished and 3 in flight"):
            peer.get_meta(**claim, timeout_s=0.0)
        assert "wanted 2 groups" in peer.explain(**claim)
        put(four[0])
        with pytest.raises(QueueFullError, match="used up or was released"):
            put(four[0], four[1])
        with pytest.raises(SchemaError, match=r"the credits are for the groups \[1\]"):
            peer.put({"a": torch.zeros(1)}, partition="p", credit=four[1], tags=[{"group_id": 7}])
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(peer.admit, partition="p", num_rows=2, group_id=4)
            until(lambda: queue.stats()["partitions"]["p"]["waiters"] == 1)
            taken = peer.get_meta(**claim)  # makes room
            assert groups(taken) == [0, 0, 2, 2]
            assert waiting.result(20).weight_version == 1
        put(four[3])
        report = queue.advance("p", 3)
        assert (report.num_cleared, sorted(report.groups)) == (2, [1, 3, 4])
        peer.ack(taken, step=1)  # cleared, since its only task has consumed it
        assert queue.stats()["partitions"]["p"]["rows"] == 1
        late = queue.admit(partition="p", num_rows=2, group_id=5)
        queue.configure("p", staleness=policies.OldestToken(max_staleness=1, batch_size=2), tasks=["train"])
        with pytest.raises(StaleVersionError, match="group 5 has tokens of weight version 1"):
            put(late)
        put(late, oldest=2)
        queue.restore("p", 0)
        assert groups(queue.get_meta(partition="p", columns=["a"], batch_size=1, task="train")) == [5, 5]

    def test_a_late_sample_never_mixes_groups(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """A group waits for its last sample while others pass; rows of a group that was given come whole or not."""
        claim: dict[str, Any] = {
            "partition": "p", "columns": ["a"], "task": "t", "batch_size": 2,
            "sampler": policies.GroupComplete(group_size=2),
        }  # fmt: skip

        def put(group: str, value: int) -> None:
            queue.put({"a": torch.tensor([value])}, partition="p", tags=[{"group_id": group}])

        for group, value in (("x", 0), ("y", 1), ("z", 2), ("y", 3)):
            put(group, value)
        first = peer.get_meta(**claim)
        assert queue.get(first)["a"].tolist() == [1, 3]
        with pytest.raises(WaitTimeoutError, match="group 'x' has 1 of 2"):
            peer.get_meta(**claim, timeout_s=0.0)
        put("z", 4)
        put("x", 5)
        assert queue.get(peer.get_meta(**claim))["a"].tolist() == [2, 4]
        peer.nack(first)  # comes back whole, before or after the other
        assert queue.get(peer.get_meta(**claim))["a"].tolist() == [0, 5]
        again = peer.get_meta(**claim)
        assert queue.get(again)["a"].tolist() == [1, 3]
        peer.ack(again.reorder([0]))
        peer.nack(again.reorder([1]), reason="of a test")
        assert "others of its group 'y' were acked" in peer.dead_letters("p", "t").tags[0]["dead_letter"]

    def test_explain(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Missing columns, the producers of the rest, and the holders of the other rows."""
        meta = peer.put({"a": torch.zeros(3)}, partition="p", sample_ids=["x", "y", "z"])
        peer.get_meta(partition="p", columns=["a"], batch_size=1, task="t")
        queue.put({"b": torch.zeros(1)}, partition="p", sample_ids=meta.sample_ids[1:2])
        text = queue.explain(partition="p", columns=["a", "b"], batch_size=2, task="t")
        assert "1 of its 3 rows are ready, 1 were given to this task before, 1 are incomplete" in text
        assert "1 lack 'b' ('z'; the rest of them was put by " in text
        assert "leased and not acked: 1 to " in text
