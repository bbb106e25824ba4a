"""Deaths and late comers of a sync from shard to shard, with a real process for every rank: all commit, or none."""

import asyncio
import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest
import torch

import rl_ckpt
from rl_ckpt import ShardSpec
from rl_ckpt.testing import new_name
from rl_ckpt.testing.ends import die_at_message
from rl_ckpt.types import join_addresses, relay_address

pytestmark = pytest.mark.process

SHAPE, NUM_TENSORS, TIMEOUT_S = (512, 1024), 8, 30.0
AT_ONCE_S = 15.0
"""Far below the deadline: a death is heard, and not waited for."""
NAMES = [f"layer.{number}" for number in range(NUM_TENSORS)]


def spec_of(name, rank):
    return ShardSpec.on_mesh(name, SHAPE, mesh=(2,), placements=(0,), coordinate=(rank,))


def weights_of(version):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(SHAPE, generator=generator) for name in NAMES}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def prepare_to_die(fault):
    """`at Seal before`: when the first message of that kind is sent."""
    if fault.startswith("at "):
        die_at_message(*fault.split()[1:])


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def next_line():
    return asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))


async def be_sender(name, rank, fault):
    prepare_to_die(fault)
    plan = rl_ckpt.ShardPlan([[spec_of(each, source) for each in NAMES] for source in (0, 1)])
    sender = rl_ckpt.ShardedSender(plan, rank, lambda target: f"shm://{name}-{rank}-{target}", timeout_s=TIMEOUT_S)
    say(json.dumps(await sender.prepare()))
    line = next_line()
    while command := (await line).split():
        version, line = int(command[1]), next_line()

        def shards(version=version):
            for number, (each, tensor) in enumerate(weights_of(version).items()):
                if fault == f"sending {version}" and number == NUM_TENSORS // 2:
                    die()
                yield spec_of(each, rank), tensor[256 * rank : 256 * rank + 256]

        try:
            if command[0] == "stage":
                staging = asyncio.ensure_future(sender.stage(shards, version=version, num_replicas=int(command[2])))
                await asyncio.wait((staging, line), return_when=asyncio.FIRST_COMPLETED)
                if not staging.done():  # the next line calls it off
                    staging.cancel()
                answer = "staged " + base64.b64encode(pickle.dumps(await staging)).decode()
                if fault == f"staged {version}":
                    die()
            elif command[0] == "commit":
                report = await sender.commit(int(command[2]), version)
                answer = f"committed {len(report.receipts)}"
            else:
                await sender.abort("the controller says so")
                await sender.dismiss("the controller says so")
                answer = "aborted"
        except (rl_ckpt.CkptError, asyncio.CancelledError) as error:
            answer = f"failed {error}".replace("\n", " ")
        say(answer)


async def be_receiver(addresses, fault):
    prepare_to_die(fault)
    held = {name: torch.zeros(SHAPE) for name in NAMES}

    def on_landed(names):
        if fault == "landed":
            die()

    async with rl_ckpt.ShardedReceiver(addresses.of(0), timeout_s=TIMEOUT_S) as receiver:
        say("ready")
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            await asyncio.sleep(float(line))
            try:
                version = await receiver.receive_into(held, on_landed=on_landed)
                told = f"version {version} {rl_ckpt.tree_digest(held)}"
            except rl_ckpt.CkptError as error:
                told = f"failed {error}".replace("\n", " ")
            say(told)


class Process:
    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, __file__, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, line):
        try:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def hear(self):
        """Its next line; empty if it is dead."""
        return self.process.stdout.readline().strip()

    def close(self):
        self.process.kill()
        self.process.communicate()


class Job:
    """Two ranks of a trainer, and replicas, as processes; this process is the controller.

    With `has_relay` the first replica sends on what it takes to the others, which the trainer does not know.
    """

    def __init__(self, num_replicas, sender_faults=("", ""), receiver_faults=(), has_relay=False):
        name = new_name()
        self.senders = [Process("send", name, rank, fault) for rank, fault in enumerate(sender_faults)]
        addresses = [json.loads(sender.hear())["0"] for sender in self.senders]
        faults = [*receiver_faults, *[""] * (num_replicas - len(receiver_faults))]
        below = [f"shm://{name}-below-{rank}" for rank in (0, 1)]
        relayed = [relay_address(*each, num_replicas - 1) for each in zip(addresses, below, strict=True)]
        dialled = [relayed, *[below] * (num_replicas - 1)] if has_relay else [addresses] * num_replicas
        self.has_relay = has_relay
        told = [join_addresses([{0: address} for address in own], 1).to_json() for own in dialled]
        self.receivers = [Process("receive", *each) for each in zip(faults, told, strict=True)]
        assert {receiver.hear() for receiver in self.receivers} == {"ready"}

    def sync(self, version, receivers=None, late_s=0.0):
        """What each sender and each receiver says of it."""
        receivers = self.receivers if receivers is None else receivers
        for receiver in receivers[:-1]:
            receiver.tell(0)
        receivers[-1].tell(late_s)
        for sender in self.senders:
            sender.tell(f"stage {version} {1 if self.has_relay else len(receivers)}")
        told = self._hear_staged(version)
        if all(each.startswith("staged") for each in told):
            digest = rl_ckpt.join_digest([pickle.loads(base64.b64decode(each.split()[1])) for each in told])
            for sender in self.senders:
                sender.tell(f"commit {version} {digest}")
            told = [sender.hear() for sender in self.senders]
        else:
            assert {sender.hear() for sender in self.senders} <= {"aborted", ""}
        return told, [receiver.hear() for receiver in receivers]

    def _hear_staged(self, version):
        """What each sender says; once one has failed or died, the others' are called off, as a trainer does."""
        with ThreadPoolExecutor(len(self.senders)) as pool:
            left = {pool.submit(sender.hear): sender for sender in self.senders}
            heard, has_failed = {}, False
            while left:
                for done in wait(left, return_when=FIRST_COMPLETED).done:
                    heard[left.pop(done)] = done.result()
                if not has_failed and not all(each.startswith("staged") for each in heard.values()):
                    has_failed = True
                    for sender in self.senders:
                        sender.tell(f"abort {version}")
        return [heard[sender] for sender in self.senders]

    def close(self):
        for process in (*self.senders, *self.receivers):
            process.close()


@pytest.fixture
def start():
    jobs = []

    def make(*arguments, **options):
        jobs.append(Job(*arguments, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def committed(version):
    return f"version {version} {rl_ckpt.tree_digest(weights_of(version))}"


@pytest.mark.slow
def test_a_receiver_that_comes_a_second_late_is_waited_for(start):
    job = start(2)
    assert job.sync(1, late_s=1.0) == (["committed 2"] * 2, [committed(1)] * 2)


@pytest.mark.promise("The death of any rank of such a sync ends it at once, and a receiver that is late is waited for")
def test_a_receiver_dying_before_its_vote_ends_the_wait(start):
    """The wait ends at once and no receiver commits."""
    job = start(2, receiver_faults=("landed",))
    since = time.monotonic()
    told, (dead, other) = job.sync(1)
    assert time.monotonic() - since < AT_ONCE_S
    assert all(each.startswith("failed") for each in told), told
    assert dead == ""
    assert other.startswith("failed")
    assert job.sync(2, job.receivers[1:]) == (["committed 1"] * 2, [committed(2)])


@pytest.mark.parametrize("fault", ["sending 2", pytest.param("staged 2", marks=pytest.mark.slow)])
def test_a_sender_dying_before_the_decision_changes_nothing(start, fault):
    job = start(2, sender_faults=("", fault))
    assert job.sync(1)[1] == [committed(1)] * 2
    since = time.monotonic()
    told, answers = job.sync(2)
    assert time.monotonic() - since < AT_ONCE_S
    assert told[1] == ""
    assert all(answer.startswith("failed") for answer in answers), answers


def is_off(told, kind, moment):
    """All senders failed, but for one that had the dead receiver's vote by then: it has staged, and is aborted."""
    may_stage = (kind, moment) == ("Staged", "after")
    has_failed = [each.startswith("failed") for each in told]
    rest = [each for each, failed in zip(told, has_failed, strict=True) if not failed]
    return all(has_failed) or (may_stage and any(has_failed) and all(each.startswith("staged") for each in rest))


MOMENTS = ("before", "after")


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["Session", "Begin", "Manifest", "Buckets", "Seal", "Commit"])
def test_a_sender_dying_at_any_message_is_all_or_nothing(kind, moment, start):
    """Either all receivers have the version or none has."""
    job = start(2, sender_faults=("", f"at {kind} {moment}"))
    since = time.monotonic()
    told, answers = job.sync(1)
    assert time.monotonic() - since < AT_ONCE_S
    assert told[1] == "", "it is dead"
    if kind == "Commit":  # the decision was made, and the other rank has told it to both
        assert answers == [committed(1)] * 2
    else:
        assert all(answer.startswith("failed") for answer in answers), answers


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["Ready", "Free", "Staged", "Committed"])
def test_a_receiver_dying_at_any_message_leaves_others_decided(kind, moment, start):
    """The other receiver has what was decided, and the next sync is whole."""
    job = start(2, receiver_faults=(f"at {kind} {moment}",))
    told, (dead, other) = job.sync(1)
    assert dead == ""
    is_committed = all(each.startswith("committed") for each in told)
    assert is_committed or is_off(told, kind, moment), told
    assert is_committed or kind != "Committed"
    assert other == committed(1) if is_committed else other.startswith("failed"), other
    assert job.sync(2, job.receivers[1:]) == (["committed 1"] * 2, [committed(2)])


@pytest.mark.promise("A death behind a relay ends the wait at once, and nobody commits")
def test_a_receiver_death_behind_a_relay_ends_the_wait_at_once(start):
    """No receiver commits."""
    job = start(3, receiver_faults=("", "landed"), has_relay=True)
    since = time.monotonic()
    told, (relay, dead, other) = job.sync(1)
    assert time.monotonic() - since < AT_ONCE_S
    assert all(each.startswith("failed") for each in told), told
    assert dead == ""
    assert relay.startswith("failed")
    assert other.startswith("failed")


@pytest.mark.slow
def test_a_receiver_behind_a_relay_that_comes_late_is_waited_for(start):
    job = start(3, has_relay=True)
    for version in (1, 2):
        assert job.sync(version, late_s=1.0) == (["committed 1"] * 2, [committed(version)] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    "kind", ["Session", "Ready", "Begin", "Manifest", "Buckets", "Free", "Seal", "Staged", "Commit"]
)
def test_a_relay_dying_at_any_message_leaves_no_undecided_data(kind, moment, start):
    """Who is behind it has the version if it was decided and the relay told so, and says that it failed else: at the
    deadline, where it waits for another relay at that address."""
    job = start(3, receiver_faults=(f"at {kind} {moment}",), has_relay=True)
    since = time.monotonic()
    told, (dead, *others) = job.sync(1)
    assert time.monotonic() - since < TIMEOUT_S + AT_ONCE_S
    assert dead == ""
    is_decided = all(each.startswith("committed") for each in told)
    assert is_decided or is_off(told, kind, moment), told
    assert is_decided or kind != "Commit"
    for answer in others:
        assert answer.startswith("failed") or (answer == committed(1) and is_decided), answer


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["Ready", "Free", "Staged", "Committed"])
def test_a_relay_death_leaves_others_with_what_was_decided(kind, moment, start):
    job = start(3, receiver_faults=("", f"at {kind} {moment}"), has_relay=True)
    told, (relay, dead, other) = job.sync(1)
    assert dead == ""
    is_committed = all(each.startswith("committed") for each in told)
    assert is_committed or is_off(told, kind, moment), told
    assert is_committed or kind != "Committed"
    for answer in (relay, other):
        assert answer == committed(1) if is_committed else answer.startswith("failed"), answer


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "send":
        asyncio.run(be_sender(rest[0], int(rest[1]), rest[2]))
    else:
        asyncio.run(be_receiver(rl_ckpt.Addresses.from_json(rest[1]), rest[0]))
