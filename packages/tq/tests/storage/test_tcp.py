"""What `tcp` promises across hosts, here two network namespaces, and against strangers at its port."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import rl_tq

CAN_MAKE_NAMESPACES = os.geteuid() == 0 and shutil.which("ip") is not None and (
    subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0
)  # fmt: skip

SERVER = """
import sys, rl_tq
queue = rl_tq.serve("tcp://10.77.0.1:0", timeout_s=60.0)
print(queue.address, flush=True)
sys.stdin.read()
queue.close()
"""

CLIENT = """
import sys, torch, rl_tq
queue = rl_tq.connect(sys.argv[1], timeout_s=60.0)
meta = queue.get_meta(partition="p", columns=["x", "r", "t"], batch_size=3, task="t")
batch = queue.get(meta)
assert batch["x"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], batch["x"]
assert [row.tolist() for row in batch["r"].unbind()] == [[], [0], [0, 1]]
assert batch["t"].tolist() == ["a", {"b": 1}, None]
queue.put({"y": batch["x"].sum(1)}, partition="p", sample_ids=meta)
queue.ack(meta.reorder([0]), step=2)
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def namespaces() -> Iterator[tuple[list[str], list[str]]]:
    """Commands that run something on either of two hosts that are joined by a wire."""
    names = [f"rltq-{os.getpid()}-{side}" for side in "ab"]
    made = []

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)

    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        wires = [f"tq{os.getpid() % 100000}{side}" for side in "ab"]
        ip("link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
        for name, wire, number in zip(names, wires, (1, 2), strict=True):
            ip("link", "set", wire, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", wire)
            ip("-n", name, "link", "set", wire, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]]
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode().strip()}")
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=30)


@pytest.fixture
def start(monkeypatch) -> Iterator:
    monkeypatch.setenv("RL_TQ_TOKEN", "a secret of a test")
    started = []

    def run(prefix: list[str], code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [*prefix, sys.executable, "-c", code, *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.communicate()


PRODUCER = """
import sys, torch, rl_tq
queue = rl_tq.connect(sys.argv[1], timeout_s=60.0)
queue.put({"x": torch.arange(6.0).view(3, 2), "r": [torch.arange(i) for i in range(3)], "t": ["a", {"b": 1}, None]},
          partition="p")
print("put", flush=True)
sys.stdin.read()
"""

LOOK = """
import sys, rl_tq
queue = rl_tq.connect(sys.argv[1], timeout_s=60.0)
meta = queue.get_meta(partition="p", columns=["y"], batch_size=2, task="t")
print(queue.get(meta)["y"].tolist(), queue.stats()["partitions"]["p"]["tasks"]["t"]["acked"], flush=True)
"""


@pytest.mark.promise("Claims of a process that is killed come back")
@pytest.mark.process
@pytest.mark.skipif(not CAN_MAKE_NAMESPACES, reason="only root can make network namespaces")
def test_two_hosts_exchange_rows_and_survive_a_consumer(namespaces, start):
    """Put on one, claimed and extended on the other, whose death gives the rest back."""
    here, there = namespaces
    server = start(here, SERVER)
    address = server.stdout.readline().strip()
    assert address.startswith("tcp://10.77.0.1:")
    assert start(here, PRODUCER, address).stdout.readline() == "put\n"
    client = start(there, CLIENT, address)
    assert client.stdout.readline() == "done\n"
    client.send_signal(signal.SIGKILL)
    assert start(there, LOOK, address).stdout.readline() == "[5.0, 9.0] 1\n"


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"RLTQ\x02\0\0\0" + bytes(8) + b"[]"])
def test_a_stranger_is_dropped_and_harms_nobody(garbage):
    with rl_tq.serve("tcp://127.0.0.1:0", timeout_s=20.0) as queue:
        host, port = queue.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=20.0) as stranger:
            stranger.recv(40, socket.MSG_WAITALL)
            stranger.sendall(garbage + bytes(100))
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
        with rl_tq.connect(queue.address, timeout_s=20.0) as client:
            assert client.get(client.put({"a": torch.ones(1)}, partition="p"))["a"].tolist() == [1.0]


def test_a_damaged_extent_is_refused_and_the_client_goes_on():
    with rl_tq.serve("tcp://127.0.0.1:0", timeout_s=20.0) as queue, rl_tq.connect(queue.address) as client:
        put = {
            "op": "put", "partition": "p", "num_rows": 1, "schema": {"a": ["dense", "float32", []]}, "nbytes": 64,
            "timeout_s": 1.0,
        }  # fmt: skip
        for payload in ([], [torch.zeros(64, dtype=torch.uint8)]):
            with pytest.raises(rl_tq.SchemaError, match="without its values|cannot be read"):
                client._request(put, payload, 1.0)
        with pytest.raises(rl_tq.TransferQueueError, match="there is no operation 'nothing'"):
            client._call({"op": "nothing"}, 1.0)
        assert client.stats()["rows"] == 0


def test_addresses():
    for address in ("tcp://nowhere", "tcp://host:port", "tcp://:1", "tcp://h:99999"):
        with pytest.raises(rl_tq.AddressError, match="write tcp://HOST:PORT"):
            rl_tq.connect(address)
    with rl_tq.serve("tcp://127.0.0.1:0") as queue, pytest.raises(rl_tq.AddressError, match="cannot be served"):
        rl_tq.serve(queue.address)
    with rl_tq.serve("tcp://[::1]:0") as queue, rl_tq.connect(queue.address) as client:
        assert client.stats()["rows"] == 0


@pytest.mark.process
def test_a_killed_server_is_lost_at_once(start):
    server = start([], SERVER.replace("10.77.0.1", "127.0.0.1"))
    with rl_tq.connect(server.stdout.readline().strip(), timeout_s=60.0) as client:
        client.put({"a": torch.ones(1)}, partition="p")
        server.send_signal(signal.SIGKILL)
        with pytest.raises(rl_tq.ServerLostError, match="closed or died|sending"):
            client.get_meta(partition="p", columns=["z"], batch_size=1, task="t", timeout_s=600.0)


def test_beyond_this_host_a_token_is_needed(monkeypatch):
    monkeypatch.delenv("RL_TQ_TOKEN", raising=False)
    for host in ("0.0.0.0", "10.1.2.3", "[::]", "a-host"):
        with pytest.raises(rl_tq.AddressError, match="no token is set.*Set RL_TQ_TOKEN"):
            rl_tq.serve(f"tcp://{host}:0")
    monkeypatch.setenv("RL_TQ_TOKEN", "x")
    with rl_tq.serve("tcp://0.0.0.0:0") as queue:
        with rl_tq.connect(queue.address.replace("0.0.0.0", "127.0.0.1")) as client:
            client.put({"a": torch.ones(1)}, partition="p")
        assert queue.stats()["rows"] == 1


def test_a_recorded_proof_opens_nothing(monkeypatch):
    """What a client sent once is refused the next time, as the server's nonce is another."""
    monkeypatch.setenv("RL_TQ_TOKEN", "x")
    with rl_tq.serve("tcp://127.0.0.1:0", timeout_s=20.0) as queue:
        port = int(queue.address.rpartition(":")[2])
        sent: list[bytes] = []
        sendall = socket.socket.sendall

        def record(self, data, *flags):
            if self.getpeername()[1] == port:
                sent.append(bytes(data))
            return sendall(self, data, *flags)

        monkeypatch.setattr(socket.socket, "sendall", record)
        rl_tq.connect(queue.address, timeout_s=20.0).close()
        monkeypatch.undo()
        monkeypatch.setenv("RL_TQ_TOKEN", "x")
        with socket.create_connection(("127.0.0.1", port), timeout=20.0) as stranger:
            stranger.recv(40, socket.MSG_WAITALL)
            stranger.sendall(sent[0])
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""


def test_a_server_that_is_none_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(rl_tq.connect, address, timeout_s=20.0)
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request" + bytes(100))
                with pytest.raises(rl_tq.AddressError, match="is not a queue of this version"):
                    answer.result(30)
