"""Rings between real processes: order, back-pressure, deadlines, and the death of either side."""

import contextlib
import fcntl
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_csrc import ArgumentError, ClosedError, DeadlineError, PeerDiedError, digest
from rl_csrc.ring import ReaderStatus, RingReader, RingWriter


def put(ring, number, nbytes=8, timeout_s=5.0):
    ring.acquire(timeout_s=timeout_s)[:nbytes].fill_(number)
    return ring.publish(nbytes, tag=number)


@contextlib.contextmanager
def child(source, *fds):
    """Run Python in another process, with descriptors, and never leave it behind."""
    process = subprocess.Popen(
        [sys.executable, "-c", source, *map(str, fds)], pass_fds=fds, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


READ_ALL = """
import sys
from rl_csrc import ClosedError, digest
from rl_csrc.ring import RingReader
reader = RingReader(int(sys.argv[1]))
print("attached", flush=True)
try:
    while True:
        slot = reader.next(timeout_s=60)
        print(slot.sequence, slot.tag, slot.data.numel(), digest(slot.data), flush=True)
        reader.release()
except ClosedError:
    print("closed", flush=True)
"""


def test_slots_in_order_and_views_of_the_memory():
    with RingWriter(num_slots=2, slot_nbytes=100) as ring, RingReader(ring.fd) as reader:
        assert ring.slot_nbytes == 4096
        memory = ring.acquire(timeout_s=1)
        assert memory.shape == (4096,)
        memory[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
        assert ring.publish(3, tag=9) == 0
        slot = reader.next(timeout_s=1)
        assert (slot.sequence, slot.tag, slot.data.tolist()) == (0, 9, [1, 2, 3])
        memory[0] = 50
        assert slot.data[0] == 50
        reader.release()
        ring.wait_drained(timeout_s=1)


def test_a_full_ring_waits_for_the_slowest():
    with RingWriter(num_slots=2, slot_nbytes=8, num_readers=2) as ring, RingReader(ring.fd) as fast:
        put(ring, 0)
        put(ring, 1)
        with pytest.raises(DeadlineError, match=r"reader 0 .* free a slot within 0.05"):
            put(ring, 2, timeout_s=0.05)
        for _ in range(2):
            fast.next(timeout_s=1)
            fast.release()
        with pytest.raises(DeadlineError, match=r"reader 1 \(never attached, 2 slots unread\)"):
            put(ring, 2, timeout_s=0.05)
        slow = RingReader(ring.fd)
        assert [slow.next(timeout_s=1).tag for _ in range(2)] == [0, 1]
        slow.release()
        put(ring, 2, timeout_s=1)
        assert [reader.num_unread for reader in ring.readers()] == [1, 2]


def test_slots_are_kept_while_an_expected_reader_is_joining():
    joining, first_line = 2, 512
    with RingWriter(num_slots=1, slot_nbytes=8) as ring, mmap.mmap(ring.fd, 0) as memory:
        put(ring, 1)
        memory[first_line] = joining  # what another process sees in the middle of attaching
        with pytest.raises(DeadlineError, match="reader 0"):
            put(ring, 2, timeout_s=0.1)


def test_late_joiners_get_what_comes_after_them():
    with RingWriter(num_slots=4, slot_nbytes=8, num_readers=0) as ring:
        for number in range(7):
            put(ring, number)  # nobody listens: nothing is kept
        late = RingReader(ring.fd)
        put(ring, 7)
        assert late.next(timeout_s=1).tag == 7
        late.detach()
        for number in range(8, 20):
            put(ring, number)
        assert ring.readers() == []


def test_closing_leaves_what_was_published_readable():
    ring = RingWriter(num_slots=2, slot_nbytes=8)
    reader = RingReader(ring.fd)
    put(ring, 1)
    ring.close()
    assert reader.next(timeout_s=1).tag == 1
    with pytest.raises(ClosedError, match="closed the ring"):
        reader.next(timeout_s=1)


def test_collecting_the_writer_closes_and_views_outlive_everything():
    ring = RingWriter(num_slots=2, slot_nbytes=8)
    reader = RingReader(ring.fd)
    put(ring, 5)
    del ring
    data = reader.next(timeout_s=1).data
    with pytest.raises(ClosedError):
        reader.next(timeout_s=5)
    del reader
    assert data.tolist() == [5] * 8


def test_wrong_calls():
    with pytest.raises(ArgumentError, match="num_slots=0"):
        RingWriter(num_slots=0, slot_nbytes=8)
    with RingWriter(num_slots=1, slot_nbytes=8) as ring:
        with pytest.raises(ArgumentError, match="without a slot"):
            ring.publish(1)
        ring.acquire(timeout_s=1)
        with pytest.raises(ArgumentError, match="nbytes is 5000"):
            ring.publish(5000)
        reader = RingReader(ring.fd)
        with pytest.raises(ArgumentError, match="no slot held"):
            reader.release()
        with pytest.raises(IndexError):
            ring.evict(64)


def test_what_is_not_a_ring_is_refused(tmp_path):
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    with pytest.raises(ArgumentError, match="sealed"):
        RingReader(fd)
    os.close(fd)
    for nbytes in (100, 1 << 20):
        fd = os.memfd_create("noise", os.MFD_ALLOW_SEALING)
        os.write(fd, os.urandom(nbytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(ArgumentError, match="ring"):
            RingReader(fd)
        os.close(fd)
    with (tmp_path / "file").open("wb+") as file, pytest.raises(ArgumentError, match="sealed"):
        RingReader(file.fileno())


@given(st.integers(1, 5), st.lists(st.sampled_from(["put", "next0", "next1", "release0", "release1"]), max_size=60))
def test_any_interleaving_keeps_order(num_slots, steps):
    with RingWriter(num_slots=num_slots, slot_nbytes=8, num_readers=2, prefault=False) as ring:
        readers = [RingReader(ring.fd, prefault=False) for _ in range(2)]
        put_count, cursor, tail = 0, [0, 0], [0, 0]
        for step in steps:
            if step == "put":
                if put_count - min(tail) < num_slots:
                    assert put(ring, put_count) == put_count
                    put_count += 1
                else:
                    with pytest.raises(DeadlineError):
                        ring.acquire(timeout_s=0)
                continue
            r = int(step[-1])
            if step.startswith("next"):
                if cursor[r] < put_count:
                    slot = readers[r].next(timeout_s=0)
                    assert slot.sequence == slot.tag == cursor[r]
                    assert slot.data[0] == cursor[r]
                    cursor[r] += 1
                else:
                    with pytest.raises(DeadlineError):
                        readers[r].next(timeout_s=0)
            elif tail[r] < cursor[r]:
                readers[r].release()
                tail[r] += 1


def test_two_processes_move_every_byte():
    with RingWriter(num_slots=3, slot_nbytes=1 << 16, num_readers=2) as ring:
        sent = []
        with child(READ_ALL, ring.fd) as one, child(READ_ALL, ring.fd) as two:
            for number in range(200):
                nbytes = (number * 7919) % (1 << 16)
                memory = ring.acquire(timeout_s=60)
                memory[:nbytes] = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
                sent.append(f"{number} {number + 5} {nbytes} {digest(memory[:nbytes])}")
                ring.publish(nbytes, tag=number + 5)
            ring.wait_drained(timeout_s=60)
            ring.close()
            for process in (one, two):
                assert process.stdout.read().split("\n") == ["attached", *sent, "closed", ""]


def test_a_killed_reader_is_named_and_can_be_evicted():
    with RingWriter(num_slots=1, slot_nbytes=8) as ring:
        with child(READ_ALL.replace("reader.release()", "import time; time.sleep(600)"), ring.fd) as process:
            put(ring, 1)
            assert process.stdout.readline() == "attached\n"
            process.stdout.readline()
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(DeadlineError, match=f"pid {process.pid}"):
                put(ring, 2, timeout_s=0.2)  # stopped is not dead
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(PeerDiedError, match=rf"reader 0 \(pid {process.pid}.*evict\(0\)"):
                put(ring, 2, timeout_s=60)
        ring.evict(0)
        put(ring, 2, timeout_s=1)
        assert RingReader(ring.fd).index == 0  # the dead reader's place is free again


def test_a_killed_writer_is_named_after_its_slots_were_read():
    source = """
import socket, sys, time
from rl_csrc.ring import RingWriter
ring = RingWriter(num_slots=4, slot_nbytes=8)
connection = socket.socket(fileno=int(sys.argv[1]))
ring.share(connection)
for number in (1, 2):
    ring.acquire(timeout_s=1).fill_(number)
    ring.publish(8, tag=number)
ring.acquire(timeout_s=1).fill_(3)  # begun, never published
print("ready", flush=True)
time.sleep(600)
"""
    ours, theirs = socket.socketpair()
    with ours, theirs, child(source, theirs.fileno()) as process:
        reader = RingReader.receive(ours, timeout_s=60)
        assert process.stdout.readline() == "ready\n"
        process.kill()
        assert [reader.next(timeout_s=60).tag for _ in range(2)] == [1, 2]
        with pytest.raises(PeerDiedError, match=f"pid {process.pid}.*every slot it published was read"):
            reader.next(timeout_s=60)


def test_an_evicted_reader_that_lives_is_told():
    with RingWriter(num_slots=1, slot_nbytes=8) as ring:
        reader = RingReader(ring.fd)
        put(ring, 1)
        ring.evict(reader.index)
        put(ring, 2, timeout_s=1)
        with pytest.raises(ClosedError, match="evicted this reader"):
            reader.next(timeout_s=1)
        assert ring.readers()[0].status == ReaderStatus.EVICTED
        assert RingReader(ring.fd).index == 1


def test_waits_end_for_signals():
    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        ring = RingWriter(num_slots=1, slot_nbytes=8)
        with RingReader(ring.fd) as reader, pytest.raises(KeyboardInterrupt):
            reader.next(timeout_s=600)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_no_descriptor_in_time():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(DeadlineError, match="no descriptor"):
            RingReader.receive(ours, timeout_s=0.05)
        with RingWriter(num_slots=1, slot_nbytes=8) as ring:
            for greeting, fds in ((b"hello there", []), (b"hello there", [ring.fd]), (b"rl-csrc fd\n", [])):
                socket.send_fds(theirs, [greeting], fds)
                with pytest.raises(PeerDiedError, match="out of step"):
                    RingReader.receive(ours, timeout_s=1)


def test_nothing_is_left_behind():
    def leftovers():
        maps = Path("/proc/self/maps").read_text()
        links = [link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return "memfd:rl-ring" in maps, sum("rl-ring" in link for link in links), sorted(Path("/dev/shm").iterdir())

    gc.collect()
    before = leftovers()
    ring = RingWriter(num_slots=2, slot_nbytes=1 << 20)
    reader = RingReader(ring.fd)
    put(ring, 1)
    slot = reader.next(timeout_s=1)
    assert leftovers()[0]
    del ring, reader, slot
    gc.collect()
    assert leftovers() == before
