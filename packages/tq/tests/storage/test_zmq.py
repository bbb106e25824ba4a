"""What `zmq` promises beyond the contract: who has no key gets nothing, and silence is noticed."""

import contextlib
import socket
import subprocess
import sys
import threading

import pytest
import torch

import rl_tq

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")


@pytest.fixture
def queue():
    with rl_tq.serve("zmq://127.0.0.1:0", timeout_s=20.0) as served:
        yield served


@pytest.mark.process
def test_who_has_another_key_is_not_let_in(queue, monkeypatch):
    monkeypatch.setattr("rl_tq.storage.zmq._SILENCE_S", 1.0)
    place, _, key = queue.address.rpartition("/")
    assert len(key) == 64
    with pytest.raises(rl_tq.ServerLostError, match="whose end is the server's key"):
        rl_tq.connect(f"{place}/{'0' * 64}")
    with pytest.raises(rl_tq.AddressError, match="lacks the server's key"):
        rl_tq.connect(place)


@pytest.mark.promise("`zmq://` is encrypted")
@pytest.mark.process
def test_nothing_on_the_wire_is_plain(queue):
    """A proxy that hears everything sees neither a request nor a value."""
    heard = bytearray()
    place, _, key = queue.address.rpartition("/")
    port = int(place.rpartition(":")[2])
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(1 << 16):
                heard.extend(data)
                target.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with rl_tq.connect(f"zmq://127.0.0.1:{listener.getsockname()[1]}/{key}", timeout_s=20.0) as client:
        sevens = torch.full((1, 1000), 7, dtype=torch.uint8)
        meta = client.put({"secret": ["attack at dawn"], "x": sevens}, partition="partition-name")
        assert client.get(meta)["secret"].tolist() == ["attack at dawn"]
    listener.close()
    assert len(heard) > 1000
    for word in (b"attack", b"partition-name", b"secret", b"\x07" * 32):
        assert word not in heard


@pytest.mark.process
def test_a_server_that_dies_is_noticed(monkeypatch):
    monkeypatch.setattr("rl_tq.storage.zmq._SILENCE_S", 2.5)
    code = "import rl_tq, sys; q = rl_tq.serve('zmq://127.0.0.1:0'); print(q.address, flush=True); sys.stdin.read()"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        client = rl_tq.connect(server.stdout.readline().strip(), timeout_s=20.0)
        client.put({"a": torch.zeros(1)}, partition="p")
        server.kill()
        with pytest.raises(rl_tq.ServerLostError, match="it was silent for"):
            client.get_meta(partition="p", columns=["b"], batch_size=1, task="t", timeout_s=60.0)
        client.close()
    finally:
        server.kill()
        server.communicate()


@pytest.mark.slow
def test_what_a_killed_client_claimed_comes_back(monkeypatch):
    monkeypatch.setattr("rl_tq.storage.zmq._SILENCE_S", 2.5)
    code = """import rl_tq, sys
client = rl_tq.connect(sys.argv[1], timeout_s=60.0)
print(client.get_meta(partition="p", columns=["a"], batch_size=2, task="t").rows, flush=True)
sys.stdin.read()
"""
    with rl_tq.serve("zmq://127.0.0.1:0", timeout_s=60.0) as queue:
        rows = queue.put({"a": torch.zeros(2)}, partition="p").rows
        command = [sys.executable, "-c", code, queue.address]
        consumer = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        try:
            assert consumer.stdout is not None
            assert consumer.stdout.readline().strip() == str(rows)
            consumer.kill()
            again = queue.get_meta(partition="p", columns=["a"], batch_size=2, task="t", timeout_s=60.0)
            assert again.rows == rows
            queue.ack(again)
        finally:
            consumer.kill()
            consumer.communicate()


@pytest.mark.parametrize("name", ["x", "127.0.0.1:99999", "127.0.0.1:80/abc"])
def test_addresses_are_checked(name):
    with pytest.raises(rl_tq.AddressError, match="is not understood"):
        rl_tq.connect(f"zmq://{name}")
