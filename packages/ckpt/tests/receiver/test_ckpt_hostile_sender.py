"""Senders that break the protocol, said by hand: what a receiver believes of them, and what it refuses."""

import threading
import time
from dataclasses import replace

import pytest
import torch

import rl_csrc
from rl_ckpt import DigestError, PeerLostError, ProtocolError, ReceiverState, SyncAbortedError, connect
from rl_ckpt.protocol.channel import Canceller, Deadline
from rl_ckpt.protocol.messages import (
    WIRE_VERSION,
    Abort,
    AbortReason,
    Begin,
    Bucket,
    Buckets,
    Commit,
    Committed,
    Free,
    Hello,
    HelloRole,
    Manifest,
    Ready,
    Seal,
    Session,
    Staged,
)
from rl_ckpt.tensors.buckets import Codec, Span
from rl_ckpt.tensors.digest import model_digest
from rl_ckpt.tensors.spec import TensorSpec
from rl_ckpt.testing import new_name
from rl_ckpt.transports.unix import UnixListener
from rl_ckpt.types import Role, SessionConfig
from rl_csrc.ipc import SharedMemory

CONTENT = torch.arange(256, dtype=torch.uint8)
SPEC = TensorSpec(name="w", dtype=torch.uint8, shape=(256,))
DIGEST = rl_csrc.digest(CONTENT)
BUCKET = Bucket(0, 0, 256, (Span(0, Codec.RAW, 0, 0, 0, 256, 256, DIGEST),))
SEAL = Seal(1, 1, 256, model_digest([(SPEC, DIGEST)]))
VERSION = 5


class Sender:
    """One that says what it is told to, over the ring of `shm`."""

    def __init__(self, address):
        name = address.partition("://")[2]
        self._listener = UnixListener(SessionConfig(address=address, name=name, role=Role.SEND, timeout_s=20))
        self._listener.listen()
        self._memory = SharedMemory.create(4 * 1024, name="test")
        self._memory.map()[:256].copy_(CONTENT)
        self._canceller, self._heard, self._sync = Canceller(), [], 0

    def say(self, *messages, descriptors=()):
        for message in messages:
            sync = 0 if isinstance(message, Hello | Session) else self._sync
            self.channel.send(message, sync, canceller=self._canceller, deadline=Deadline(20), descriptors=descriptors)

    def hear(self, kind):
        """The next message of a kind; None if the receiver has closed the connection."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not self.channel.is_closed:
            self._heard += self.channel.receive()
            while self._heard:
                self._sync, message = self._heard.pop(0)
                if isinstance(message, kind):
                    return message
            time.sleep(0.005)
        return None

    def join(self, hello=None):
        while (channel := self._listener.accept()) is None:
            time.sleep(0.005)
        self.channel = channel
        assert self.hear(Hello)
        self.say(hello or Hello(WIRE_VERSION, HelloRole.SENDER, 1))
        self.say(Session(1024, 4), descriptors=[self._memory.fd])
        return self.hear(Ready)

    def send_all(self, *, bucket=BUCKET, seal=SEAL):
        """One sync, as far as the vote; None if it was refused."""
        self.join()
        self.say(Begin(VERSION), Manifest(0, (SPEC,)), Buckets((bucket,)), seal)
        return self.hear(Staged | Abort)

    def close(self):
        self.channel.close()
        self._listener.close()
        self._memory.close()
        self._canceller.close()


def receive(receiver):
    return dict(receiver.recv(clone=True))


def run(play, receive=receive):
    """What a receiver got or raised, and its version and state after, with a sender that plays so."""
    address, heard = f"shm://{new_name()}", []
    is_over = threading.Event()

    def act():
        sender = Sender(address)
        try:
            play(sender)
        except PeerLostError:
            pass  # it was found out in the middle of a sentence
        except Exception as error:  # noqa: BLE001  # for the test to see
            heard.append(error)
        finally:
            is_over.wait(20)
            sender.close()

    thread = threading.Thread(target=act)
    thread.start()
    with connect(address, role="receive", timeout_s=5) as receiver:
        try:
            got = receive(receiver)
        except Exception as error:  # noqa: BLE001  # for the test to see
            got = error
        outcome = got, receiver.version, receiver.state
        is_over.set()
        thread.join()
    assert heard == []
    return outcome


def test_who_plays_by_the_rules_is_believed():
    def play(sender):
        vote = sender.send_all()
        assert (vote.version, vote.digest, vote.num_tensors) == (VERSION, SEAL.digest, 1)
        sender.say(Commit(VERSION))
        assert sender.hear(Committed) == Committed(VERSION)

    got, version, state = run(play)
    assert torch.equal(got["w"], CONTENT)
    assert (version, state) == (VERSION, ReceiverState.COMMITTED)


@pytest.mark.parametrize("change", [{"num_buckets": 2}, {"num_tensors": 2}, {"num_bytes": 255}, {"digest": 1}], ids=str)
def test_totals_that_are_not_what_arrived_are_not_voted_for(change):
    def play(sender):
        assert isinstance(sender.send_all(seal=replace(SEAL, **change)), Abort)

    error, version, state = run(play)
    assert isinstance(error, DigestError)
    assert (version, state) == (None, ReceiverState.POISONED)


@pytest.mark.parametrize("verdict", [Commit(VERSION + 1), Seal(1, 1, 256, 0)], ids=str)
def test_a_verdict_is_on_the_version_that_was_voted_for(verdict):
    def play(sender):
        assert isinstance(sender.send_all(), Staged)
        sender.say(verdict)
        assert sender.hear(Committed) is None

    error, version, state = run(play)
    assert isinstance(error, ProtocolError)
    assert (version, state) == (None, ReceiverState.POISONED)


@pytest.mark.parametrize("change", [{"sequence": 1}, {"slot": 4}, {"used_bytes": 512}, {"used_bytes": 1280}], ids=str)
def test_a_bucket_out_of_turn_is_not_handed_out(change):
    def play(sender):
        sender.send_all(bucket=replace(BUCKET, **change))

    error, version, state = run(play)
    assert isinstance(error, ProtocolError)
    assert (version, state) == (None, ReceiverState.IDLE)


def test_bytes_with_another_digest_are_not_handed_out():
    def play(sender):
        assert isinstance(sender.send_all(bucket=replace(BUCKET, spans=(BUCKET.spans[0]._replace(digest=1),))), Abort)

    error, version, state = run(play)
    assert isinstance(error, DigestError)
    assert (version, state) == (None, ReceiverState.IDLE)


@pytest.mark.parametrize(
    "hello", [Hello(WIRE_VERSION + 1, HelloRole.SENDER, 1), Hello(WIRE_VERSION, HelloRole.RECEIVER, 1)], ids=str
)
def test_another_wire_version_or_role_is_no_sender(hello):
    def play(sender):
        sender.join(hello)

    error, _, state = run(play)
    assert isinstance(error, ProtocolError)
    assert state is ReceiverState.IDLE


def test_a_sender_silent_on_the_verdict_leaves_it_in_doubt():
    def play(sender):
        assert isinstance(sender.send_all(), Staged)
        sender.channel.close()

    error, version, state = run(play)
    assert isinstance(error, PeerLostError)
    assert (version, state) == (None, ReceiverState.POISONED)


def test_every_bucket_is_freed_before_the_vote():
    def play(sender):
        sender.join()
        sender.say(Begin(VERSION), Manifest(0, (SPEC,)), Buckets((BUCKET,)), SEAL)
        assert sender.hear(Free | Staged) == Free((0,))
        assert sender.hear(Free | Staged).digest == SEAL.digest
        sender.say(Commit(VERSION))
        assert sender.hear(Committed)

    assert run(play)[1] == VERSION


@pytest.mark.parametrize("is_told", [True, False], ids=["called off", "not told"])
def test_staged_tensors_are_restored_after_a_sender_s_cancel(is_told):
    """Who is not told may have missed the commit that the others have."""
    into = {"w": torch.full((256,), 7, dtype=torch.uint8)}

    def play(sender):
        assert isinstance(sender.send_all(), Staged)
        if is_told:
            sender.say(Abort(AbortReason.FAILED, "another receiver voted no"))
        else:
            sender.channel.close()

    error, version, state = run(play, lambda receiver: receiver.recv_into(into, staged=True))
    assert isinstance(error, SyncAbortedError if is_told else PeerLostError)
    assert torch.equal(into["w"], torch.full((256,), 7, dtype=torch.uint8))
    assert (version, state) == (None, ReceiverState.IDLE if is_told else ReceiverState.POISONED)
