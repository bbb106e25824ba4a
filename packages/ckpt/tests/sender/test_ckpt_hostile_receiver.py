"""Receivers that break the protocol, said by hand: what a sender believes of them, and what it refuses."""

import asyncio
import os
import threading
import time
from dataclasses import replace

import pytest
import torch

from rl_ckpt import DigestError, PeerLostError, ProtocolError, SyncAbortedError, connect
from rl_ckpt.protocol.channel import Canceller, Deadline
from rl_ckpt.protocol.messages import (
    WIRE_VERSION,
    Begin,
    Buckets,
    Commit,
    Committed,
    Free,
    Hello,
    HelloRole,
    Ready,
    Seal,
    Session,
    Staged,
    Stream,
)
from rl_ckpt.testing import new_name
from rl_ckpt.transports import UnixReceive
from rl_ckpt.types import Role, SessionConfig

WEIGHTS = {f"t{i}": torch.full((1024,), i, dtype=torch.uint8) for i in range(3)}
NONCE = bytes(16)


class Dialler(UnixReceive):
    def map_slots(self, session, channel):
        return []


class Receiver:
    """One that says what it is told to."""

    def __init__(self, address):
        name = address.partition("://")[2]
        self._dialler = Dialler(SessionConfig(address=address, name=name, role=Role.RECEIVE, timeout_s=20))
        self._canceller, self.heard, self._sync = Canceller(), [], 0
        self.channel = self._dialler.dial()

    def say(self, *messages):
        for message in messages:
            sync = 0 if isinstance(message, Hello | Stream) else self._sync
            self.channel.send(message, sync, canceller=self._canceller, deadline=Deadline(20))

    def hear(self, kind):
        """The next message of a kind; None if the sender has closed the connection."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not self.channel.is_closed:
            self.heard += [message for _, message in self.channel.receive()]
            while self.heard:
                if isinstance(message := self.heard.pop(0), kind):
                    return message
            time.sleep(0.005)
        return None

    def join(self):
        self.say(Hello(WIRE_VERSION, HelloRole.RECEIVER, os.getpid(), NONCE))
        session = self.hear(Session)
        self.channel.trust()
        return session

    def ask(self):
        self._sync += 1
        self.say(Ready())
        return self.hear(Begin)

    def take(self):
        """All of a sync: the vote that is due."""
        begin = self.ask()
        num_taken = 0
        while num_taken < len(WEIGHTS):
            announced = self.hear(Buckets).buckets
            num_taken += len(announced)
            self.say(Free(tuple(bucket.sequence for bucket in announced)))
        seal = self.hear(Seal)
        return Staged(begin.version, seal.digest, seal.num_tensors)

    def close(self):
        self.channel.close()
        self._canceller.close()


def run(play, scheme="shm"):
    """The sender's error, or None, of a sync with a receiver that plays so."""
    heard = []

    def act():
        receiver = Receiver(sender.address)
        try:
            play(receiver)
        except PeerLostError:
            pass  # it was found out in the middle of a sentence
        except Exception as error:  # noqa: BLE001  # for the test to see
            heard.append(error)
        finally:
            is_over.wait(20)
            receiver.close()

    is_over = threading.Event()
    with connect(f"{scheme}://{new_name()}", role="send", timeout_s=3, bucket_bytes=1024) as sender:
        asyncio.run(sender.prepare())
        thread = threading.Thread(target=act)
        thread.start()
        try:
            sender.send(WEIGHTS.items(), version=5)
        except SyncAbortedError as error:
            return error.__cause__
        finally:
            is_over.set()
            thread.join()
            assert heard == []
    return None


def test_who_plays_by_the_rules_is_believed():
    def play(receiver):
        receiver.join()
        receiver.say(receiver.take())
        receiver.say(Committed(receiver.hear(Commit).version))

    assert run(play) is None


def freeing(*sequences):
    def play(receiver):
        receiver.join()
        receiver.ask()
        receiver.hear(Buckets)
        receiver.say(*[Free(some) for some in sequences])

    return play


@pytest.mark.parametrize("sequences", [[(99,)], [(0,), (0,)], [(0, 0)]], ids=["unannounced", "again", "twice at once"])
def test_a_bucket_is_freed_once_and_after_it_was_announced(sequences):
    error = run(freeing(*sequences))
    assert isinstance(error, ProtocolError)
    assert "it freed buckets" in str(error)


def test_a_vote_comes_after_every_bucket_was_freed():
    def play(receiver):
        receiver.join()
        begin = receiver.ask()
        seal = receiver.hear(Seal)
        receiver.say(Staged(begin.version, seal.digest, seal.num_tensors))

    error = run(play)
    assert isinstance(error, ProtocolError)
    assert "it voted, and has freed 0 of" in str(error)


@pytest.mark.parametrize("change", [{"version": 4}, {"digest": 1}, {"num_tensors": 2}], ids=str)
def test_a_vote_for_anything_else_than_was_sent_ends_the_sync(change):
    def play(receiver):
        receiver.join()
        receiver.say(replace(receiver.take(), **change))

    assert isinstance(run(play), DigestError)


def test_what_only_a_sender_says_is_refused():
    def play(receiver):
        receiver.join()
        receiver.ask()
        receiver.say(Commit(5))

    error = run(play)
    assert isinstance(error, ProtocolError)
    assert "it sent Commit, which only a sender may" in str(error)


@pytest.mark.process
@pytest.mark.parametrize(
    "hello",
    [
        Hello(WIRE_VERSION + 1, HelloRole.RECEIVER, 1, NONCE),
        Hello(WIRE_VERSION - 1, HelloRole.RECEIVER, 1, NONCE),
        Hello(WIRE_VERSION, HelloRole.SENDER, 1, NONCE),
    ],
    ids=["newer", "older", "a sender"],
)
def test_another_wire_version_or_role_is_not_in_the_session(hello):
    shared = []

    def play(receiver):
        receiver.say(hello)
        shared.append(receiver.hear(Session))
        assert receiver.channel.is_closed

    assert "0 of 1 receivers came" in str(run(play))
    assert shared == [None]


@pytest.mark.process
@pytest.mark.parametrize("change", [{"index": 1}, {"ticket": 0}], ids=str)
def test_a_stream_belongs_to_a_declared_receiver(change):
    def play(receiver):
        session = receiver.join()
        other = Receiver(receiver._dialler._config.address)
        other.say(replace(Stream(session.ticket, 0, 1), **change))
        assert other.hear(Session) is None
        assert other.channel.is_closed
        other.close()
        time.sleep(0.2)
        receiver.channel.receive()
        assert not receiver.channel.is_closed  # whose ticket it named is still in the session

    assert "did not call receive_weights" in str(run(play, "uds"))
