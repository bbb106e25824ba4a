"""What a server takes from a peer: bytes that arrived, never bytes that a header announces; and who may speak."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import rl_tq
from rl_bench.waiting import until
from rl_csrc import frames
from rl_tq.protocol import handshake
from rl_tq.protocol.codec import decode, encode

MIB = 1 << 20
TOKEN = "the token of this test"
SERVER = """
import sys, rl_tq
queues = [rl_tq.serve(address, timeout_s=60.0) for address in sys.argv[1:]]
queues[0].put({"a": __import__("torch").zeros(4)}, partition="p")
print(*[queue.address for queue in queues], flush=True)
sys.stdin.read()
"""


class Server:
    """A process that serves queues, and what the kernel says of its memory and threads."""

    def __init__(self, *addresses: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "RL_TQ_TOKEN": TOKEN},
        )  # fmt: skip
        self.addresses = self.process.stdout.readline().split()
        self.address = self.addresses[0]

    def status(self, name: str) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in text.splitlines() if line.startswith(name + ":")).split()[1])

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def rss(self) -> int:
        return 1024 * self.status("VmRSS")

    @contextlib.contextmanager
    def grows_at_most(self, nbytes: int) -> Iterator[None]:
        """At its peak."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # VmHWM begins anew
        before = self.rss()
        yield
        grown = 1024 * self.status("VmHWM") - before
        assert grown <= nbytes, f"the server grew by {grown / MIB:.0f} MiB"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One for all: what it survives is the point."""
    served = Server("tcp://127.0.0.1:0", "shm://", *(["zmq://127.0.0.1:0"] if find_spec("zmq") else []))
    yield served
    served.process.communicate("")


@pytest.fixture
def serve() -> Iterator:
    servers: list[Server] = []

    def start(*addresses: str) -> Server:
        servers.append(Server(*addresses))
        return servers[-1]

    yield start
    for server in servers:
        server.process.communicate("")


def dial(address: str, *, has_token: bool = True) -> socket.socket:
    host, port = address.removeprefix("tcp://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20.0)
    if has_token:
        handshake.introduce(connection, address, 20.0, TOKEN.encode())
    return connection


def header(text_bytes: int, payload_bytes: int = 0) -> bytes:
    return struct.pack("<4sIQ", b"RLTQ", text_bytes, payload_bytes)


def ask(connection: socket.socket, message: dict, payload: bytes = b"") -> dict:
    text = encode({"id": 1, **message})
    connection.sendall(header(len(text), len(payload)) + text + payload)
    return answer(connection)


def answer(connection: socket.socket) -> dict:
    _, text_bytes, payload_bytes = struct.unpack("<4sIQ", receive(connection, 16))
    reply = decode(receive(connection, text_bytes))
    receive(connection, payload_bytes)
    return reply


def receive(connection: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        part = connection.recv(nbytes - len(received))
        assert part, "the server closed the connection"
        received += part
    return bytes(received)


def is_closed(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def is_well(server: Server) -> bool:
    with rl_tq.connect(server.address, timeout_s=20.0, token=TOKEN) as client:
        return client.get(client.put({"b": torch.ones(2)}, partition="well"))["b"].tolist() == [1.0, 1.0]


# What a header announces


@pytest.mark.process
@pytest.mark.parametrize(("text_bytes", "payload_bytes"), [(1 << 30, 0), (65 * MIB, 0), (8, 1 << 40), (8, 1 << 63)])
def test_a_message_over_the_limits_ends_its_connection(server, text_bytes, payload_bytes):
    with server.grows_at_most(8 * MIB), dial(server.address) as connection:
        connection.sendall(header(text_bytes, payload_bytes) + bytes(64))
        assert is_closed(connection)
    assert is_well(server)


@pytest.mark.promise("Memory grows with what arrived, not with what a header claims")
@pytest.mark.process
def test_memory_grows_with_received_and_not_announced_data(server):
    """30 connections announce 60 MiB of text each, and 30 a payload of 3 GiB; each sends 100 KiB."""
    text = encode({"id": 1, "op": "put"})
    with contextlib.ExitStack() as stack, server.grows_at_most(96 * MIB):
        for head in (header(60 * MIB), header(len(text), 3 << 30) + text):
            for _ in range(30):
                connection = stack.enter_context(dial(server.address))
                connection.sendall(head + bytes(100 << 10))
        time.sleep(0.5)
        assert is_well(server)


@pytest.mark.process
@pytest.mark.parametrize("count", [1 << 28, 1 << 62, -1, "x"])
@pytest.mark.parametrize("step", [0, 1])
def test_a_list_of_numbers_is_no_longer_than_what_there_is(server, count, step):
    numbers = {"of": [0, step, count]}
    rows = {"partition": "p", "generation": 1, "rows": numbers, "sample_ids": ()}
    with server.grows_at_most(64 * MIB), dial(server.address) as connection:
        for message in (
            {"op": "ack", **rows, "task": "t", "leases": numbers, "step": 0},
            {"op": "fetch", **rows, "columns": ["a"]},
            {"op": "clear", **rows, "is_whole": False},
        ):
            assert ask(connection, message)["error"] in ("StaleReferenceError", "ValueError", "LeaseLostError")
    assert is_well(server)


def a_put(num_rows: object) -> tuple[dict, bytes]:
    """A request that says so many rows, and an extent of two."""
    extent = frames.encode({"a": torch.zeros(2)})
    block = torch.empty(extent.nbytes, dtype=torch.uint8)
    extent.write_into(block)
    message = {
        "id": 1, "op": "put", "partition": "q", "num_rows": num_rows, "schema": encode({"a": ["dense", "float32", []]}),
        "nbytes": extent.nbytes, "timeout_s": 1.0,
    }  # fmt: skip
    return message, block.numpy().tobytes()


@pytest.mark.process
@pytest.mark.parametrize("num_rows", [1 << 40, 1 << 20, -1, "x", None])
def test_a_put_has_the_rows_that_it_brings(server, num_rows):
    message, block = a_put(num_rows)
    with server.grows_at_most(16 * MIB), dial(server.address) as connection:
        reply = ask(connection, message, block)
        assert reply["error"] == "SchemaError"
        assert "announces" in reply["message"]


# Nesting


NESTED = {
    "lists": b"\x91" * 40_000 + b"\xc0",
    "maps": b"\x81\xa1a" * 40_000 + b"\xc0",
    "lists of an unknown end": b"\xdd\x7f\xff\xff\xff" * 10_000,
}


@pytest.mark.process
@pytest.mark.parametrize("body", NESTED.values(), ids=NESTED)
def test_a_deeply_nested_message_is_refused(server, body):
    whole = b"\x83\xa2id\x01\xa2op\xa5stats\xa1x" + body
    with server.grows_at_most(32 * MIB), dial(server.address) as connection:
        connection.sendall(header(len(whole)) + whole)
        assert is_closed(connection)
    assert is_well(server)


@pytest.mark.parametrize("scheme", ["tcp", "shm", "inproc"])
def test_a_deeply_nested_value_is_refused_where_it_is_put(scheme):
    deep: list = []
    for _ in range(40_000):
        deep = [deep]
    with rl_tq.serve(f"{scheme}://" + ("127.0.0.1:0" if scheme == "tcp" else "")) as queue:
        with pytest.raises(rl_tq.SchemaError):
            queue.put({"j": [deep]}, partition="p")
        with pytest.raises(rl_tq.SchemaError):
            queue.put({"a": torch.zeros(1)}, partition="p", tags=[{"deep": deep}])
        assert queue.stats()["rows"] == 0


@pytest.mark.process
def test_a_deep_tag_is_refused_by_the_server(server):
    """Whatever a client of another make lets through."""
    put, block = a_put(2)
    deep = encode({**put, "tags": [{"a": 1}, {"t": "@"}]}).replace(b"\xa1@", b"\x91" * 400 + b"\x01")
    with dial(server.address) as connection:
        connection.sendall(header(len(deep), len(block)) + deep + block)
        reply = answer(connection)
        assert reply["error"] == "SchemaError"
        assert "nested" in reply["message"]


@pytest.mark.process
@pytest.mark.parametrize(
    "message",
    [{}, {"id": []}, {"op": "bye"}, {"id": 1}, {"id": 1, "op": {}}, {"id": [1], "op": "stats"}, {"id": True, "op": 1}],
)
def test_what_is_no_request_ends_its_connection(server, message):
    with dial(server.address) as connection:
        text = encode(message)
        connection.sendall(header(len(text)) + text)
        assert is_closed(connection)
    assert is_well(server)


@pytest.mark.process
@pytest.mark.parametrize(
    "message",
    [
        {"op": "fetch"},
        {"op": "put"},
        {"op": "snapshot", "path": 3},
        {"op": "wait", "partition": [], "columns": 3},
        {"op": "nothing"},
        {"op": "configure", "partition": "p", "options": {"max_rows": -1}},
    ],
)
def test_a_wrong_request_is_answered_with_an_error(server, message):
    with dial(server.address) as connection:
        assert "error" in ask(connection, message)
        assert ask(connection, {"op": "stats"})["rows"] >= 0


# What one peer may have at once


@pytest.mark.process
def test_answers_that_nobody_reads_are_bounded(serve):
    """A client asks 80 times for 8 MiB, and reads nothing: 640 MiB, of which the server makes 64 MiB and one more."""
    server = serve("tcp://127.0.0.1:0?max_put_bytes=67108864")
    with rl_tq.connect(server.address, token=TOKEN) as client:
        meta = client.put({"a": torch.ones(2, MIB), "b": torch.ones(2)}, partition="q")
    rows = {"partition": "q", "generation": meta.generation, "rows": [meta.rows[1], meta.rows[0]], "sample_ids": ()}
    text = encode({"id": 1, "op": "fetch", **rows, "columns": ["a"]})
    with dial(server.address) as connection, server.grows_at_most(256 * MIB):
        connection.sendall((header(len(text)) + text) * 80)
        time.sleep(1.0)
        assert is_well(server)
        for _ in range(80):  # who reads, is answered
            assert "columns" in answer(connection)


@pytest.mark.process
def test_puts_that_wait_for_room_are_bounded(serve):
    server = serve(f"tcp://127.0.0.1:0?max_put_bytes={16 * MIB}")
    with rl_tq.connect(server.address, token=TOKEN, timeout_s=5.0) as client:
        client.configure("full", max_rows=1)
        client.put({"a": torch.ones(1, MIB)}, partition="full")
        with server.grows_at_most(40 * MIB):
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(12) as pool:
                puts = [
                    pool.submit(client.put, {"a": torch.ones(1, MIB)}, partition="full", timeout_s=1.0)
                    for _ in range(12)
                ]
            errors = [put.exception() for put in puts]
        refused = [error for error in errors if isinstance(error, rl_tq.QueueFullError)]
        assert refused
        assert "max_put_bytes" in str(refused[0])
        assert all(isinstance(error, rl_tq.WaitTimeoutError) for error in errors if error not in refused)
        assert client.put({"a": torch.ones(1, MIB)}, partition="other").rows


@pytest.mark.process
def test_strangers_at_the_door_keep_nobody_out(server):
    """300 connections that say nothing: the oldest are closed, and who has the token comes in."""
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(dial(server.address, has_token=False)) for _ in range(300)]
        assert is_well(server)
        # closed, and not left to prove a token in time
        until(lambda: server.status("Threads") < 200, timeout_s=handshake.LIMIT_S / 2)
        assert receive(strangers[-1], 40)


@pytest.mark.process
def test_connections_of_one_host_are_counted(serve):
    server = serve("tcp://127.0.0.1:0?max_connections=3")
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(dial(server.address))
        with pytest.raises((rl_tq.AddressError, rl_tq.ServerLostError)):
            rl_tq.connect(server.address, token=TOKEN, timeout_s=5.0)
    deadline = time.monotonic() + 20.0
    while True:  # they have left
        with contextlib.suppress(rl_tq.AddressError, rl_tq.ServerLostError):
            assert is_well(server)
            break
        assert time.monotonic() < deadline


@pytest.mark.parametrize("option", ["max_connections=0", "max_put_bytes=many", "max_connections=-1"])
def test_limits_are_positive_numbers(option):
    with pytest.raises(rl_tq.AddressError, match="write a positive number"):
        rl_tq.serve(f"tcp://127.0.0.1:0?{option}")


# Tokens

LOOK = """
import sys, rl_tq
with rl_tq.connect(sys.argv[1], timeout_s=20.0) as client:
    print(client.stats()["rows"])
"""


def look(address: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOOK, address], env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.promise("A token is asked for on loopback too")
@pytest.mark.process
@pytest.mark.parametrize("scheme", ["tcp", "zmq"])
def test_on_loopback_children_inherit_a_token_strangers_lack(scheme, monkeypatch):
    if scheme == "zmq":
        pytest.importorskip("zmq", reason="pyzmq is not installed")
    monkeypatch.delenv("RL_TQ_TOKEN", raising=False)
    with rl_tq.serve(f"{scheme}://127.0.0.1:0", timeout_s=20.0) as queue:
        made = os.environ["RL_TQ_TOKEN"]
        assert len(made) == 64
        assert made not in queue.address
        child = look(queue.address, dict(os.environ))
        assert child.stdout == "0\n", child.stderr
        monkeypatch.setenv("RL_TQ_TOKEN", "0" * 64)
        with pytest.raises(rl_tq.AddressError, match="has another token.*set RL_TQ_TOKEN alike"):
            rl_tq.connect(queue.address, timeout_s=20.0)
        monkeypatch.delenv("RL_TQ_TOKEN")
        with pytest.raises(rl_tq.AddressError, match="this process has none: set RL_TQ_TOKEN"):
            rl_tq.connect(queue.address, timeout_s=20.0)
        with pytest.raises(rl_tq.AddressError, match="has another token"):
            rl_tq.connect(queue.address, token="wrong", timeout_s=20.0)
        with rl_tq.connect(queue.address, token=made, timeout_s=20.0) as client:
            assert client.stats()["rows"] == 0
    with rl_tq.serve(f"{scheme}://127.0.0.1:0", token="given", timeout_s=20.0) as queue:
        assert "RL_TQ_TOKEN" not in os.environ
        rl_tq.connect(queue.address, token="given", timeout_s=20.0).close()


# ZeroMQ


def zmq_stranger(address: str, source: str = ""):
    import zmq

    place, _, key = address.removeprefix("zmq://").partition("/")
    from zmq.utils import z85

    client = zmq.Context.instance().socket(zmq.DEALER)
    public, secret = zmq.curve_keypair()
    client.curve_serverkey, client.curve_publickey, client.curve_secretkey = (
        z85.encode(bytes.fromhex(key)),
        public,
        secret,
    )
    client.linger = 0
    client.connect(f"tcp://{source}{place}")
    return client


@pytest.mark.process
def test_zmq_answers_nobody_without_the_token(server):
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    client = zmq_stranger(server.addresses[2])
    try:
        with server.grows_at_most(48 * MIB):
            for frames in (
                [encode({"op": "stats", "id": 1})],
                [encode({"op": "beat"})],
                [encode({"op": "hello", "id": "x"})],
                [encode({"op": "hello", "id": "x", "nonce": b"1", "proof": 3})],
                [NESTED["lists"]],
                [b"x" * MIB] * 20,
                [],
            ):
                client.send_multipart(frames or [b""])
            assert not client.poll(500)
            client.send(encode({"op": "hello", "id": "x", "nonce": b"1" * 32, "proof": b"0" * 32}))
            assert client.poll(10_000)
            assert decode(client.recv()) == {"op": "refused"}
        assert is_well(server)
        assert zmq.zmq_version_info()
    finally:
        client.close()


def is_shut(connection: socket.socket) -> bool:
    """Whether the other side has ended it, after whatever it said."""
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while connection.recv(1 << 10):
            pass
        return True
    return False


@pytest.mark.process
def test_zmq_counts_connections_of_one_host(serve):
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    server = serve("zmq://127.0.0.1:0?max_connections=2")
    first = rl_tq.connect(server.address, token=TOKEN, timeout_s=20.0)
    with first, rl_tq.connect(server.address, token=TOKEN, timeout_s=20.0):
        with pytest.raises(
            rl_tq.ServerLostError, match=r"has 2 connections of 127\.0\.0\.1 already: .*max_connections"
        ):
            rl_tq.connect(server.address, token=TOKEN, timeout_s=20.0)
        assert first.stats()["rows"] == 4
        other = zmq_stranger(server.address, source="127.0.0.2:0;")  # another host, as far as the server can tell
        key, nonce = bytes.fromhex(server.address.rpartition("/")[2]), b"1" * 32
        proof = handshake.proof(TOKEN.encode(), b"client", key, nonce)
        other.send(encode({"op": "hello", "id": "other", "nonce": nonce, "proof": proof}))
        assert other.poll(20_000)
        assert decode(other.recv()) == {"op": "beat"}
        other.close()
    assert is_well(server)  # they said good-bye


@pytest.mark.process
def test_zmq_strangers_at_the_door_keep_nobody_out(server):
    """300 connections that say nothing: the oldest are closed, and who has the token comes in."""
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    port = int(server.addresses[2].rpartition("/")[0].rpartition(":")[2])
    before = server.descriptors()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(300)]
        until(lambda: not (server.descriptors() > before + 70 or not is_shut(strangers[0])))
        assert not is_shut(strangers[-1])
        rl_tq.connect(server.addresses[2], token=TOKEN, timeout_s=20.0).close()


@pytest.mark.process
@pytest.mark.parametrize("size", [1 << 40, (1 << 63) - 1])
def test_zmq_believes_no_header_of_a_stranger(server, size):
    """The greeting of ZMTP 3.1, and a command frame that announces a long body."""
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    port = int(server.addresses[2].rpartition("/")[0].rpartition(":")[2])
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with server.grows_at_most(16 * MIB), socket.create_connection(("127.0.0.1", port), timeout=20.0) as stranger:
        stranger.sendall(greeting + b"\x06" + struct.pack(">Q", size) + bytes(1 << 16))
        assert_closed_soon(stranger)
    with rl_tq.connect(server.addresses[2], token=TOKEN, timeout_s=20.0) as client:
        assert client.stats()["rows"] >= 0


def assert_closed_soon(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while connection.recv(1 << 16):
            pass


# UNIX sockets: this user's own processes


@pytest.mark.process
@pytest.mark.parametrize("body", [struct.pack("<II", 1 << 30, 0) + bytes(1 << 16), struct.pack("<II", 9, 7)])
def test_a_unix_socket_grows_with_what_arrived(server, body):
    name = "\0rl-tq/" + server.addresses[1].removeprefix("shm://")
    with server.grows_at_most(8 * MIB), contextlib.ExitStack() as stack:
        for _ in range(10):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(name)
            connection.sendall(body)
        time.sleep(0.2)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(name)
        connection.settimeout(20.0)
        for deep in NESTED.values():
            whole = b"\x83\xa2id\x01\xa2op\xa5stats\xa1x" + deep
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack("<II", len(whole), 0) + whole)
        assert_closed_soon(connection)
    with rl_tq.connect(server.addresses[1], timeout_s=20.0) as client:
        assert client.stats()["rows"] >= 0


BOTH_ENDS = """
import torch, rl_tq
from rl_csrc.testing import listening_addresses
queue = rl_tq.serve("nixl://127.0.0.1:0", timeout_s=30.0)
with rl_tq.connect(queue.address, timeout_s=30.0) as client:
    client.get(client.put({"a": torch.zeros(4)}, partition="p"))
    print(*listening_addresses())
queue.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("nixl"), reason="nixl is not installed")
def test_a_queue_over_nixl_on_loopback_listens_nowhere_else():
    """UCX's own listeners ask nobody for a token."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", BOTH_ENDS], capture_output=True, text=True, check=True, env=environment
    )
    found = done.stdout.splitlines()[-1].split()
    assert len(found) >= 3, "UCX is not among them: the test shows nothing"
    assert set(found) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
