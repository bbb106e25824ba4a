"""Agent workers and replicas as replica_sets, with workers that answer at once."""

import threading
from dataclasses import replace

import pytest
import torch

from rl_ckpt import Address, Addresses, DigestShare, ShardSpec, join_digest, tree_digest
from rl_ckpt.traffic import Traffic
from rl_ckpt.types import Placement, SyncReport
from rl_rollout.errors import ServerLostError, WeightUpdateError
from rl_rollout.types import ServerAddress, TensorPart
from rl_trainer.errors import ConfigError, PlacementError, StaleWeightsError, WorkerDiedError
from rl_trainer.pipeline.replicas import AgentReplicas
from rl_trainer.pipeline.weight_sync import WeightSync
from rl_trainer.pipeline.weight_transfer import PLAN_FILE, GatheredTransfer, ShardedTransfer, session_pattern
from rl_trainer.run import resize_as_asked
from rl_trainer.runtime.base import ReplicaSet
from rl_trainer.workers.agent import EvalReport, GroupReport, Job
from rl_trainer.workers.rollout import Receivers
from rl_trainer.workers.weights import LocalWeights

BOTH = (Address("shm://0"), Address("shm://1"))
"""Sessions of both ranks of the trainer."""


class LocalReplicas(ReplicaSet):
    """Members are objects here; one whose number is in `dying` dies at its next call."""

    def __init__(self, make, count, *, replaces=True):
        self.make, self.replaces = make, replaces
        self.workers = {number: make(number) for number in range(count)}
        self.next, self.dying, self.lost = count, set(), {}

    @property
    def members(self):
        return tuple(self.workers)

    def call(self, method, arguments):
        answers = {}
        for member, own in arguments.items():
            if member in self.dying or member not in self.workers:
                answers[member] = WorkerDiedError(f"member {member} died")
                self.lose(member, answers[member])
                continue
            try:
                answers[member] = getattr(self.workers[member], method.__name__)(*own)
            except Exception as error:  # noqa: BLE001 - an answer
                answers[member] = error
        return answers

    def wait(self):
        if not self.workers:
            raise WorkerDiedError("nobody is left")
        return self.members

    def lose(self, member, error):
        self.lost[member] = error
        self.dying.discard(member)
        if self.workers.pop(member, None) is not None and self.replaces:
            self.resize(len(self.workers) + 1)

    def resize(self, num_members):
        if num_members > 9:
            raise PlacementError("there is no room for ten")
        while len(self.workers) < num_members:
            self.workers[self.next] = self.make(self.next)
            self.next += 1

    def take_news(self):
        return []


class Agent:
    def __init__(self, number):
        self.number, self.jobs, self.servers, self.rewards = number, [], None, {}

    def use_servers(self, servers, reward_urls):
        self.servers, self.rewards = [address.url for address in servers[""]], reward_urls

    def prompt_lengths(self, rows):
        return [len(row) for row in rows]

    def evaluate(self, rows, sampling_params):
        return [EvalReport(rewards=tuple(row["reward"] for row in rows), num_right=None, num_failed=0)]

    def submit(self, jobs, sampling_params, partition, group_size):
        self.jobs += [(job, sampling_params["seed"]) for job in jobs]
        return []

    def poll(self):
        done, self.jobs = self.jobs[:1], self.jobs[1:]
        return [report([job for job, _ in done])]


def report(jobs):
    return GroupReport(failed=tuple(job.group_id for job in jobs))


def address(number):
    return ServerAddress(url=f"http://{number}", model="m", pid=number)


def jobs(*groups):
    return [Job(row={}, row_index=group, group_id=group, place=group) for group in groups]


def agents(count, **options):
    replica_set = LocalReplicas(Agent, count, **options)
    return replica_set, AgentReplicas(replica_set, {"": (address(0),)})


def test_a_list_is_split_over_members_and_joined_also_on_death():
    replica_set, workers = agents(3)
    assert workers.prompt_lengths([[0] * n for n in range(7)]) == list(range(7))
    replica_set.dying = {1}
    assert workers.prompt_lengths([[0] * n for n in range(7)]) == list(range(7))
    assert replica_set.members == (0, 2, 3)
    replica_set.dying = {0}
    rewards = [r for each in workers.evaluate([{"reward": n} for n in range(5)], {}) for r in each.rewards]
    assert rewards == [0, 1, 2, 3, 4]


def test_a_group_whose_workers_die_three_times_is_reported():
    replica_set, workers = agents(1)
    job = Job(row={}, row_index=7, group_id=7, place=0, where="train.jsonl, row 7")
    workers.submit([job], {"seed": 7}, "train", 2)
    for attempt in (0, 1, 2):
        (only,) = replica_set.workers.values()
        assert [job.attempt for job, _ in only.jobs] == [attempt]
        replica_set.lose(min(replica_set.members), WorkerDiedError("out of memory"))
        next(iter(replica_set.workers.values())).poll = list  # it takes the group up, and reports nothing yet
        reports = workers.poll()
    assert [(each.failed, each.failures) for each in reports if each.failures] == [((7,), {"worker_died": 1})]
    assert reports[0].last_failure.startswith("train.jsonl, row 7: 3 agent workers died")


@pytest.mark.promise("A dead agent worker is replaced, and its prompts generated with the same seeds")
def test_submitted_groups_outlive_workers_and_keep_their_seeds(monkeypatch):
    replica_set, workers = agents(2)
    workers.submit(jobs(1, 2), {"seed": 7}, "train", 2)
    workers.submit(jobs(3, 4, 5), {"seed": 8}, "train", 2)
    assert [len(worker.jobs) for worker in replica_set.workers.values()] == [3, 2]  # the least busy gets the next
    failed = [group for each in workers.poll() for group in each.failed]
    assert sorted(failed) == [1, 2], "each worker told of its first"
    workers.finish(4)
    lost = {job.group_id for job, _ in replica_set.workers[0].jobs} - {4}
    monkeypatch.setattr(Agent, "poll", lambda self: [])
    replica_set.dying = {0}
    workers.poll()  # it is noticed
    workers.poll()
    again = {(job.group_id, seed) for w in replica_set.workers.values() for job, seed in w.jobs if job.attempt == 1}
    assert again == {(group, 8) for group in lost}, "what is finished is not dealt again"


def test_every_new_worker_knows_the_servers_before_it_works():
    replica_set, workers = agents(1)
    workers.use_servers([address(1), address(2)])
    assert replica_set.workers[0].servers == ["http://1", "http://2"]
    workers.use_rewards([("liked", address(3)), ("polite", address(4)), ("liked", address(5))])
    replica_set.resize(2)
    workers.submit(jobs(1, 2), {"seed": 7}, "train", 2)
    assert replica_set.workers[1].servers == ["http://1", "http://2"]
    rewards = {"liked": [address(3), address(5)], "polite": [address(4)]}
    assert replica_set.workers[0].rewards == replica_set.workers[1].rewards == rewards
    assert len(replica_set.workers[1].jobs) == 1


def test_a_mistake_in_a_worker_ends_the_run():
    replica_set, workers = agents(2)
    replica_set.workers[1].poll = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        workers.poll()


def test_a_mistake_in_a_hold_ends_the_run():
    replica_set, workers = agents(1)
    replica_set.workers[0].hold = lambda: 1 / 0
    workers.submit(jobs(1, 2), {"seed": 7}, "train", 2)
    with pytest.raises(ZeroDivisionError):
        workers.hold()


class Replica:
    num_receivers = 1
    layout = None

    def __init__(self, number):
        self.asked = []
        self.number, self.version, self.error, self.health = number, 0, None, None

    def declare_receivers(self, weights=None):
        if self.health:
            raise self.health
        self.asked.append(weights)
        return Receivers(self.num_receivers, self.layout if weights else None, "n")

    def update_weights(self, address, version):
        if self.error:
            error, self.error = self.error, None
            raise error
        self.version, self.told = version, address
        return version

    def address(self):
        return address(self.number)


class Actor:
    def __init__(self, failures=(), lost=()):
        self.failures, self.lost, self.sent = [*failures], lost, []

    def send_weights(self, version, num_receivers):
        self.sent.append((version, num_receivers))
        if self.failures:
            raise self.failures.pop(0)
        return replace(report_of(version), lost=self.lost)


def report_of(version):
    numbers = {"num_tensors": 0, "num_bytes": 0, "export_s": 0.0, "pack_s": 0.0, "wire_s": 0.0}
    return SyncReport(version=version, verify_s=0.0, wall_s=0.0, **numbers)


def sync_of(actor, count=3, **options):
    replica_set, workers = agents(1)
    replicas = LocalReplicas(Replica, count, **options)
    return replicas, replica_set, WeightSync(actor, replicas, workers, GatheredTransfer(actor, "shm://policy"))


def test_the_dead_are_removed_and_the_version_is_sent_again():
    actor = Actor(failures=[RuntimeError("a receiver went away")])
    replicas, replica_set, weights = sync_of(actor, replaces=False)
    replicas.workers[0].error = WeightUpdateError("called off; the old version serves")
    replicas.workers[1].error = ServerLostError("connection lost")
    weights.sync(5)
    assert actor.sent == [(5, 3), (5, 2)]
    assert {n: replica.version for n, replica in replicas.workers.items()} == {0: 5, 2: 5}
    assert replica_set.workers[0].servers == ["http://0", "http://2"]


def test_weights_no_replica_took_are_resent_to_later_joiners():
    actor = Actor()
    replicas, replica_set, weights = sync_of(actor, count=2)
    for replica in replicas.workers.values():
        replica.error = ServerLostError("connection lost")
    weights.sync(5)
    assert actor.sent == [(5, 2), (5, 2)]
    assert {number: replica.version for number, replica in replicas.workers.items()} == {2: 5, 3: 5}
    assert replica_set.workers[0].servers == ["http://2", "http://3"]


def test_a_lost_replica_is_found_before_the_sender_waits_for_it():
    actor = Actor()
    replicas, _, weights = sync_of(actor, replaces=False)
    replicas.workers[2].health = ServerLostError("connection refused")
    weights.sync(5)
    assert actor.sent == [(5, 2)]
    assert "connection refused" in str(replicas.lost[2])


def test_the_sender_waits_for_every_declared_rank_of_a_replica():
    actor = Actor()
    replicas, _, weights = sync_of(actor, count=2)
    replicas.workers[1].num_receivers = 4
    weights.sync(5)
    assert actor.sent == [(5, 5)]


def test_a_new_replica_is_used_once_it_has_the_weights():
    replicas, replica_set, weights = sync_of(Actor(), count=1)
    weights.sync(1)
    replicas.resize(2)
    assert replica_set.workers[0].servers is None  # still those that it began with
    weights.sync(2)
    assert replica_set.workers[0].servers == ["http://0", "http://1"]


def test_a_failed_sync_without_deaths_ends_the_run_on_both_sides():
    replicas, _, weights = sync_of(Actor(failures=[RuntimeError("digest differs")]))
    replicas.workers[1].error = WeightUpdateError("the sync was called off")
    with pytest.raises(RuntimeError, match="digest differs") as raised:
        weights.sync(5)
    assert raised.value.__notes__ == ["the receiving side: the sync was called off"]
    with pytest.raises(StaleWeightsError, match="version 6 was committed, but peer 2 did not confirm it"):
        sync_of(Actor(lost=("peer 2",)))[2].sync(6)


@pytest.mark.parametrize("is_gone", [False, True], ids=["the sender is there", "it is gone"])
def test_a_late_receiver_of_a_failed_sync_is_notified(is_gone):
    """As long as its sender lives."""
    told, off = [], threading.Event()

    class Sending(Actor):
        def dismiss_receivers(self, why):
            told.append(why)
            off.set()
            if is_gone:
                raise WorkerDiedError("the engine died")

    replicas, _, weights = sync_of(Sending(failures=[RuntimeError("digest differs")]), count=1)

    def wait_for_it(address, version):
        assert off.wait(30), "nobody told it"
        raise WeightUpdateError("called off")

    replicas.workers[0].update_weights = wait_for_it
    with pytest.raises(RuntimeError, match="digest differs") as raised:
        weights.sync(5)
    assert told[0] == "digest differs"
    assert len(told) == 1 or not is_gone
    assert raised.value.__notes__ == ["the receiving side: called off"]


def shard(start, kind=ShardSpec):
    return kind(name="w", shape=(4,), offsets=(start,), sizes=(2,))


class Ranks:
    """Two ranks of an actor that send from shard to shard; what each call is given is noted."""

    def __init__(self, failures=()):
        self.failures, self.told = [*failures], []

    def weight_layout(self):
        self.told.append("layout")
        return [LocalWeights([shard(2 * rank)], {"w": "float32"}, f"node {rank}") for rank in (0, 1)]

    def open_sessions(self, layouts, targets, address):
        self.told.append(f"open {len(layouts)} to {1 if targets is None else len(targets)} {address}")
        return [dict.fromkeys(range(len(targets or [0])), f"shm://{rank}") for rank in (0, 1)]

    def stage_weights(self, version, num_replicas):
        self.told.append(f"stage {version} for {num_replicas}")
        if self.failures:
            raise self.failures.pop(0)
        shares = [DigestShare(torch.float32, (4,)) for _ in (0, 1)]
        for rank, share in enumerate(shares):
            share.add(torch.tensor([1.0, 2.0]), ((2 * rank, 2 * rank + 2),))
        return [{"w": share} for share in shares]

    join_digest = staticmethod(join_digest)

    def commit_weights(self, version, digest):
        self.told.append(f"commit {version}")
        assert digest == tree_digest({"w": torch.tensor([1.0, 2, 1, 2])})
        return [report_of(version), report_of(version)]

    def abort_weights(self, why):
        self.told.append(f"abort: {why}")


def test_shard_ranks_commit_together_with_one_plan():
    actor = Ranks(failures=[RuntimeError("a receiver went away")])
    _, workers = agents(1)
    replicas = LocalReplicas(Replica, 2, replaces=False)
    transfer = ShardedTransfer(actor, session_pattern("shm://job?bucket_bytes=256", delta=True))
    weights = WeightSync(actor, replicas, workers, transfer)
    replicas.workers[0].error = ServerLostError("connection lost")
    weights.sync(5)
    weights.sync(6)
    assert actor.told == [
        *("layout", "open 2 to 1 shm://job-{rank}-{target}?bucket_bytes=256&delta=1"),
        *("stage 5 for 2", "abort: a receiver went away", "stage 5 for 1", "commit 5"),
        *("stage 6 for 1", "commit 6"),
    ]
    assert Addresses.from_json(replicas.workers[1].told) == Addresses((BOTH,))
    assert replicas.workers[1].asked == [{"w": ("float32", (4,))}, None, None], "shapes are told once"
    assert session_pattern("tcp://10.0.0.1:4000", delta=False) == "tcp://{host}:0"


def test_a_receiver_cut_differently_from_the_plan_ends_the_run(tmp_path):
    actor = Ranks()
    _, workers = agents(1)
    replicas = LocalReplicas(Replica, 1)
    replicas.workers[0].num_receivers = 2
    replicas.workers[0].layout = [[shard(start, TensorPart)] for start in (0, 2)]
    transfer = ShardedTransfer(actor, session_pattern("shm://job", delta=False), tmp_path)
    weights = WeightSync(actor, replicas, workers, transfer)
    weights.sync(5)
    plan = Placement.load(tmp_path / PLAN_FILE)
    assert (plan.sizes, plan.source_nodes, plan.target_nodes) == ({"w": 4}, ["node 0", "node 1"], [["n", "n"]])
    assert Traffic(plan).pairs == {(0, 0): 8, (1, 1): 8}
    assert actor.told == ["layout", "open 2 to 2 shm://job-{rank}-{target}", "stage 5 for 1", "commit 5"]
    assert Addresses.from_json(replicas.workers[0].told) == Addresses((BOTH, BOTH))
    replicas.resize(2)
    with pytest.raises(ConfigError, match="replica 1 cuts the weights otherwise than replica 0"):
        weights.sync(6)


def test_without_any_replica_the_run_ends_with_the_last_death():
    replicas, _, weights = sync_of(Actor(), count=1, replaces=False)
    replicas.workers[0].health = ServerLostError("killed")
    with pytest.raises(WorkerDiedError, match="nobody is left"):
        weights.sync(5)


def test_colocated_replicas_and_actor_have_the_memory_in_turn():
    told = []

    class Sleeper(Replica):
        def sleep(self):
            told.append("servers sleep")

        def wake(self, tags):
            told.append(f"servers wake {tags[0]}")

    class Mover(Actor):
        def onload(self):
            told.append("actor onload")

        def offload_optimizer(self):
            told.append("optimizer offload")

        def offload(self):
            told.append("actor offload")

        def send_weights(self, version, num_receivers):
            told.append(f"send {version}")
            return super().send_weights(version, num_receivers)

    class Rewards:
        def wake(self):
            told.append("rewards wake")
            return [("liked", address(len(told)))]

        def sleep(self):
            told.append("rewards sleep")

    replica_set, workers = agents(1)
    mover = Mover()
    transfer = GatheredTransfer(mover, "shm://policy")
    weights = WeightSync(mover, LocalReplicas(Sleeper, 1), workers, transfer, rewards=Rewards(), is_offloaded=True)
    weights.sync(1)
    weights.yield_memory()
    weights.sync(2)
    turn = [
        "optimizer offload",
        "servers wake weights",
        "send {}",
        "actor offload",
        "servers wake kv_cache",
        "rewards wake",
    ]
    sent = [[line.format(version) for line in turn] for version in (1, 2)]
    assert told == [*sent[0], "servers sleep", "rewards sleep", "actor onload", *sent[1]]
    assert replica_set.workers[0].rewards == {"liked": [address(len(told))]}, "it answers elsewhere every time"


@pytest.mark.promise("Lent GPUs go back to the engine before it learns, and requests in flight go on elsewhere")
def test_replicas_hold_engine_gpus_from_a_sync_to_the_next_step():
    told = []

    class Lent(Replica):
        def sleep(self):
            told.append("lent sleep")

        def wake(self, tags):
            told.append(f"lent wake {tags[0]}")

        def address(self):
            return address(f"lent {self.number}")

    class Mover(Actor):
        def onload(self):
            told.append("actor onload")

        def offload_optimizer(self):
            told.append("optimizer offload")

        def offload(self):
            told.append("actor offload")

        def send_weights(self, version, num_receivers, address="shm://policy"):
            told.append(f"send {version} to {num_receivers} at {address}")
            return super().send_weights(version, num_receivers)

    replica_set, workers = agents(1)
    mover, own, lent = Mover(), LocalReplicas(Replica, 2), LocalReplicas(Lent, 1)
    transfer, lent_transfer = (
        GatheredTransfer(mover, "shm://policy"),
        GatheredTransfer(mover, "shm://lent", is_own=True),
    )
    weights = WeightSync(mover, own, workers, transfer, lent=lent, lent_transfer=lent_transfer)

    def servers():
        return replica_set.workers[0].servers

    weights.sync(1)
    weights.yield_memory()
    assert (told, servers()) == (["send 1 to 2 at shm://policy"], ["http://0", "http://1"])
    weights.lends = True
    weights.sync(2)
    assert servers() == ["http://0", "http://1", "http://lent 0"]
    assert {*(each.version for each in (*own.workers.values(), *lent.workers.values()))} == {2}
    weights.yield_memory()
    assert servers() == ["http://0", "http://1"], "what is in flight goes on there"
    weights.lends = False
    weights.sync(3)
    assert [replica.version for replica in (own.workers[0], lent.workers[0])] == [3, 2]
    turn = ["optimizer offload", "lent wake weights", "send 2 to 2 at shm://policy", "send 2 to 1 at shm://lent"]
    turn += ["actor offload", "lent wake kv_cache"]
    ends = ["lent sleep", "actor onload"]
    assert told == ["send 1 to 2 at shm://policy", *turn, *ends, "send 3 to 2 at shm://policy"]
    weights.lends = True
    lent.dying = {0}
    with pytest.raises(WorkerDiedError, match="member 0 died"):
        weights.sync(4)


@pytest.mark.promise("`replicas.json` resizes a run that goes on")
def test_replicas_json_resizes_and_reports_invalid_input(tmp_path):
    replica_sets = {"agent": LocalReplicas(Agent, 1), "rollout": LocalReplicas(Replica, 1)}
    assert resize_as_asked(replica_sets, tmp_path) == []
    file = tmp_path / "replicas.json"
    file.write_text('{"agent": 3, "rollout": 2}')
    assert resize_as_asked(replica_sets, tmp_path) == ["replicas.json: agent 3, rollout 2"]
    assert [len(replica_set.members) for replica_set in replica_sets.values()] == [3, 2]
    assert not file.exists()
    for text, words in (('{"agents": 3}', "agent"), ('{"agent": 10}', "no room for ten"), ("3 agents", "JSON")):
        file.write_text(text)
        (told,) = resize_as_asked(replica_sets, tmp_path)
        assert words in told


def test_a_sync_waiting_for_a_lost_replica_is_restarted():
    """The sender waits for both, and the other replica for the sender: neither knows of the death."""
    off = threading.Event()

    class Waiting(Actor):
        def send_weights(self, version, num_receivers):
            report = super().send_weights(version, num_receivers)
            if len(self.sent) == 1:
                assert off.wait(30), "nobody called it off"
                raise RuntimeError("called off")
            return report

        def call_off(self):
            off.set()

    actor = Waiting()
    replicas, _, weights = sync_of(actor, count=2, replaces=False)

    def die(address, version):
        replicas.lose(0, WorkerDiedError("killed"))
        assert off.wait(30)
        raise ServerLostError("killed")

    replicas.workers[0].update_weights = die
    weights.sync(5)
    assert actor.sent == [(5, 2), (5, 1)]
    assert list(weights.in_use) == [1]
    assert weights.death() is None
    replicas.lose(1, WorkerDiedError("killed"))
    assert isinstance(weights.death(), WorkerDiedError)
