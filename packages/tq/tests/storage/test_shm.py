"""What `shm` promises when processes die, misbehave or are not welcome: with real processes and sockets."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import rl_tq
import rl_tq.client.mappings
import rl_tq.client.session
import rl_tq.streaming
from rl_bench.waiting import until
from rl_csrc.ipc import SharedMemory
from rl_tq.memory.arena import PACKED_BYTES, SEGMENT_BYTES, Arena
from rl_tq.protocol.framing import Inbox, pack, send_some, socket_name

LARGE = PACKED_BYTES // 4 + 1024  # float32 values of an extent that has its own segment


def memfds() -> int:
    """Descriptors of queue memory that this process holds."""
    gc.collect()
    links = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(path.readlink()))
        except OSError:
            continue  # closed meanwhile, as the one that lists them is
    return sum("memfd:rl-tq" in link for link in links)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:rl-tq")


@pytest.fixture
def queue() -> Iterator[rl_tq.TransferQueue]:
    with rl_tq.serve("shm://", timeout_s=20.0) as served:
        yield served
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
        assert not [line for line in mapped if "/dev/shm/sem." not in line]  # semaphores are multiprocessing's own
    assert memfds() == 0


@pytest.fixture
def run() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python code in a process of its own, and kills it and its children."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


class RawClient:
    """Speaks the protocol by hand."""

    def __init__(self, queue: rl_tq.TransferQueue) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(20.0)
        self.socket.connect("\0" + socket_name(queue.address))
        self.inbox = Inbox(self.socket)
        self.arrived: list[tuple[dict, int | None]] = []
        message, stamps = self.receive()
        assert message == {"op": "hello", "directory": None}
        os.close(stamps)

    def send(self, message: dict, fd: int | None = None) -> None:
        data = memoryview(pack(message, has_fd=fd is not None))
        assert send_some(self.socket, data, fd) == len(data)

    def receive(self) -> tuple[dict, int | None]:
        while not self.arrived:
            self.arrived += self.inbox.receive()
        return self.arrived.pop(0)


@pytest.fixture
def raw(queue) -> Iterator[RawClient]:
    client = RawClient(queue)
    yield client
    client.socket.close()


PUT = {
    "op": "put", "partition": "p", "num_rows": 1, "schema": {"a": ["dense", "float32", []]}, "sample_ids": None,
    "tags": None, "segment": 1, "offset": 0, "nbytes": 64, "is_last": False, "timeout_s": 1.0,
}  # fmt: skip

PRODUCER = """
import sys, time, torch, rl_tq
from rl_tq.columns.extent import Layout
queue = rl_tq.connect(sys.argv[1])
queue.put({"a": torch.tensor([1.0, 2.0]), "t": ["x", "y"]}, partition="p", sample_ids=["small-0", "small-1"])
queue.put({"a": torch.arange(float(sys.argv[2])).view(1, -1)}, partition="large", sample_ids=["large"])
whole = Layout.write
def half(self, memory):
    whole(self, memory)
    print("in the middle", flush=True)
    time.sleep(600)
Layout.write = half
queue.put({"a": torch.zeros(2, int(sys.argv[2]))}, partition="p2")
"""


@pytest.mark.promise("A put is whole or not there, also of a producer that is killed")
@pytest.mark.process
def test_a_producer_killed_in_a_put_leaves_only_published_data(queue, run):
    producer = run(PRODUCER, queue.address, str(LARGE))
    assert producer.stdout.readline() == "in the middle\n"
    assert queue.stats()["segments"] == 3
    producer.send_signal(signal.SIGKILL)
    producer.wait()
    until(lambda: queue.stats()["segments"] == 2)
    stats = queue.stats()
    assert sorted(stats["partitions"]) == ["large", "p"]
    assert stats["clients"] == [os.getpid()]
    small = queue.get_meta(partition="p", columns=["a", "t"], batch_size=2, task="t")
    large = queue.get_meta(partition="large", columns=["a"], batch_size=1, task="t")
    assert queue.get(small)["a"].tolist() == [1.0, 2.0]
    assert queue.get(small)["t"].tolist() == ["x", "y"]
    assert torch.equal(queue.get(large)["a"][0], torch.arange(float(LARGE)))
    queue.clear(small)
    queue.clear("large")
    assert queue.stats()["segments"] == 0
    until(lambda: memfds() == 0)  # nobody puts into them again


@pytest.mark.process
@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_client_whose_server_is_lost_holds_no_memory(queue):
    peer = rl_tq.connect(queue.address)
    peer.get(queue.put({"a": torch.ones(2)}, partition="p"))
    queue.close()
    peer._idler.join(20.0)
    assert peer._session._connection._socket.fileno() == -1
    assert (memfds(), mappings()) == (0, 0)


@pytest.mark.process
def test_half_a_message_does_nothing(queue, raw):
    segment = SharedMemory.create(4096)
    raw.send({"op": "segment", "segment": 1, "is_packed": True}, segment.fd)
    raw.socket.send(pack({**PUT, "id": 1})[:-1])
    until(lambda: queue.stats()["segments"] == 1)
    raw.socket.close()
    until(lambda: queue.stats()["segments"] == 0)
    assert queue.stats()["rows"] == 0


SERVER = """
import os, sys, time, torch, rl_tq
queue = rl_tq.serve()
queue.put({"a": torch.arange(float(sys.argv[1])).view(2, -1)}, partition="p", sample_ids=["x", "y"])
if not os.fork():
    time.sleep(600)
print(queue.address, flush=True)
time.sleep(600)
"""


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_stopped_server_is_named_and_a_killed_one_is_lost(run, monkeypatch):
    monkeypatch.setattr(rl_tq.client.session, "GRACE_S", 0.2)
    server = run(SERVER, str(2 * LARGE))
    address = server.stdout.readline().strip()
    # The client is closed first, so that a failure does not wait for the waiter.
    with ThreadPoolExecutor(1) as pool, rl_tq.connect(address, timeout_s=600.0) as queue:
        meta = queue.get_meta(partition="p", columns=["a"], batch_size=2, task="t")
        held = queue.get(meta)["a"]
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(rl_tq.WaitTimeoutError, match=f"process {server.pid}.*did not answer 'wait'"):
            queue.get_meta(partition="p", columns=["z"], batch_size=1, task="t", timeout_s=0.1)
        server.send_signal(signal.SIGCONT)
        waiting = pool.submit(queue.get_meta, partition="p", columns=["z"], batch_size=1, task="t")
        until(lambda: queue.stats()["partitions"]["p"]["waiters"] == 1)
        server.send_signal(signal.SIGKILL)  # its child lives on and must not keep the connection open
        with pytest.raises(rl_tq.ServerLostError, match=f"process {server.pid}.*closed or died"):
            waiting.result(20.0)
        with pytest.raises(rl_tq.ServerLostError):
            queue.put({"a": torch.zeros(1, LARGE)}, partition="p")
        with pytest.raises(rl_tq.ServerLostError, match="no process serves|closed the connection"):
            rl_tq.connect(address)
        assert torch.equal(held.flatten(), torch.arange(2.0 * LARGE))
    del held
    gc.collect()
    assert (memfds(), mappings()) == (0, 0)


@pytest.mark.process
def test_a_stream_of_a_stopped_server_does_not_end_normally(run, monkeypatch):
    monkeypatch.setattr(rl_tq.client.session, "GRACE_S", 0.2)
    monkeypatch.setattr(rl_tq.streaming, "connect", lambda address: rl_tq.connect(address, timeout_s=1.0))
    server = run(SERVER, "2")
    dataset = rl_tq.streaming.StreamingDataset(
        server.stdout.readline().strip(), partition="p", columns=["a"], batch_size=1, task="t", idle_s=0.1
    )
    batches = iter(dataset)
    assert next(batches).data["a"].tolist() == [[0.0]]
    server.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid, os.WSTOPPED)  # until all its threads are: it has another row to give
    with pytest.raises(rl_tq.WaitTimeoutError, match=f"process {server.pid}.*did not answer 'stats'"):
        next(batches)
    server.send_signal(signal.SIGKILL)


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(queue, run):
    code = """
import os, socket, sys
from rl_tq.protocol.framing import Inbox
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.connect("\\0rl-tq/" + sys.argv[1])
inbox = Inbox(connection)
print([message for message, _ in inbox.receive()], flush=True)
try:
    inbox.receive()
except ConnectionError as error:
    print(error, flush=True)
"""
    stranger = run(code, queue.address.removeprefix("shm://"))
    out, _ = stranger.communicate(timeout=60)
    assert f"process {stranger.pid} of user 65534 may not use it" in out
    assert "closed the connection" in out
    assert queue.stats()["clients"] == [os.getpid()]


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_server_of_another_user_is_not_used(run):
    code = """
import os, socket, time
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind("\\0rl-tq/tq-test-foreign")
listener.listen()
print("up", flush=True)
time.sleep(600)
"""
    assert run(code).stdout.readline() == "up\n"
    with pytest.raises(rl_tq.ServerLostError, match="of user 65534 listens"):
        rl_tq.connect("shm://tq-test-foreign")


@pytest.mark.process
@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        pack({"op": "stats"})[:8] + b"{" * 14,
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0\xff\xff",
    ],
)
def test_a_client_that_speaks_another_language_is_dropped(queue, raw, garbage):
    raw.socket.sendall(garbage)
    with pytest.raises(ConnectionError):
        raw.receive()
    assert queue.stats()["clients"] == [os.getpid()]


@pytest.mark.process
def test_a_wrong_request_is_answered_and_harms_nobody(queue, raw):
    for request in ({"op": "nothing"}, {}, {"op": "wait"}, {"op": "put", "segment": 7}, {"op": "locate", "columns": 3}):
        raw.send({**request, "id": 5})
        reply, _ = raw.receive()
        assert reply["id"] == 5
        assert "error" in reply
    segment = SharedMemory.create(4096)
    raw.send({"op": "segment", "segment": 1, "is_packed": True}, segment.fd)
    raw.send({**PUT, "id": 6, "offset": 4090})
    assert "is not inside its segment" in raw.receive()[0]["message"]
    assert queue.stats()["rows"] == 0


@pytest.mark.process
def test_a_missing_descriptor_is_a_clear_error(queue, raw):
    raw.send({"op": "segment", "segment": 1, "is_packed": True})
    raw.send({**PUT, "id": 1})
    assert "raise `ulimit -n`" in raw.receive()[0]["message"]


def test_a_dropped_descriptor_is_not_taken_for_the_next_ones(monkeypatch):
    import resource

    left, right = socket.socketpair()
    first, second = SharedMemory.create(64), SharedMemory.create(128)
    inbox = Inbox(right)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    data = memoryview(pack({"n": 1}, has_fd=True))
    send_some(left, data, first.fd)
    # The lowest free number is the limit: nothing more can be opened.
    lowest_free = os.dup(first.fd)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        arrived = list(inbox.receive())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert arrived == [({"n": 1}, None)]
    send_some(left, memoryview(pack({"n": 2}, has_fd=True)), second.fd)
    [(message, fd)] = inbox.receive()
    assert message == {"n": 2}
    assert SharedMemory(fd).nbytes == 128
    left.close()
    right.close()


@pytest.mark.process
def test_a_client_that_does_not_read_holds_up_nobody(queue, raw):
    for _ in range(200):  # the answers are far more than a socket holds
        raw.socket.sendall(pack({"op": "stats", "id": 1}) * 64)
    meta = queue.put({"a": torch.ones(3)}, partition="p")
    assert queue.get(meta)["a"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.process
def test_small_extents_share_segments_freed_once_all_clear(queue):
    row = torch.zeros(1, SEGMENT_BYTES // 4 // 20)  # about 19 rows to a segment
    metas = [queue.put({"a": row + i}, partition="p") for i in range(25)]
    assert queue.stats()["segments"] == 2
    with rl_tq.connect(queue.address) as peer:
        for i, meta in enumerate(metas):
            assert peer.get(meta)["a"][0, -1].item() == i
        assert mappings() > 0
        for meta in metas[:20]:
            peer.clear(meta)
        assert queue.stats()["segments"] == 1
        assert peer.get(metas[-1])["a"][0, 0].item() == 24


@pytest.mark.process
def test_clients_let_go_of_cleared_memory(queue, monkeypatch):
    with rl_tq.connect(queue.address) as peer:
        meta = queue.put({"a": torch.ones(4, LARGE)}, partition="p")
        batch = peer.get(meta)
        queue.get(meta)
        assert memfds() == 3  # the server's and each client's
        peer.clear("p")
        until(lambda: memfds() == 2)  # the peer still looks at it
        assert mappings() == 2  # its batch, and where the next put will go
        assert batch["a"].sum().item() == 4 * LARGE
        del batch
        until(lambda: memfds() == 1 and mappings() == 1)
        assert queue.stats()["spare_segments"] == 1
        queue._arena.trim(0.0)
        until(lambda: memfds() == 0 and mappings() == 0)


@pytest.mark.process
def test_memory_is_used_again_but_never_under_a_reader(queue):
    with rl_tq.connect(queue.address) as peer:
        batches = []
        for i in range(6):
            meta = queue.put({"a": torch.full((4, LARGE), float(i))}, partition="p")
            batches.append(peer.get(meta)["a"])
            queue.clear("p")
        assert [batch.unique().tolist() for batch in batches] == [[float(i)] for i in range(6)]
        assert queue.stats()["spare_segments"] == 6
        batches.clear()
        gc.collect()
        until(lambda: len(queue._reusable) + len(queue._arena._spare) == 6)
        before = queue.stats()["shared_bytes"]
        for i in range(20):
            meta = queue.put({"a": torch.full((4, LARGE), float(i))}, partition="p")
            assert peer.get(meta)["a"].unique().tolist() == [float(i)]
            queue.clear("p")
        assert queue.stats()["shared_bytes"] <= before  # less, where some were not needed for long


@pytest.mark.process
def test_a_segment_is_not_freed_while_its_answer_is_under_way(queue, monkeypatch):
    """The server frees it after the answer was sent, and before the client opened it."""
    with rl_tq.connect(queue.address) as peer:
        meta = queue.put({"a": torch.ones(4, LARGE)}, partition="p")
        open_extent = rl_tq.client.mappings.MappedSegment.open

        def late(self, *place, **options):
            queue.clear("p")
            until(lambda: peer._readers.freed)
            peer.stats()  # tells the server what is no longer looked at
            queue.put({"a": torch.zeros(4, LARGE)}, partition="other")
            return open_extent(self, *place, **options)

        monkeypatch.setattr(rl_tq.client.mappings.MappedSegment, "open", late)
        batch = peer.get(meta)["a"]
        monkeypatch.undo()
        assert batch.unique().tolist() == [1.0]


@pytest.mark.process
def test_a_put_that_fails_while_writing_gives_its_memory_back(queue, monkeypatch):
    def fail(self: object, memory: torch.Tensor) -> None:
        raise MemoryError

    monkeypatch.setattr("rl_tq.columns.extent.Layout.write", fail)
    with pytest.raises(MemoryError):
        queue.put({"a": torch.ones(4, LARGE)}, partition="p")
    monkeypatch.undo()
    assert queue.stats()["segments"] == 0
    with pytest.raises(rl_tq.SchemaError):
        queue.put({"a": torch.ones(2, LARGE)}, partition="p", sample_ids=["x", "x"])
    assert queue.stats()["segments"] == 0


@pytest.fixture
def interruptible():
    """Processes that a shell starts in its background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.process
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_waiter_claims_nothing(queue):
    with rl_tq.connect(queue.address) as peer:
        target = threading.current_thread().ident
        interrupt = threading.Timer(0.2, lambda: signal.pthread_kill(target, signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            peer.get_meta(partition="p", columns=["a"], batch_size=1, task="t")
        interrupt.join()
        meta = queue.put({"a": torch.ones(1)}, partition="p")
        assert queue.get_meta(partition="p", columns=["a"], batch_size=1, task="t").rows == meta.rows


def test_sealed_memory_cannot_shrink_under_a_reader():
    segment = SharedMemory.create(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)


@pytest.mark.process
def test_an_arena_announces_before_it_gives():
    events: list[object] = []
    arena = Arena(
        lambda number, segment, is_packed, _: events.append((number, segment.nbytes, is_packed)),
        events.append,
        lambda number: events.append(("retired", number)),
    )
    small = arena.allocate(100)
    blocks = [small]
    assert (small.segment, small.offset, len(small.memory), small.is_alone) == (1, 0, 100, False)
    blocks.append(arena.allocate(64))
    assert blocks[-1].offset == 128
    large = arena.allocate(PACKED_BYTES + 1)
    assert (large.segment, large.offset, len(large.memory), large.is_alone) == (2, 0, PACKED_BYTES + 1, True)
    whole = PACKED_BYTES + PACKED_BYTES // 8
    for _ in range(SEGMENT_BYTES // PACKED_BYTES):
        last = arena.allocate(PACKED_BYTES)
        blocks.append(last)
    assert (last.segment, last.offset) == (3, 0)
    assert events == [(1, SEGMENT_BYTES, True), (2, whole, False), (3, SEGMENT_BYTES, True)]
    for block in blocks[:-1]:  # sealed once all of it is put, and no sooner: else it would be used again too early
        assert 1 not in events
        arena.settle(block)
    assert events[3:] == [1]
    arena.reuse(2)
    arena.reuse(1)
    assert arena.allocate(PACKED_BYTES + 5).segment == 2  # the same size class
    arena.trim(0.0)
    assert events[4:] == [("retired", 1)]
