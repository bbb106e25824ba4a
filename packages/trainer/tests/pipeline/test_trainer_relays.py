"""Transfers of a run over real sessions: relays, which send on to the replicas of a node, and syncs called off."""

import time
import uuid
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

import rl_ckpt
from rl_ckpt import ShardSpec, tree_digest
from rl_rollout import CkptReceiver
from rl_rollout.errors import ServerLostError
from rl_rollout.types import ServerAddress
from rl_trainer.pipeline.replicas import AgentReplicas
from rl_trainer.pipeline.weight_sync import WeightSync
from rl_trainer.pipeline.weight_transfer import ShardedTransfer, session_pattern
from rl_trainer.runtime.base import ReplicaSet
from rl_trainer.workers.loop_thread import LoopThread
from rl_trainer.workers.rollout import Receivers
from rl_trainer.workers.weights import LocalWeights

pytestmark = pytest.mark.process

SHAPE, TIMEOUT_S = (512, 1030), 30.0
AT_ONCE_S = 10.0
"""Far below the deadline: nobody waits for it."""


def spec_of(rank):
    return ShardSpec.on_mesh("w", SHAPE, mesh=(2,), placements=(0,), coordinate=(rank,))


class Ranks:
    """Two ranks of an engine, each said to be on a node of its own, with the sessions of real ones."""

    def __init__(self):
        self.loop = LoopThread("ranks")
        self.senders, self.running, self.num_opened, self.num_bytes = [], [], 0, 0
        self.broken = -1
        self.weights = torch.zeros(SHAPE)

    def weight_layout(self):
        return [LocalWeights([spec_of(rank)], {"w": "float32"}, f"trainer {rank}") for rank in (0, 1)]

    def open_sessions(self, layouts, targets, pattern):
        self.close()
        self.num_opened += 1
        plan = rl_ckpt.ShardPlan(layouts, targets)
        self.senders = [
            rl_ckpt.ShardedSender(
                plan, rank, lambda to, r=rank: pattern.format(rank=r, target=to, host="127.0.0.1"), timeout_s=TIMEOUT_S
            )
            for rank in (0, 1)
        ]
        return self._all(sender.prepare() for sender in self.senders)

    def _all(self, work):
        return [future.result(TIMEOUT_S) for future in [self.loop.start(each) for each in work]]

    def stage_weights(self, version, counts):
        self.counts = counts
        self.running = [self.loop.start(self._stage(rank, version, counts)) for rank in (0, 1)]
        return [future.result(TIMEOUT_S) for future in self.running]

    async def _stage(self, rank, version, counts):
        if rank == self.broken:
            raise RuntimeError("the export broke before it began")
        return await self.senders[rank].stage(
            lambda: [(spec_of(rank), self.weights[256 * rank : 256 * rank + 256])],
            version=version,
            num_replicas=counts if isinstance(counts, int) else counts[rank],
        )

    def join_digest(self, shares):
        return self.senders[0].join_digest(shares)

    def commit_weights(self, version, digest):
        reports = self._all(sender.commit(digest, version) for sender in self.senders)
        self.num_bytes = sum(report.num_bytes * len(report.receipts) for report in reports)
        return reports

    def abort_weights(self, why):
        wait(self.running)  # as a rank takes one call after the other
        self._all(sender.abort(why) for sender in self.senders)

    def call_off(self):
        for future in self.running:
            future.cancel()

    def dismiss_receivers(self, why):
        self._all(sender.dismiss(why) for sender in self.senders)

    def close(self):
        self._all(sender.close() for sender in self.senders)


class Replica:
    """A replica with a real receiver, on the node that it says."""

    def __init__(self, node):
        self.node, self.held, self.receiver, self.addresses, self.is_gone = node, {"w": torch.zeros(SHAPE)}, None, [], 0
        self.late_s = 0.0
        self.loop = LoopThread("replica")

    def declare_receivers(self, weights=None):
        return Receivers(1, None, self.node)

    def update_weights(self, address, version):
        if self.is_gone:
            self.close()
            raise ServerLostError("killed")
        time.sleep(self.late_s)
        if address not in self.addresses:
            self.close()
            self.receiver = CkptReceiver(address, timeout_s=TIMEOUT_S)
            self.addresses.append(address)
        assert self.loop.run(self.receiver.receive_slices(self.held, lambda names: None), TIMEOUT_S) == version
        return version

    def address(self):
        return ServerAddress(url="http://0", model="m", pid=0)

    def close(self):
        if self.receiver is not None:
            self.loop.run(self.receiver.close(), TIMEOUT_S)
            self.receiver = None


class Replicas(ReplicaSet):
    """All members at a time, as processes of their own are called."""

    def __init__(self, nodes):
        self.workers = dict(enumerate(map(Replica, nodes)))

    @property
    def members(self):
        return tuple(self.workers)

    def call(self, method, arguments):
        def one(member, own):
            try:
                return getattr(self.workers[member], method.__name__)(*own)
            except Exception as error:  # noqa: BLE001 - an answer
                if isinstance(error, ServerLostError):
                    self.lose(member, error)
                return error

        with ThreadPoolExecutor(16) as pool:
            return dict(zip(arguments, pool.map(one, arguments, arguments.values()), strict=True))

    def wait(self):
        return self.members

    def lose(self, member, error):
        self.workers.pop(member, None)

    def resize(self, num_members):
        raise NotImplementedError

    def take_news(self):
        return []


class NoAgents(ReplicaSet):
    members = ()

    def call(self, method, arguments):
        return {}

    def wait(self):
        return ()

    lose = resize = take_news = None


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setenv("RL_CKPT_TOKEN", "of the test")
    made = []

    def make(transport, nodes):
        ranks, replicas = Ranks(), Replicas(nodes)
        transfer = ShardedTransfer(ranks, session_pattern(transport, delta=False))
        made.append((ranks, [*replicas.workers.values()]))
        return ranks, replicas, WeightSync(ranks, replicas, AgentReplicas(NoAgents(), {}), transfer)

    yield make
    for ranks, workers in made:
        for end in (ranks, *workers):
            end.close()


def check(ranks, replicas, weights, version):
    ranks.weights = torch.full(SHAPE, float(version))
    report = weights.sync(version)
    assert report.digest == tree_digest({"w": ranks.weights})
    for replica in replicas.workers.values():
        assert torch.equal(replica.held["w"], ranks.weights)


@pytest.mark.promise("Where replicas share a node, one copy of the weights goes there, also after a relay has died")
def test_each_node_gets_one_copy_and_a_dead_relay_is_replaced(job):
    ranks, replicas, weights = job("tcp://127.0.0.1:0", ["n", "n", "m", "n", "trainer 1"])
    for version in (1, 2):
        check(ranks, replicas, weights, version)
    assert ranks.num_opened == 1, "sessions stay while the replicas do"
    assert ranks.counts == [{0: 3}, {0: 3}], "n, m, and the trainer's own node"
    assert ranks.num_bytes == 3 * ranks.weights.nbytes
    taken = [replica.addresses[0].count("tcp://127") for replica in replicas.workers.values()]
    assert taken == [1, 1, 2, 0, 2], "each rank has another relay on n"
    replicas.workers[0].is_gone = True
    check(ranks, replicas, weights, 3)
    assert list(replicas.workers) == [1, 2, 3, 4]
    assert ranks.num_opened == 2
    assert ranks.num_bytes == 3 * ranks.weights.nbytes
    taken = [replica.addresses[-1].count("tcp://127") for replica in replicas.workers.values()]
    assert taken == [1, 2, 1, 2]


def test_no_relay_without_two_receivers_on_a_remote_node(job):
    name = f"shm://relays-{uuid.uuid4().hex[:12]}"
    ranks, replicas, weights = job(name, ["n", "n"])
    check(ranks, replicas, weights, 1)
    assert ranks.counts == 2
    ranks, replicas, weights = job("tcp://127.0.0.1:0", ["n", "m"])
    check(ranks, replicas, weights, 1)
    assert ranks.counts == 2
    replicas.workers[1].is_gone = True
    check(ranks, replicas, weights, 2)
    assert (ranks.counts, ranks.num_opened) == (1, 1), "sessions go on without relays"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("late_s", [0.0, 1.0], ids=["receivers wait", "a receiver comes late"])
def test_a_rank_that_fails_before_it_sends_keeps_nobody_waiting(job, transport, late_s):
    """The other rank waits for votes, the receivers for this rank, and one of them comes when all is over."""
    name = "tcp://127.0.0.1:0" if transport == "tcp" else f"shm://off-{uuid.uuid4().hex[:12]}"
    ranks, replicas, weights = job(name, ["n", "n"])
    check(ranks, replicas, weights, 1)
    ranks.broken, replicas.workers[0].late_s = 0, late_s
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="the export broke before it began") as raised:
        weights.sync(2)
    assert time.monotonic() - start < AT_ONCE_S
    assert "called off" in str(raised.value.__notes__) or "called the sync off" in str(raised.value.__notes__)
    ranks.broken, replicas.workers[0].late_s = -1, 0.0
    check(ranks, replicas, weights, 3)
