"""The pipeline of buckets and the stream writer: what they move, back-pressure, wakes, ends in the middle of a job."""

import os
import select
import socket
import subprocess
import sys
import threading

import pytest
import torch

import rl_csrc
from rl_csrc import ArgumentError
from rl_csrc.buffers.pipeline import Pipeline, StreamWriter
from rl_csrc.ipc import SharedMemory, Waker, receive_now, send_now

LEAF = 1024
SLOT = 4096
WAIT_S = 20


@pytest.fixture
def waker():
    waker = Waker()
    yield waker
    waker.close()


@pytest.fixture
def ring(waker):
    slots = [torch.zeros(SLOT, dtype=torch.uint8) for _ in range(2)]
    pipeline = Pipeline(slots, LEAF, waker.writer_fileno())
    yield slots, pipeline
    pipeline.close()


def leaves_of(raw):
    return [rl_csrc.digest(leaf) for leaf in raw.split(LEAF)]


def wait(waker):
    ready, _, _ = select.select([waker.fileno()], [], [], WAIT_S)
    assert ready, "nobody woke this thread"
    waker.clear()


def wait_until(waker, pipeline, count):
    while not pipeline.wake_at(0, count):
        wait(waker)


def test_pieces_are_packed_and_digested_in_order(ring, waker):
    slots, pipeline = ring
    content = torch.randint(0, 256, (3000,), dtype=torch.uint8)
    assert pipeline.pack(0, content, 100, 256, 2500, True, True) == 1
    assert pipeline.pack(0, content.view(torch.int16), 0, 3000, 0, True, True) == 2
    assert pipeline.pack(1, content, 0, 0, 3000, True, False) == 3
    assert pipeline.pack(1, content, 8, 0, 800, False, True) == 4
    assert pipeline.num_done() == 0  # it waits to be started
    pipeline.start()
    wait_until(waker, pipeline, 4)
    assert torch.equal(slots[pipeline.slot_of(0)][256:2756], content[100:2600])
    assert torch.equal(slots[pipeline.slot_of(1)][:3000], content)
    assert pipeline.take(9) == [
        (0, [leaves_of(content[100:2600])]),
        (0, [[rl_csrc.digest(b"")]]),
        (0, [[]]),
        (0, [leaves_of(content[8:808])]),
    ]
    assert pipeline.num_bytes() == 2500 + 3000 + 800


def test_a_bucket_waits_for_a_slot(ring, waker):
    _, pipeline = ring
    content = torch.ones(SLOT, dtype=torch.uint8)
    for bucket in range(3):
        pipeline.pack(bucket, content, 0, 0, SLOT, True, True)
    pipeline.start()
    wait_until(waker, pipeline, 2)
    assert not pipeline.help(3)
    assert (pipeline.num_done(), pipeline.slot_of(2)) == (2, -1)
    assert pipeline.wake_at(1, 3)  # more are done than were seen, and no more can be
    assert not pipeline.wake_at(2, 3)
    freed = pipeline.slot_of(1)
    pipeline.release(1)
    wait(waker)
    assert (pipeline.num_done(), pipeline.slot_of(2)) == (3, freed)


def test_the_first_slots_alone_are_used(ring):
    _, pipeline = ring
    pipeline.use_slots(1)
    assert [pipeline.assign(bucket) for bucket in (5, 5, 6)] == [0, 0, -1]
    pipeline.use_slots(2)
    assert pipeline.assign(6) == 1


def test_the_caller_takes_part(ring):
    slots, pipeline = ring
    content = torch.arange(SLOT, dtype=torch.int64).to(torch.uint8)
    for bucket in range(2):
        pipeline.pack(bucket, content, 0, 0, SLOT, True, True)
    assert pipeline.help(2)
    assert all(torch.equal(slot, content) for slot in slots)


def test_a_cancelled_sync_touches_no_memory_and_frees_all(ring):
    slots, pipeline = ring
    for bucket in range(4):
        pipeline.pack(bucket, torch.ones(SLOT, dtype=torch.uint8), 0, 0, SLOT, True, True)
    pipeline.start()
    pipeline.cancel()
    for slot in slots:
        slot.zero_()
    assert (pipeline.num_done(), pipeline.take(9)) == (0, [])
    assert [pipeline.assign(bucket) for bucket in (7, 8)] == [0, 1]
    assert not any(slot.any() for slot in slots)


def test_pieces_outside_of_their_memory_are_refused(ring):
    _, pipeline = ring
    content = torch.zeros(64, dtype=torch.uint8)
    for offset, slot_offset, nbytes in ((60, 0, 8), (0, SLOT - 4, 8), (2**63, 0, 8), (0, 0, 2**63)):
        with pytest.raises(ArgumentError, match="does not fit"):
            pipeline.pack(0, content, offset, slot_offset, nbytes, True, True)
    with pytest.raises(ArgumentError, match="must follow one another"):
        pipeline.unpack(content, -1, 64, [(None, 0, 32, 8), (None, 0, 0, 8)])
    with pytest.raises(ArgumentError, match="does not fit"):
        pipeline.unpack(content, -1, 65, [])
    with pytest.raises(ArgumentError, match="multiple of 8"):
        Pipeline([], 12, 0)
    with pytest.raises(ArgumentError, match="on a device"):
        Pipeline([None], LEAF, 0).pack(0, content, 0, 0, 8, True, True)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_bucket_is_unpacked_from_its_slot_or_a_stream(ring, waker, is_streamed):
    _, pipeline = ring
    sent = torch.randint(0, 256, (SLOT,), dtype=torch.uint8)
    slot, whole = torch.zeros(SLOT, dtype=torch.uint8), torch.zeros(500, dtype=torch.int32)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        if is_streamed:
            theirs.sendall(bytes(sent.tolist()))
        else:
            slot.copy_(sent)
        pieces = [(None, 0, 0, 1000), (whole, 8, 1024, 1900), (None, 0, 3072, 1000)]
        pipeline.unpack(slot, mine.fileno() if is_streamed else -1, SLOT, pieces)
        pipeline.start()
        wait_until(waker, pipeline, 1)
    expected = [leaves_of(sent[start : start + size]) for start, size in ((0, 1000), (1024, 1900), (3072, 1000))]
    assert pipeline.take(1) == [(0, expected)]
    assert torch.equal(whole.view(torch.uint8)[8:1908], sent[1024:2924])
    assert torch.equal(slot[3072:], sent[3072:])


def test_a_stream_that_ends_or_breaks_is_reported(ring, waker):
    _, pipeline = ring
    slot = torch.zeros(SLOT, dtype=torch.uint8)
    mine, theirs = socket.socketpair()
    theirs.send(b"half")
    theirs.close()
    pipeline.unpack(slot, mine.fileno(), SLOT, [(None, 0, 0, SLOT)])
    pipeline.unpack(slot, 10_000, SLOT, [(None, 0, 0, SLOT)])  # no descriptor
    pipeline.start()
    wait_until(waker, pipeline, 2)
    assert [error for error, _ in pipeline.take(2)] == [-1, 9]
    mine.close()


def test_a_read_that_waits_is_ended_by_cancel(ring, waker):
    _, pipeline = ring
    slot = torch.zeros(SLOT, dtype=torch.uint8)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.send(b"half")
        pipeline.unpack(slot, mine.fileno(), SLOT, [(None, 0, 0, SLOT)])
        pipeline.start()
        pipeline.cancel()  # in the middle of the bucket
        slot.zero_()
        assert pipeline.num_done() == 0
        pipeline.pack(0, slot, 0, 0, 8, True, True)  # it goes on
        assert pipeline.help(1)


def test_a_stream_is_written_from_memory_and_from_a_file(waker):
    memory = SharedMemory.create(SLOT)
    memory.map().copy_(torch.arange(SLOT))
    tensor = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        writer = StreamWriter(mine.fileno(), waker.writer_fileno())
        assert writer.wake_when_idle()
        writer.put([(tensor, 1, 2 << 20), (b"gap", 0, 3), (memory.fd, 100, 1000), (tensor, 5, 0), (b"end", 1, 2)])
        got = bytearray()
        while len(got) < (2 << 20) + 1005:
            got += theirs.recv(1 << 20)
        while not writer.wake_when_idle():
            wait(waker)
        assert writer.is_idle()
        assert writer.close()
    expected = bytes(tensor[1 : 1 + (2 << 20)].tolist()) + b"gap" + bytes(i % 256 for i in range(100, 1100)) + b"nd"
    assert got == expected
    memory.close()


def test_a_writer_closes_in_the_middle_of_a_write(waker):
    mine, theirs = socket.socketpair()
    payload = torch.zeros(64 << 20, dtype=torch.uint8)
    with mine, theirs:
        writer = StreamWriter(mine.fileno(), waker.writer_fileno())
        writer.put([(payload, 0, len(payload))])
        theirs.recv(1)  # it has begun
        assert not writer.is_idle()
        assert writer.close()
        assert writer.error() == 0  # who closes wants to hear of none


def test_a_stream_whose_other_end_is_gone_wakes(waker):
    mine, theirs = socket.socketpair()
    with mine:
        writer = StreamWriter(mine.fileno(), waker.writer_fileno())
        theirs.close()
        payload = torch.zeros(SLOT, dtype=torch.uint8)
        writer.put([(payload, 0, SLOT)])
        wait(waker)
        assert writer.error() == 32  # EPIPE
        assert writer.close()


def test_jobs_are_done_while_another_thread_holds_the_lock(ring, waker):
    """A Python thread that computes is asked for the interpreter lock every 5 ms; the pipeline never asks."""
    _, pipeline = ring
    content = torch.ones(SLOT, dtype=torch.uint8)
    for _ in range(200):
        pipeline.pack(0, content, 0, 0, SLOT, True, True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(WAIT_S)
    try:
        pipeline.start()
        turns = 0
        while pipeline.num_done() < 200 and turns < 10**8:  # never gives the lock away
            turns += 1
        assert pipeline.num_done() == 200
    finally:
        sys.setswitchinterval(before)


def fill(connection):
    while send_now(connection, bytes(1 << 16)):
        pass


def test_what_does_not_wait_is_sent_and_received_at_once():
    mine, theirs = socket.socketpair()
    with mine, theirs:
        assert send_now(mine, memoryview(b"hello")) == 5
        assert receive_now(theirs) == b"hello"
        with pytest.raises(BlockingIOError):
            receive_now(theirs)
        with pytest.raises(BlockingIOError):
            fill(mine)
        theirs.close()
        with pytest.raises(BrokenPipeError):
            send_now(mine, b"x")


def test_many_threads_may_use_it(ring, waker):
    _, pipeline = ring
    content = torch.ones(SLOT, dtype=torch.uint8)

    def use(number):
        for _ in range(50):
            pipeline.pack(number % 2, content, 0, 0, SLOT, True, True)
            pipeline.start()
            pipeline.help(pipeline.num_done() + 1)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    wait_until(waker, pipeline, 200)
    assert len(pipeline.take(200)) == 200


_EXIT = """
import socket, torch
from rl_csrc.buffers.pipeline import Pipeline, StreamWriter
from rl_csrc.ipc import Waker
waker = Waker()
a, b = socket.socketpair()
pipeline = Pipeline([torch.zeros(64)], 8, waker.writer_fileno())
writer = StreamWriter(a.fileno(), waker.writer_fileno())
reading = Pipeline([], 8, waker.writer_fileno())
pipeline.pack(0, torch.zeros(64), 0, 0, 64, True, True)
pipeline.pack(1, torch.zeros(64), 0, 0, 64, True, True)  # waits for a slot
pipeline.start()
payload = torch.zeros(64 << 20, dtype=torch.uint8)
writer.put([(payload, 0, 64 << 20)])  # waits in a write
c, d = socket.socketpair()
reading.unpack(torch.zeros(64, dtype=torch.uint8), c.fileno(), 64, [])
reading.start()  # waits in a read
"""


@pytest.mark.process
def test_an_interpreter_exits_with_threads_alive():
    ended = subprocess.run([sys.executable, "-c", _EXIT], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.process
def test_a_forked_child_exits_without_the_threads(ring, waker):
    _, pipeline = ring
    pipeline.pack(0, torch.ones(SLOT, dtype=torch.uint8), 0, 0, SLOT, True, True)
    pipeline.start()
    wait_until(waker, pipeline, 1)
    child = os.fork()
    if child == 0:
        pipeline.close()
        del pipeline
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    pipeline.pack(0, torch.ones(SLOT, dtype=torch.uint8), 0, 0, SLOT, True, True)
    assert pipeline.help(2)
