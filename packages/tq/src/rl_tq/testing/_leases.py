"""Conformance suite for storages: leases, limits, restore, death and close."""

from __future__ import annotations

import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rl_tq.errors import (
    LeaseLostError,
    PolicyError,
    QueueFullError,
    SchemaError,
    ServerLostError,
    StaleReferenceError,
    TransferQueueError,
    WaitTimeoutError,
)
from rl_tq.registry import connect, serve
from rl_tq.testing._served import SLACK_S, Served, ends_within, until
from rl_tq.types import BatchMeta

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rl_tq.base import TransferQueue


class LeasesContract(Served):
    """Contract of leases, of full partitions, and of clients that close or die."""

    # Leases

    def test_a_claim_is_consumed_by_an_ack_and_comes_back_by_a_nack(
        self, queue: TransferQueue, peer: TransferQueue
    ) -> None:
        """Parts of a claim may be settled apart, by any client; acking twice is nothing; the rest waits for its own."""
        queue.put({"a": torch.arange(4)}, partition="p")
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "task": "t"}
        first = peer.get_meta(**claim, batch_size=4)
        assert first.task == "t"
        assert len(set(first.leases)) == 1
        left, right = pickle.loads(pickle.dumps(first)).chunk(2)
        queue.ack(left, step=3)
        peer.ack(left, step=4)
        queue.nack(right, reason="of a test")
        assert peer.get(queue.get_meta(**claim, batch_size=2))["a"].tolist() == [2, 3]
        with pytest.raises(LeaseLostError, match=r"2 of 2 rows.*leased to"):
            peer.ack(right)
        with pytest.raises(LeaseLostError, match=r"3 of 3 rows.*acked at step 3"):
            peer.nack(BatchMeta.concat([left, right]).reorder([0, 2, 3]))
        counts = queue.stats()["partitions"]["p"]["tasks"]["t"]
        assert (counts["acked"], counts["leased"], counts["dead"]) == (2, 2, 0)
        with pytest.raises(ValueError, match="has no leases"):
            queue.ack(queue.put({"a": torch.zeros(1, dtype=torch.int64)}, partition="p"))

    def test_a_lease_expires_for_a_waiter(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """A waiting client gets the rows; one whose lease expired is fenced off, and so is its put."""
        queue.put({"a": torch.arange(2)}, partition="p")
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "task": "t", "batch_size": 2}
        zombie = peer.get_meta(**claim, lease_s=0.2)
        again = queue.get_meta(**claim, lease_s=600.0, timeout_s=20.0)
        assert again.rows == zombie.rows
        assert again.leases != zombie.leases
        for call in (
            lambda: peer.ack(zombie),
            lambda: peer.extend(zombie, 5.0),
            lambda: peer.put({"b": torch.zeros(2)}, partition="p", sample_ids=zombie),
        ):
            with pytest.raises(LeaseLostError, match="leased to"):
                call()
        peer.put({"b": torch.ones(2)}, partition="p", sample_ids=again)
        queue.extend(again, 600.0)
        queue.ack(again)
        assert queue.stats()["leases_expired"] == 1

    def test_waits_and_leases_end_at_their_deadline(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Not before it, and at most a few seconds after it."""
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "task": "t", "batch_size": 1}
        queue.configure("full", max_rows=1)
        queue.put({"a": torch.zeros(1)}, partition="full")

        def fails(call: Callable[[], Any]) -> Callable[[], None]:
            def run() -> None:
                begun = time.monotonic()
                with pytest.raises(WaitTimeoutError):
                    call()
                assert time.monotonic() - begun >= 0.19

            return run

        for call in (
            lambda: peer.get_meta(**claim, timeout_s=0.2),
            lambda: peer.put({"a": torch.zeros(1)}, partition="full", timeout_s=0.2),
            lambda: peer.admit(partition="full", num_rows=1, timeout_s=0.2),
        ):
            ends_within(fails(call), 0.2 + SLACK_S)
        queue.put({"a": torch.zeros(1)}, partition="p")

        def claims_what_another_let_expire() -> None:
            begun = time.monotonic()
            first = peer.get_meta(**claim, lease_s=0.5)
            second = queue.get_meta(**claim, timeout_s=20.0)
            assert time.monotonic() - begun >= 0.49
            assert second.leases != first.leases
            queue.nack(second)

        queue.configure("p", max_attempts=100)
        ends_within(claims_what_another_let_expire, 0.5 + SLACK_S)

    def test_an_extended_lease_lasts(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Past its first deadline, for its holder alone."""
        queue.put({"a": torch.zeros(1)}, partition="p")
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "task": "t", "batch_size": 1}
        held = peer.get_meta(**claim, lease_s=2.0)
        peer.extend(held, 600.0)
        with pytest.raises(WaitTimeoutError):
            queue.get_meta(**claim, timeout_s=2.5)
        peer.ack(held)
        assert queue.stats()["leases_expired"] == 0

    def test_a_client_that_leaves_gives_its_claims_back(self, queue: TransferQueue) -> None:
        """Rows are not lost because a client fetched them; a clean close costs no attempt."""
        queue.put({"a": torch.arange(3)}, partition="p")
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "task": "t", "batch_size": 3}
        with connect(queue.address, timeout_s=20.0) as client:
            claimed = client.get_meta(**claim)
            client.get(claimed)
            client.ack(claimed.reorder([1]))
        again = queue.get_meta(partition="p", columns=["a"], task="t", batch_size=2, timeout_s=20.0)
        assert queue.get(again)["a"].tolist() == [0, 2]
        assert queue.stats()["partitions"]["p"]["tasks"]["t"]["returns"] == 0

    def test_what_comes_back_too_often_is_a_dead_letter(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """The row keeps its values and says why; the others go on."""
        queue.configure("p", max_attempts=2)
        queue.put({"a": torch.arange(2)}, partition="p", tags=[{"i": 0}, {"i": 1}])
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "task": "t"}
        peer.nack(peer.get_meta(**claim, batch_size=2))
        poison, fine = peer.get_meta(**claim, batch_size=2).chunk(2)
        peer.nack(poison, reason="the reward model failed")
        peer.ack(fine)
        dead = queue.dead_letters("p", "t")
        assert queue.get(dead)["a"].tolist() == [0]
        assert "2 times" in dead.tags[0]["dead_letter"]
        assert "the reward model failed" in dead.tags[0]["dead_letter"]
        with pytest.raises(WaitTimeoutError, match="1 are dead letters"):
            peer.get_meta(**claim, batch_size=1, timeout_s=0.0)
        assert len(queue.dead_letters("nowhere", "t")) == 0

    def test_restore_returns_what_was_acked_since(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Rows return in order, leased ones too; the earlier trainer is fenced off; cleared rows are counted."""
        queue.put({"a": torch.arange(6)}, partition="p")
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "task": "t"}
        metas = [peer.get_meta(**claim, batch_size=1) for _ in range(5)]
        for step, meta in enumerate(metas[:4]):
            peer.ack(meta, step=step)
        queue.clear(metas[3])
        report = queue.restore("p", 1)
        assert (report.num_returned, report.num_cleared, report.num_revoked) == (1, 1, 1)
        with pytest.raises(LeaseLostError):
            peer.ack(metas[4])
        assert queue.get(queue.get_meta(**claim, batch_size=3))["a"].tolist() == [2, 4, 5]
        other: dict[str, Any] = {**claim, "task": "u", "batch_size": 1}
        peer.ack(peer.get_meta(**other), step=2)
        report = queue.restore("p", 1, task="u")  # and not what the first task was given
        assert (report.num_returned, report.num_cleared, report.num_revoked) == (1, 0, 0)
        assert queue.get(queue.get_meta(**other))["a"].tolist() == [0]

    # Limits

    def test_a_full_partition_blocks_until_there_is_room(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Puts wait in order; new columns never wait; the error says who holds the room."""
        queue.configure("p", max_rows=3)
        full = queue.put({"a": torch.zeros(3)}, partition="p")
        queue.get_meta(partition="p", columns=["a"], batch_size=1, task="t")
        with pytest.raises(WaitTimeoutError, match=r"holds 3 of 3 rows \(1 leased\)"):
            peer.put({"a": torch.zeros(1)}, partition="p", timeout_s=0.05)
        with pytest.raises(QueueFullError, match="can never enter"):
            peer.put({"a": torch.zeros(4)}, partition="p")
        with ThreadPoolExecutor(2) as pool:
            two = pool.submit(peer.put, {"a": torch.ones(2)}, partition="p")
            until(lambda: queue.stats()["partitions"]["p"]["waiters"] == 1)
            one = pool.submit(queue.put, {"a": torch.ones(1)}, partition="p")
            until(lambda: queue.stats()["partitions"]["p"]["waiters"] == 2)
            queue.put({"b": torch.zeros(3)}, partition="p", sample_ids=full)
            queue.clear(full.reorder([0]))
            assert queue.stats()["partitions"]["p"]["waiters"] == 2  # one row has room, and may not overtake
            queue.clear(full.reorder([1, 2]))
            assert len(two.result(20)) == 2
            assert len(one.result(20)) == 1
        assert queue.get(two.result())["a"].tolist() == [1.0, 1.0]

    def test_room_is_promised_before_rows_are_made(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """A credit is good for its rows, cannot be used by others, and is returned with its client."""
        queue.configure("p", max_rows=4)
        with connect(queue.address, timeout_s=20.0) as client:
            credit = client.admit(partition="p", num_rows=3)
            with pytest.raises(WaitTimeoutError, match="promised 3 rows, 0 bytes to"):
                peer.admit(partition="p", num_rows=2, timeout_s=0.05)
            for timeout_s in (0.0, 0.05):
                with pytest.raises(WaitTimeoutError):
                    peer.put({"a": torch.zeros(2)}, partition="p", timeout_s=timeout_s)
            client.put({"a": torch.zeros(2)}, partition="p", credit=credit)
            assert queue.stats()["partitions"]["p"]["promised_rows"] == 1
        assert peer.admit(partition="q", num_rows=99).num_rows == 99
        other = peer.admit(partition="p", num_rows=2)
        peer.release(other)
        peer.release(other)
        with pytest.raises(QueueFullError, match="used up or was released"):
            peer.put({"a": torch.zeros(1)}, partition="p", credit=other)
        with pytest.raises(QueueFullError, match="can never enter"):
            peer.admit(partition="p", num_rows=5)
        with pytest.raises(SchemaError, match="for 1 row or more"):
            peer.admit(partition="p", num_rows=0)
        with pytest.raises(ValueError, match="no options"):
            queue.configure("p", max_row=3)

    def test_rows_go_when_all_tasks_are_done_with_them(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """A step later, as `keep_steps` says; a task that was not declared is refused."""
        queue.configure("p", tasks=["s", "t"], keep_steps=1)
        meta = queue.put({"a": torch.arange(2)}, partition="p")
        with pytest.raises(PolicyError, match=r"\['s', 't'\], and 'typo' is none"):
            peer.get_meta(partition="p", columns=["a"], batch_size=1, task="typo")
        for task in ("s", "t"):
            for step in (1, 2):
                claimed = peer.get_meta(partition="p", columns=["a"], batch_size=1, task=task)
                peer.ack(claimed, step=step)
        assert queue.stats()["rows"] == 1
        with pytest.raises(StaleReferenceError):
            queue.get(meta)
        assert queue.get(meta.reorder([1]))["a"].tolist() == [1]

    # The end

    def test_a_snapshot_is_a_queue_again(self, tmp_path: Path) -> None:
        """References to its rows stay good; what was acked stays so, and what was put later is unknown."""
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "task": "t"}
        with serve("inproc://") as queue:
            queue.configure("p", max_attempts=7)
            queue.advance("p", 5)
            data = {"a": torch.arange(4), "r": [torch.full((n,), n) for n in range(4)], "j": list("wxyz")}
            meta = queue.put(data, partition="p", tags=[{"i": i} for i in range(4)])
            queue.ack(queue.get_meta(**claim, batch_size=1), step=3)
            queue.get_meta(**claim, batch_size=1)  # of a client that the next server does not know
            leased = queue.get_meta(**claim, batch_size=1, lease_s=600.0)
            queue.snapshot(tmp_path / "one")
            later = queue.put({"a": torch.arange(1)}, partition="p")
        with serve(self.address, timeout_s=20.0, snapshot=tmp_path / "one") as queue:
            partition = queue.stats()["partitions"]["p"]
            assert (partition["rows"], partition["weight_version"], partition["options"]["max_attempts"]) == (4, 5, 7)
            with pytest.raises(StaleReferenceError):
                queue.get(later)
            queue.ack(leased, step=4)
            queue.snapshot(tmp_path / "two")
        with serve("inproc://", snapshot=tmp_path / "two") as queue:
            batch = queue.get(meta)
            assert batch["a"].tolist() == [0, 1, 2, 3]
            assert [row.tolist() for row in batch["r"].unbind()] == [[], [1], [2, 2], [3, 3, 3]]
            assert batch["j"].tolist() == list("wxyz")
            assert queue.restore("p", 3).num_returned == 1
            again = queue.get_meta(**claim, batch_size=3)
            assert queue.get(again)["a"].tolist() == [1, 2, 3]
            assert again.tags == meta.tags[1:]

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_a_client_is_its_process_s_own(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """A client does not pickle; a forked child gets an error that says to connect, and does no harm."""
        meta = queue.put({"a": torch.ones(1)}, partition="p")
        with pytest.raises(TypeError):
            pickle.dumps(peer)
        child = os.fork()
        if not child:
            num_reported = 0
            try:
                for client in (peer, queue):
                    with pytest.raises(TransferQueueError, match="does not survive a fork"):
                        client.put({"a": torch.ones(1)}, partition="p")
                    with pytest.raises(TransferQueueError, match="does not survive a fork"):
                        client.stats()
                    client.close()
                    num_reported += 1
            finally:
                os._exit(num_reported)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        for client in (queue, peer):
            assert client.get(meta)["a"].tolist() == [1.0]

    def test_closing_ends_the_queue_for_everybody_at_once(self, queue: TransferQueue, peer: TransferQueue) -> None:
        """Waiters and later callers get an error; closing again is a no-op."""
        meta = peer.put({"a": torch.zeros(1)}, partition="p")
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                peer.get_meta(partition="p", columns=["b"], batch_size=1, task="t", timeout_s=600)
            except ServerLostError as error:
                failures.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        until(lambda: queue.stats()["partitions"]["p"]["waiters"] == 1)
        queue.close()
        waiter.join(10)
        assert len(failures) == 1
        assert any(address in str(failures[0]) for address in queue.addresses)
        for call in (lambda: peer.get(meta), peer.stats, queue.stats, lambda: connect(queue.address)):
            with pytest.raises(ServerLostError):
                call()
        queue.close()
        peer.close()
        peer.close()

    def test_a_client_that_leaves_claims_nothing_more(self, queue: TransferQueue) -> None:
        """Its waiters end at once, and what they waited for goes to others."""
        claim: dict[str, Any] = {"partition": "p", "columns": ["a"], "batch_size": 1, "task": "t"}
        with ThreadPoolExecutor(1) as pool, connect(queue.address) as client:
            waiting = pool.submit(client.get_meta, **claim, timeout_s=600)
            until(lambda: queue.stats()["waiters_elsewhere"].get("p") == 1)
            client.close()
            with pytest.raises(ServerLostError, match=r"client.* (was closed|is gone)"):
                waiting.result(10)
        until(lambda: "p" not in queue.stats()["waiters_elsewhere"])
        meta = queue.put({"a": torch.zeros(1)}, partition="p")
        assert queue.get_meta(**claim).rows == meta.rows

    def test_a_client_that_leaves_takes_nothing_along(self, queue: TransferQueue) -> None:
        """Rows of a client that left stay, small or large."""
        with connect(queue.address) as client:
            metas = [client.put({"a": torch.ones(2, n)}, partition=str(n)) for n in (3, 2_000_000)]
        for meta in metas:
            assert queue.get(meta)["a"].unique().tolist() == [1.0]
        with pytest.raises(ServerLostError, match=r"client.* (was closed|is gone)"):
            client.get(metas[0])
