"""What only TCP has: strangers, a token, a port to find, and a network that can go away without a word."""

import asyncio
import contextlib
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import uuid

import pytest
import torch

from rl_ckpt import AddressError, PeerLostError, PeerTimeoutError, ReceiverState, SyncAbortedError, connect
from rl_ckpt.backends.tcp import TcpStreamReceive
from rl_ckpt.protocol.messages import WIRE_VERSION, Begin, Hello, Proof, Stream, encode
from rl_ckpt.testing import assert_same, failure, receive_all, sample_weights, until
from rl_ckpt.types import Role, SessionConfig

TOKEN = "known to both"


def ends(address, receiver_token=TOKEN, **options):
    sender = connect("tcp://127.0.0.1:0" if address is None else address, role="send", token=TOKEN, **options)

    def receiver():
        return connect(sender.address, role="receive", token=receiver_token, **options)

    return sender, receiver


async def exchange(sender, receiver, version=1):
    report, got = await asyncio.gather(
        sender.send_weights(sample_weights().items(), version=version), receive_all(receiver)
    )
    assert_same(got, sample_weights())
    return report


def test_port_0_is_told_by_prepare():
    async def work():
        sender, receiver = ends(None)
        async with sender:
            metadata = await sender.prepare()
            assert metadata.address == sender.address
            assert not sender.address.endswith(":0")
            async with receiver() as end:
                report = await exchange(sender, end)
                assert f"receiver pid {os.getpid()} at 127.0.0.1:" in report.receipts[0].peer

    asyncio.run(work())


def test_a_sender_gone_right_after_connecting_is_dialled_again(monkeypatch):
    """The kernel no longer knows the address of who has reset a connection; that was an OSError of the receiver's."""
    real, resets = socket.socket.connect, []

    def connect_and_be_reset(self, address):
        if resets:
            real(self, address)
            return
        with socket.create_server(("127.0.0.1", 0)) as dying:
            real(self, dying.getsockname())
            accepted, _ = dying.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        poll = select.poll()
        poll.register(self, 0)
        resets.extend(poll.poll(5000))

    async def work():
        sender, receiver = ends(None)
        async with sender:
            await sender.prepare()
            monkeypatch.setattr(socket.socket, "connect", connect_and_be_reset)
            async with receiver() as end:
                await exchange(sender, end)

    asyncio.run(work())
    assert resets


def test_a_connection_that_was_reset_since_it_was_dialled():
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted.close()
    poll = select.poll()
    poll.register(connection, 0)
    assert poll.poll(5000)
    config = SessionConfig(address="tcp://h:1", name="h:1", role=Role.RECEIVE, timeout_s=1, token="t")
    channel = TcpStreamReceive(config).channel_of(connection)
    with pytest.raises(PeerLostError, match="sender went away"):
        channel.addresses()
    channel.close()


def test_ipv6():
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no ::1: {error}")

    async def work():
        sender, receiver = ends("tcp://[::1]:0")
        async with sender:
            await sender.prepare()
            async with receiver() as end:
                await exchange(sender, end)

    asyncio.run(work())


@pytest.mark.promise("Another token is refused, in a sentence")
def test_another_token_is_refused_in_a_sentence_and_harms_nobody():
    async def work():
        sender, receiver = ends(None, receiver_token="another", timeout_s=60)
        async with sender:
            await sender.prepare()
            right = connect(sender.address, role="receive", token=TOKEN, timeout_s=60)
            async with receiver() as wrong, right:
                refused = asyncio.ensure_future(failure(AddressError, receive_all(wrong)))
                report = await exchange(sender, right)
                assert len(report.receipts) == 1
                version = 1
                while not refused.done():  # the sender answers while it syncs
                    version += 1
                    await exchange(sender, right, version)
                assert "has another token than this end" in str(await refused)

    asyncio.run(work())


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        encode(Hello(WIRE_VERSION, 2, 1), 0),
        encode(Hello(WIRE_VERSION, 2, 1), 0) + encode(Proof(bytes(32)), 0),
        encode(Proof(bytes(32)), 0),
        encode(Stream(12345, 0, 1), 0),
        encode(Hello(99, 2, 1), 0),
        encode(Begin(1), 0)[:8] + (1 << 25).to_bytes(4, "little") + bytes(8),
    ],
    ids=[
        "nothing",
        "http",
        "hello",
        "a wrong proof",
        "proof only",
        "a stranger's stream",
        "another version",
        "a promise of 32 MiB",
    ],
)
def test_nobody_waits_for_a_stranger(said):
    async def work():
        sender, receiver = ends(None, timeout_s=60)
        async with sender:
            await sender.prepare()
            host, port = sender.address.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as unauthenticated_peer:
                unauthenticated_peer.sendall(said)
                async with receiver() as end:
                    assert len((await exchange(sender, end)).receipts) == 1
                    assert len((await exchange(sender, end, 2)).receipts) == 1

    asyncio.run(work())


def test_a_port_that_is_taken():
    async def work():
        with socket.create_server(("127.0.0.1", 0)) as other:
            sender = connect(f"tcp://127.0.0.1:{other.getsockname()[1]}", role="send", token=TOKEN)
            async with sender:
                assert "taken by another sender" in str(await failure(AddressError, sender.prepare()))

    asyncio.run(work())


def test_a_host_that_nobody_knows():
    async def work():
        async with connect("tcp://no-such-host.invalid:1", role="receive", token=TOKEN) as receiver:
            assert "cannot be found" in str(await failure(AddressError, receive_all(receiver)))

    asyncio.run(work())


# Between two network namespaces: real interfaces, and a cable to pull.
END = """
    import asyncio, json, sys
    import torch
    import rl_ckpt

    role, timeout_s, num_syncs = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    weights = {f"t{i}": torch.full((1 << 20,), i, dtype=torch.int32) for i in range(8)}

    def say(*what):
        print(json.dumps(what), flush=True)

    async def send(engine, version):
        await engine.prepare()
        say("open")
        if version == 1:
            sys.stdin.readline()
        return len((await engine.send_weights(weights.items(), version=version)).receipts)

    async def receive(engine, version):
        into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        got = await engine.receive_into(into)
        return got, all(torch.equal(into[name], weights[name]) for name in into)

    async def main():
        say("imported")
        sys.stdin.readline()
        address = "tcp://10.77.0.1:29777?streams=2"
        async with rl_ckpt.connect(address, role=role, timeout_s=timeout_s, token="t") as engine:
            for version in range(num_syncs):
                say(await (send if role == "send" else receive)(engine, version))

    try:
        asyncio.run(main())
    except rl_ckpt.CkptError as error:
        say(type(error).__name__, type(error.__cause__).__name__, str(error))
"""


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)


@pytest.fixture
def namespaces():
    """Two network namespaces with a cable between them: (first, second, cut the cable)."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command")
    first, second = (f"rlck-{uuid.uuid4().hex[:6]}" for _ in range(2))
    made = [ip("netns", "add", name) for name in (first, second)]
    try:
        made.append(ip("link", "add", "ck0", "netns", first, "type", "veth", "peer", "name", "ck0", "netns", second))
        for name, address in ((first, "10.77.0.1/24"), (second, "10.77.0.2/24")):
            made.append(ip("-n", name, "addr", "add", address, "dev", "ck0"))
            made.append(ip("-n", name, "link", "set", "ck0", "up"))
        if refused := [step.stderr for step in made if step.returncode]:
            pytest.skip(f"the kernel makes no network namespaces here: {refused[0].strip()}")
        yield first, second, lambda: ip("-n", first, "link", "set", "ck0", "down")
    finally:
        for name in (first, second):
            ip("netns", "del", name)


def start(namespace, role, timeout_s, num_syncs):
    code = textwrap.dedent(END)
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", code, role, str(timeout_s), str(num_syncs)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go(process):
    process.stdin.write("go\n")
    process.stdin.flush()


def say(process):
    return json.loads(process.stdout.readline() or '["dead"]')


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_a_cable_cut_between_two_network_namespaces_is_found(namespaces):
    first, second, cut = namespaces
    sender, receiver = start(first, "send", 5, 2), start(second, "receive", 5, 2)
    try:
        assert [say(sender), say(receiver)] == [["imported"], ["imported"]]  # the deadlines count from here
        go(sender)
        go(receiver)
        assert [say(sender), say(sender)] == [["open"], [1]]
        assert say(receiver) == [[0, True]]
        assert say(sender) == ["open"]
        assert cut().returncode == 0
        go(sender)
        kind, cause, text = say(sender)
        assert (kind, cause in {"PeerTimeoutError", "PeerLostError"}) == ("SyncAbortedError", True), text
        assert "receiver" in text
        kind, _, text = say(receiver)
        assert kind in {"PeerTimeoutError", "PeerLostError"}, text
        assert "sender" in text
        assert [sender.wait(30), receiver.wait(30)] == [0, 0]
    finally:
        for process in (sender, receiver):
            process.kill()
            process.communicate()


@pytest.mark.process
def test_a_silent_sender_is_awaited_until_the_deadline():
    async def work():
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            address = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
            async with connect(address, role="receive", token=TOKEN, timeout_s=2) as receiver:
                return await failure(PeerTimeoutError, receive_all(receiver))

    assert "did not answer the greeting" in str(asyncio.run(work()))


@pytest.mark.process
def test_a_receiver_that_stops_reading_is_named():
    """The kernel takes some megabytes; then nothing moves any more."""

    async def work():
        sender, receiver = ends(None, timeout_s=3)
        async with sender:
            await sender.prepare()
            async with receiver() as end:
                weights = {f"t{i}": torch.zeros(4 << 20, dtype=torch.uint8) for i in range(16)}
                sending = asyncio.ensure_future(sender.send_weights(weights.items(), version=1))
                stalled = end.receive_weights()
                await anext(stalled)
                error = await failure(SyncAbortedError, sending)
                assert isinstance(error.__cause__, PeerTimeoutError)
                assert f"receiver pid {os.getpid()}" in str(error)
                await failure(Exception, anext(stalled))
                await stalled.aclose()

    asyncio.run(work())


def slow_relay(port, limit, is_over):
    """A port that leads to another one; of what comes back it lets `limit` bytes through, and then next to nothing."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.1)

    def pump(source, sink, limit):
        total = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                total += len(data)
                sink.sendall(data)
                if total > limit:
                    is_over.wait(0.2)
            sink.shutdown(socket.SHUT_WR)

    def serve():
        with contextlib.ExitStack() as stack:
            stack.enter_context(server)
            threads = []
            while not is_over.is_set():
                try:
                    down = stack.enter_context(server.accept()[0])
                except TimeoutError:
                    continue
                down.settimeout(60)
                up = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                up.settimeout(60)
                for arguments in ((down, up, 1 << 40), (up, down, limit)):
                    threads.append(threading.Thread(target=pump, args=arguments))
                    threads[-1].start()
            for thread in threads:
                thread.join(60)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread, server.getsockname()[1]


@pytest.mark.process
def test_a_cancelled_slow_receiver_knows_its_tensors_are_mixed():
    async def work():
        sender, _ = ends(None, timeout_s=60)
        weights = {"w": torch.zeros(16 << 20, dtype=torch.uint8)}
        into = {"w": torch.ones(16 << 20, dtype=torch.uint8)}
        async with sender:
            await sender.prepare()
            _, port = slow_relay(int(sender.address.rpartition(":")[2]), 1 << 20, is_over)
            async with connect(f"tcp://127.0.0.1:{port}", role="receive", token=TOKEN, timeout_s=60) as receiver:
                receiving = asyncio.ensure_future(receiver.receive_into(into))
                sending = asyncio.ensure_future(sender.send_weights(weights.items(), version=1))
                await until(lambda: not into["w"][1000])
                receiving.cancel()
                await failure(asyncio.CancelledError, asyncio.wait_for(receiving, 60))
                await failure(SyncAbortedError, asyncio.wait_for(sending, 60))
                assert receiver.state is ReceiverState.POISONED

    is_over = threading.Event()
    try:
        asyncio.run(work())
    finally:
        is_over.set()
