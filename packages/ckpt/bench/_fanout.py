"""What a sender spends on each bucket and receiver, at 1, 8 and 64 receivers.

The row "per bucket and receiver" is CPU time of the sender's process: what its main thread spends on receivers
(announcing buckets, waiting, reading answers: `BucketPacker.flush`, `Peers.send` and `Peers.pump`) and all that the
threads of streams spend, less the system calls that take payload, over buckets times receivers. Left out are what is
done once per bucket however many receivers there are (taking it from the source, packing, digesting), and the kernel's
copy of payload, once per receiver over TCP, which is a row of its own. Next to it is the CPU time of all of the sync,
and, for TCP, the same figure of a loop that does nothing but write the same bytes from as many threads.

The receivers are stand-ins in one other process, which speak WIRE.md, throw payload away in the kernel and free what
they are told of at once; so that 64 of them fit a small machine. Buckets are those the transport chooses. The tensors
overlap in memory, one bucket each, so that a sync may be larger than the machine.
"""

import asyncio
import multiprocessing
import os
import selectors
import socket
import threading
import time
import uuid
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from packages.ckpt.bench._child import TOKEN

import rl_ckpt
from rl_bench import Role as BenchRole
from rl_ckpt.protocol.channel import Canceller, Deadline, proof_of
from rl_ckpt.protocol.messages import (
    WIRE_VERSION,
    Begin,
    Bucket,
    Buckets,
    Commit,
    Committed,
    Decoder,
    Encoded,
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
from rl_ckpt.sender.packer import BucketPacker
from rl_ckpt.sender.peers import Peers
from rl_ckpt.tensors.buckets import Codec, Span
from rl_ckpt.transports import TcpReceive, UnixReceive
from rl_ckpt.types import Role, SessionConfig

NUM_RECEIVERS = (1, 8, 64)
GOAL_US = 5
STEP_BYTES = 4096
"""Between the beginnings of two tensors."""
NONCE = bytes(16)
ROOM = bytearray(8 << 20)


class StandIn:
    """One receiver: takes every sync, looks at nothing."""

    def __init__(self, config, canceller, selector):
        transport = self._dialler(config)
        while (channel := transport.dial()) is None:
            time.sleep(0.01)
        self.channel, self._transport, self._canceller, self._selector = channel, transport, canceller, selector
        self._stream, self._sync, self._version, self._opened = None, 0, 0, 0
        self._owed, self._unfreed, self._seal = 0, (), None
        selector.register(channel, selectors.EVENT_READ, self.hear)
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
                self._unfreed += tuple(bucket.sequence for bucket in message.buckets)
                self._owed += sum(bucket.used_bytes for bucket in message.buckets) if self._stream else 0
                self._free()
            elif isinstance(message, Seal):
                self._seal = message
                self._free()
            elif isinstance(message, Commit):
                self._say(Committed(message.version))
                self._ask()
        if self.channel.is_closed:
            for connection in filter(None, (self.channel, self._stream)):
                self._selector.unregister(connection)

    def _begin(self, session):
        self.channel.trust()
        while self.channel.descriptors:
            os.close(self.channel.descriptors.pop())
        if session.num_streams:
            self._stream, self._opened = self._transport.dial_stream(), 1
            self._stream.sendall(encode(Stream(session.ticket, 0, 1), 0))
            self._stream.setblocking(False)
            self._selector.register(self._stream, selectors.EVENT_READ, self.take)
        self._ask()

    def take(self):
        """Throw payload away, in the kernel; it may come before what announces it."""
        try:
            self._owed -= self._stream.recv_into(ROOM, len(ROOM), socket.MSG_TRUNC)
        except BlockingIOError:
            return
        self._free()

    def _free(self):
        if self._owed > 0:
            return
        if self._unfreed:
            self._say(Free(self._unfreed))
            self._unfreed = ()
        if self._seal is not None:
            seal, self._seal = self._seal, None
            self._say(Staged(self._version, seal.digest, seal.num_tensors))


def stand_in(url, token, count, core):
    """The process of all receivers."""
    os.sched_setaffinity(0, core)
    name = url.partition("://")[2]
    config = SessionConfig(address=url, name=name, role=Role.RECEIVE, timeout_s=60, token=token)
    selector, canceller = selectors.DefaultSelector(), Canceller()
    for _ in range(count):
        StandIn(config, canceller, selector)
    while selector.get_map():
        for key, _ in selector.select():
            key.data()


class Clock:
    """CPU time of the main thread inside some functions, seconds."""

    def __init__(self):
        self.spent = 0.0
        self._is_inside = False

    @contextmanager
    def watching(self):
        """Count what is sent inside."""
        with ExitStack() as stack:
            for owner, name in ((BucketPacker, "flush"), (Peers, "send"), (Peers, "pump")):
                stack.enter_context(mock.patch.object(owner, name, self._outermost(getattr(owner, name))))
            yield

    def _outermost(self, function):
        def timed(*arguments):
            if self._is_inside:
                return function(*arguments)
            self._is_inside, since = True, time.thread_time()
            try:
                return function(*arguments)
            finally:
                self._is_inside = False
                self.spent += time.thread_time() - since

        return timed


def stream_seconds(sender):
    """CPU time of the threads of all streams, and of it the system calls that take payload."""
    peers = sender._peers.members.admitted
    streams = [stream.native for peer in peers for stream in peer.writer._streams.values()]
    return sum(each.thread_ns() for each in streams) / 1e9, sum(each.system_ns() for each in streams) / 1e9


def sender_cpu(scheme, count, num_buckets, core):
    """Of two syncs: CPU seconds of all of it, of the kernel's copy of payload, and us per bucket and receiver."""
    token = TOKEN if scheme == "tcp" else None
    url = "tcp://127.0.0.1:0" if token else f"shm://fan-out-{uuid.uuid4().hex[:8]}"
    rows = []
    with rl_ckpt.connect(url, role="send", token=token, timeout_s=60) as sender:
        bucket_bytes = asyncio.run(sender.prepare()).bucket_bytes
        whole = torch.zeros(bucket_bytes * 8 + num_buckets * STEP_BYTES, dtype=torch.uint8)
        weights = {f"t{i}": whole[i * STEP_BYTES :][:bucket_bytes] for i in range(num_buckets)}
        child = multiprocessing.get_context("fork").Process(
            target=stand_in, args=(sender.address, token, count, core), daemon=True
        )
        child.start()
        for version in range(3):
            clock = Clock()
            with clock.watching():
                since = time.process_time()
                before = stream_seconds(sender) if version else (0.0, 0.0)
                sender.send(weights.items(), version=version, num_peers=count)
                spent = time.process_time() - since
                threads, payload = (now - then for now, then in zip(stream_seconds(sender), before, strict=True))
            own = clock.spent + threads - payload
            rows.append((spent, payload, own / count / num_buckets * 1e6))
    child.join(30)
    return bucket_bytes >> 20, list(zip(*rows[1:], strict=True))


def drain(port, count, core):
    """The process of the floor's receivers: throw everything away in the kernel."""
    os.sched_setaffinity(0, core)
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.fileobj.recv_into(ROOM, len(ROOM), socket.MSG_TRUNC):
                    selector.unregister(key.fileobj)


def floor_cpu(count, num_buckets, bucket_bytes, core):
    """The same bytes by a plain loop of `sendmsg`, a thread a receiver: us beside those calls, as for a sender."""
    whole = memoryview(bytearray(bucket_bytes * 8 + num_buckets * STEP_BYTES))
    buckets = [whole[i * STEP_BYTES :][:bucket_bytes] for i in range(num_buckets)]
    rows = []
    for _ in range(2):
        listener = socket.create_server(("127.0.0.1", 0), backlog=count)
        child = multiprocessing.get_context("fork").Process(
            target=drain, args=(listener.getsockname()[1], count, core), daemon=True
        )
        child.start()
        connections = [listener.accept()[0] for _ in range(count)]
        listener.close()
        spent = [0.0] * count

        def write(index, connection, spent=spent):
            for bucket in buckets:
                left = bucket
                while left:
                    since = time.thread_time()
                    num_bytes = connection.sendmsg([left])
                    spent[index] += time.thread_time() - since
                    left = left[num_bytes:]

        since = time.process_time()
        threads = [threading.Thread(target=write, args=given) for given in enumerate(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows.append((time.process_time() - since - sum(spent)) / count / num_buckets * 1e6)
        for connection in connections:
            connection.close()
        child.join(30)
    return rows


def cold_and_warm(run):
    """What a notice of 16 buckets costs a sender, as a call after the other, and with 128 MB copied in between."""
    here, there = socket.socketpair()
    source, target = torch.zeros(128 << 20, dtype=torch.uint8), torch.empty(128 << 20, dtype=torch.uint8)
    span = Span(0, Codec.RAW, 0, 0, 0, 8 << 20, 8 << 20, 1 << 63)
    buckets = tuple(Bucket(i, i, 8 << 20, (span._replace(tensor=i),)) for i in range(16))
    answer = encode(Free(tuple(range(16))), 1)
    decoder = Decoder()
    samples = {"one after the other": [], "128 MB copied in between": []}
    for _ in range(30):
        for name, taken in samples.items():
            if name != "one after the other":
                target.copy_(source)
            since = time.thread_time()
            here.send(Encoded(Buckets(buckets)).for_sync(1))
            sent = time.thread_time() - since
            there.recv(1 << 16)
            there.send(answer)
            since = time.thread_time()
            decoder.feed(here.recv(1 << 16))
            taken.append((sent + time.thread_time() - since) / 16 * 1e6)
    for connection in (here, there):
        connection.close()
    for name, taken in samples.items():
        role = BenchRole.LIMIT if name == "one after the other" else BenchRole.PEER
        run.record("a notice of 16 buckets and its answer, per bucket", name, taken, unit="us", role=role)


def measure(run, cores, pairs=tuple((scheme, count) for scheme in ("shm", "tcp") for count in NUM_RECEIVERS)):
    """Rows for shm and tcp."""
    cold_and_warm(run)
    for scheme, count in pairs:
        num_buckets = 4096 if scheme == "shm" else {1: 2048, 8: 1024, 64: 256}[count]  # TCP copies payload for each
        num_buckets = num_buckets // 4 if run.quick else num_buckets
        size, (spent, payload, each) = sender_cpu(scheme, count, num_buckets, cores)
        what = f"{num_buckets} buckets of {size} MiB to {count} receivers, {scheme}"
        run.record(f"sender's CPU, {what}", "rl-ckpt", spent, unit="s")
        if scheme == "tcp":
            run.record(f"of it the kernel's copy of payload, {what}", "rl-ckpt", payload, unit="s")
            floor = floor_cpu(count, num_buckets, size << 20, cores)
            run.record(f"per bucket and receiver, {what}", "sendmsg loop", floor, unit="us", role=BenchRole.LIMIT)
        run.record(f"per bucket and receiver, {what}", "rl-ckpt", each, unit="us", goal=f"<= {GOAL_US} us")
        per_gigabyte = [us / (size << 20) * 1e6 for us in each]  # us a bucket, in ms a GB
        run.record(f"per GB and receiver, {what}", "rl-ckpt", per_gigabyte, unit="ms/GB")
        whole = [seconds / num_buckets / (size << 20) * 1e12 for seconds in spent]
        run.record(f"all of the sync per GB, packing and digests too, {what}", "rl-ckpt", whole, unit="ms/GB")
