"""What a sender spends on each bucket and receiver beside packing, at 1, 8 and 64 receivers: CPU seconds of its thread.

The receivers are stand-ins in one other process, which speak WIRE.md and free what they are told of at once; so that
64 of them fit a small machine. Buckets are small, because the cost of a message does not depend on what is in them.
Over TCP the calls that hand payload to the kernel are left out: they are the price of the bytes.
"""

import asyncio
import multiprocessing
import os
import selectors
import socket
import time
import uuid

import torch
from packages.ckpt.bench._child import TOKEN

import rl_ckpt
from rl_ckpt.protocol.channel import Canceller, Deadline, proof_of
from rl_ckpt.protocol.messages import (
    WIRE_VERSION,
    Begin,
    Buckets,
    Commit,
    Committed,
    Free,
    Hello,
    HelloRole,
    Proof,
    Ready,
    Seal,
    Session,
    Staged,
    Stream,
    encode,
)
from rl_ckpt.tensors.digest import pack_leaves
from rl_ckpt.transports import TcpReceive, UnixReceive
from rl_ckpt.transports.streams import StreamWriter
from rl_ckpt.types import Role, SessionConfig

BUCKET_BYTES = 1 << 16
NUM_RECEIVERS = (1, 8, 64)
GOAL_US = 5
NONCE = bytes(16)


class StandIn:
    """One receiver: takes every sync, looks at nothing."""

    def __init__(self, config, canceller):
        transport = self._dialler(config)
        while (channel := transport.dial()) is None:
            time.sleep(0.01)
        self.channel, self._transport, self._canceller = channel, transport, canceller
        self.stream, self._sync, self._version, self._opened, self._owed, self._seal = None, 0, 0, 0, 0, None
        self._say(Hello(WIRE_VERSION, HelloRole.RECEIVER, os.getpid(), NONCE), 0)

    @staticmethod
    def _dialler(config):
        class Dialler(TcpReceive if config.token else UnixReceive):
            def map_slots(self, session, channel):
                return []

        return Dialler(config)

    def _say(self, message, sync=None):
        sync = self._sync if sync is None else sync
        self.channel.send(message, sync, canceller=self._canceller, deadline=Deadline(60))

    def _ask(self):
        self._sync += 1
        self._say(Ready(opened=self._opened))

    def hear(self):
        """Answer what is here."""
        for _, message in self.channel.receive():
            if isinstance(message, Hello) and self._transport.token is not None:
                self._say(Proof(proof_of(self._transport.token, "receiver", NONCE, message.nonce)), 0)
            elif isinstance(message, Session):
                self._begin(message)
            elif isinstance(message, Begin):
                self._version = message.version
            elif isinstance(message, Buckets):
                if self.stream is not None:
                    self._owed += sum(bucket.used_bytes for bucket in message.buckets)
                    self.take()
                self._say(Free(tuple(bucket.sequence for bucket in message.buckets)))
            elif isinstance(message, Seal):
                self._say(Staged(self._version, message.digest, message.num_tensors))
            elif isinstance(message, Commit):
                self._say(Committed(message.version))
                self._ask()
        return not self.channel.is_closed

    def _begin(self, session):
        self.channel.trust()
        while self.channel.descriptors:
            os.close(self.channel.descriptors.pop())
        if session.num_streams:
            self.stream, self._opened = self._transport.dial_stream(), 1
            self.stream.sendall(encode(Stream(session.ticket, 0, 1), 0))
            self.stream.setblocking(True)
        self._ask()

    def take(self):
        """Throw the payload away that was announced, in the kernel."""
        room = bytearray(1 << 20)
        while self._owed:
            self._owed -= self.stream.recv_into(room, min(self._owed, len(room)), socket.MSG_TRUNC)


def stand_in(url, token, count, core):
    """The process of all receivers."""
    os.sched_setaffinity(0, core)
    name = url.partition("://")[2]
    config = SessionConfig(address=url, name=name, role=Role.RECEIVE, timeout_s=60, token=token)
    selector, canceller = selectors.DefaultSelector(), Canceller()
    for _ in range(count):
        one = StandIn(config, canceller)
        selector.register(one.channel, selectors.EVENT_READ, one)
    while selector.get_map():
        for key, _ in selector.select():
            if not key.data.hear():
                selector.unregister(key.fileobj)


def packing_cpu_s(weights):
    """CPU seconds of packing and digesting alone, the least of three."""
    slot, times = torch.empty(BUCKET_BYTES, dtype=torch.uint8), []
    for _ in range(3):
        since = time.thread_time()
        for tensor in weights.values():
            pack_leaves(tensor, 0, slot, 0, BUCKET_BYTES)
        times.append(time.thread_time() - since)
    return min(times)


def sender_cpu(scheme, count, num_buckets, core, payload_s):
    """CPU seconds of the sender's thread in three syncs to `count` receivers; and beside packing, us per bucket."""
    weights = {f"t{i}": torch.zeros(BUCKET_BYTES, dtype=torch.uint8) for i in range(num_buckets)}
    token = TOKEN if scheme == "tcp" else None
    url = "tcp://127.0.0.1:0" if token else f"shm://fan-out-{uuid.uuid4().hex[:8]}"
    with rl_ckpt.connect(url, role="send", token=token, timeout_s=60, bucket_bytes=BUCKET_BYTES) as sender:
        asyncio.run(sender.prepare())
        child = multiprocessing.get_context("fork").Process(
            target=stand_in, args=(sender.address, token, count, core), daemon=True
        )
        child.start()
        total = []
        for version in range(4):
            payload_s[0] = 0.0
            since = time.thread_time()
            sender.send(weights.items(), version=version, num_peers=count)
            total.append(time.thread_time() - since - payload_s[0])
    child.join(30)
    packing_s = packing_cpu_s(weights)
    return total[1:], [(spent - packing_s) / count / num_buckets * 1e6 for spent in total[1:]]


def measure(run, cores):
    """Rows for shm and tcp."""
    num_buckets = 512 if run.quick else 2048
    payload_s, write = [0.0], StreamWriter.write_run

    def timed(*arguments):
        since = time.thread_time()
        try:
            return write(*arguments)
        finally:
            payload_s[0] += time.thread_time() - since

    StreamWriter.write_run = staticmethod(timed)
    try:
        for scheme in ("shm", "tcp"):
            for count in NUM_RECEIVERS:
                total, each = sender_cpu(scheme, count, num_buckets, cores, payload_s)
                what = f"{num_buckets} buckets to {count} receivers, {scheme}"
                run.record(f"sender's CPU, {what}", "rl-ckpt", total, unit="s")
                run.record(f"per bucket and receiver, {what}", "rl-ckpt", each, unit="us", goal=f"<= {GOAL_US} us")
    finally:
        StreamWriter.write_run = staticmethod(write)
