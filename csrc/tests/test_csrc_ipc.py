"""Sockets, descriptors and sealed memory between real processes of this host."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import multiprocessing
import os
import resource
import select
import signal
import socket
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch

from rl_csrc import ipc
from rl_csrc.errors import ArgumentError

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def name():
    return f"rl-csrc-test-{uuid.uuid4().hex}"


def accepted(listener):
    assert select.select([listener], [], [], 30)[0]
    found = ipc.accept(listener)
    assert found is not None
    return found


# Sockets


@pytest.mark.process
def test_the_kernel_says_who_is_at_the_other_end(name):
    with ipc.bind(name) as listener:
        listener.listen()

        def dial():
            connection, who = ipc.connect(name)
            with connection:
                connection.send(f"{who.pid} {who.uid}".encode())

        child = FORK.Process(target=dial)
        child.start()
        connection, who = accepted(listener)
        with connection:
            assert (who.pid, who.uid, who.gid) == (child.pid, os.geteuid(), os.getegid())
            assert who.is_same_user
            assert select.select([connection], [], [], 30)[0]
            assert connection.recv(64).decode() == f"{os.getpid()} {os.geteuid()}"
        child.join(30)


def test_who_accepts_does_not_wait(name):
    with ipc.bind(name) as listener:
        listener.listen()
        assert ipc.accept(listener) is None


def test_a_bound_name_refuses_until_it_listens_and_is_not_shared(name):
    with ipc.bind(name) as listener:
        with pytest.raises(ConnectionRefusedError):
            ipc.connect(name)
        with pytest.raises(OSError, match=f"Errno {errno.EADDRINUSE}"):
            ipc.bind(name)
        listener.listen()
        ipc.connect(name)[0].close()
    with pytest.raises(ConnectionRefusedError):
        ipc.connect(name)
    ipc.bind(name).close()


@pytest.mark.process
def test_a_name_goes_with_the_killed_process_that_held_it(name):
    ready = FORK.Event()

    def hold():
        held = ipc.bind(name)
        held.listen()
        ready.set()
        signal.pause()

    child = FORK.Process(target=hold)
    child.start()
    assert ready.wait(30)
    os.kill(child.pid, signal.SIGKILL)
    child.join(30)
    ipc.bind(name).close()


def test_another_users_listener_is_refused(name, monkeypatch):
    with ipc.bind(name) as listener:
        listener.listen()
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        with pytest.raises(PermissionError, match=f"process {os.getpid()} of user {uid} listens"):
            ipc.connect(name)
        connection, who = accepted(listener)
        connection.close()
        assert not who.is_same_user


def test_a_full_backlog_is_waited_for_no_longer_than_said(name):
    with ipc.bind(name) as listener, contextlib.ExitStack() as waiting:
        listener.listen(0)

        def dial(timeout_s):
            for _ in range(8):
                waiting.enter_context(ipc.connect(name, timeout_s=timeout_s)[0])

        for timeout_s in (None, 0.05):
            with pytest.raises(BlockingIOError):
                dial(timeout_s)


def test_a_send_ends_when_its_time_is_over():
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                near.send(bytes(1 << 16))
        near.setblocking(True)
        ipc.limit_sends(near, 0.05)
        with pytest.raises(BlockingIOError):
            near.send(b"x")


@pytest.mark.parametrize("call", [ipc.bind, ipc.connect])
def test_a_name_that_is_too_long_says_how_long_it_may_be(call):
    with pytest.raises(ArgumentError, match="has 108 bytes; at most 107"):
        call("n" * 108)
    with pytest.raises(ArgumentError, match="has 108 bytes"):
        call("é" * 54)


def test_a_longest_name_can_be_held():
    ipc.bind(uuid.uuid4().hex.ljust(107, "n")).close()


def test_descriptors_come_with_the_bytes_they_were_sent_with():
    near, far = socket.socketpair()
    memory = ipc.SharedMemory.create(4096)
    with near, far:
        socket.send_fds(near, [b"two"], [memory.fd, memory.fd])
        near.send(b"none")
        buffer = memoryview(bytearray(64))
        size, fds, is_lost = ipc.receive_into(far, buffer, max_fds=2)
        assert (bytes(buffer[:size]), len(fds), is_lost) == (b"two", 2, False)
        for fd in fds:
            assert os.fstat(fd).st_ino == os.fstat(memory.fd).st_ino
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            os.close(fd)
        assert ipc.receive_into(far, buffer) == (4, [], False)
        near.close()
        assert ipc.receive_into(far, buffer) == (0, [], False)


def test_a_descriptor_for_which_there_is_no_room_is_told_as_lost():
    near, far = socket.socketpair()
    buffer = memoryview(bytearray(64))
    with near, far:
        socket.send_fds(near, [b"x"], [near.fileno()])
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            assert ipc.receive_into(far, buffer) == (1, [], True)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.process
def test_a_child_does_not_hide_the_death_of_its_parent(name):
    """A parent that connected is killed while its child lives: the other end is told at once."""
    with ipc.bind(name) as listener:
        listener.listen()
        read, write = os.pipe()
        parent = os.fork()
        if not parent:
            kept = ipc.connect(name)
            child = os.fork()
            if not child:
                os.write(write, str(os.getpid()).encode())
                time.sleep(60)
                os._exit(len(kept))
            signal.pause()
        connection, _ = accepted(listener)
        grandchild = int(os.read(read, 32))
        try:
            os.kill(parent, signal.SIGKILL)
            os.waitpid(parent, 0)
            connection.setblocking(True)
            connection.settimeout(10)
            assert connection.recv(1) == b""
            os.kill(grandchild, 0)  # it lives
        finally:
            os.kill(grandchild, signal.SIGKILL)
            connection.close()
            os.close(read)
            os.close(write)


@pytest.mark.process
def test_closing_in_children_leaves_the_parents_socket_open():
    near, far = map(ipc.close_in_children, socket.socketpair())
    with near, far:
        child = FORK.Process(target=lambda: os._exit(3 if near.fileno() == far.fileno() == -1 else 1))
        child.start()
        child.join(30)
        assert child.exitcode == 3
        near.send(b"x")
        assert far.recv(1) == b"x"


@pytest.mark.process
def test_a_waker_ends_a_poll_of_another_thread_and_is_cleared():
    waker = ipc.Waker()
    poll = select.poll()
    poll.register(waker.fileno(), select.POLLIN)
    assert not poll.poll(0)
    thread = threading.Timer(0.02, waker.wake)
    thread.start()
    assert poll.poll(30_000)
    thread.join()
    for _ in range(100_000):  # never waits, however often
        waker.wake()
    waker.clear()
    assert not poll.poll(0)
    waker.wake()
    assert poll.poll(0)
    waker.close()
    waker.close()


# Shared memory


@pytest.mark.process
def test_private_mapping_writes_are_seen_by_no_other_process():
    memory = ipc.SharedMemory.create(2 * mmap.PAGESIZE, name="rl-test")
    shared, private = memory.map(), memory.map(is_shared=False)
    assert shared.dtype == torch.uint8
    assert shared.shape == (2 * mmap.PAGESIZE,)

    def write():
        memory.map()[0] = 7
        memory.map(is_shared=False)[1] = 8

    child = FORK.Process(target=write)
    child.start()
    child.join(30)
    assert shared[:2].tolist() == private[:2].tolist() == [7, 0]
    private[0] = 9
    assert shared[0] == 7


def test_discarded_writes_show_what_the_others_see():
    memory = ipc.SharedMemory.create(2 * mmap.PAGESIZE)
    shared, private = memory.map(), memory.map(is_shared=False)
    private.fill_(1)
    shared.fill_(2)
    ipc.discard_writes(private[: mmap.PAGESIZE])
    assert private[mmap.PAGESIZE - 1] == 2
    assert private[mmap.PAGESIZE] == 1
    with pytest.raises(ArgumentError, match="not whole pages"):
        ipc.discard_writes(private[: mmap.PAGESIZE - 1])


def test_sealed_memory_keeps_its_size():
    memory = ipc.SharedMemory.create(8192)
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_attaching_refuses_what_could_shrink_or_has_another_size(tmp_path):
    good = ipc.SharedMemory.create(8192)
    assert ipc.SharedMemory.attach(os.dup(good.fd), nbytes=8192).map().shape == (8192,)
    with pytest.raises(ArgumentError, match="is sealed memory of 8192 bytes; expected sealed memory of 4096"):
        ipc.SharedMemory.attach(os.dup(good.fd), nbytes=4096)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 8192)
    with pytest.raises(ArgumentError, match="is unsealed memory of 8192"):
        ipc.SharedMemory.attach(loose, nbytes=8192)
    with pytest.raises(OSError, match="Bad file descriptor"):  # it was closed
        os.fstat(loose)
    file = ipc.SharedMemory.create_file(tmp_path / "a", 8192)
    with pytest.raises(ArgumentError, match="unsealed"):
        ipc.SharedMemory.attach(os.dup(file.fd), nbytes=8192)
    empty = ipc.SharedMemory.create(0)
    with pytest.raises(ArgumentError):
        ipc.SharedMemory.attach(os.dup(empty.fd), nbytes=0)


@pytest.mark.process
def test_a_mapping_outlives_its_object_and_reports_its_end():
    ended = []
    memory = ipc.SharedMemory.create(4096)
    fd = memory.fd
    view = memory.map(when_gone=lambda: ended.append("gone"))[10:20].view(torch.int16)
    assert ipc.before_unmap(view.untyped_storage().data_ptr(), lambda: ended.append("before"))
    memory.close()
    memory.close()
    del memory
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    view.fill_(3)
    assert not ended
    del view
    gc.collect()
    assert ended == ["before", "gone"]


def test_what_is_no_mapping_has_nothing_before_its_end():
    assert not ipc.before_unmap(torch.empty(1 << 20).data_ptr(), print)


@pytest.mark.process
def test_a_released_object_closes_its_descriptor_not_its_mapping():
    before = len(list(Path("/proc/self/fd").iterdir()))
    views = [ipc.SharedMemory.create(4096).map() for _ in range(50)]
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(views) == 50


def test_words_are_read_by_others_and_written_by_who_may():
    memory = ipc.SharedMemory.create(4096)
    mine, theirs = memory.words(is_writable=True), memory.words()
    assert len(theirs) == 512
    mine[3] = 2**64 - 1
    assert theirs[3] == 2**64 - 1
    with pytest.raises(TypeError, match="read-only"):
        theirs[3] = 1
    with pytest.raises(ArgumentError, match="not a whole number of 64-bit words"):
        ipc.SharedMemory.create(4097).words()


def test_a_file_is_new_private_and_takes_what_was_written(tmp_path):
    path = tmp_path / "segment"
    memory = ipc.SharedMemory.create_file(path, 1 << 20)
    assert path.stat().st_mode & 0o777 == 0o600
    assert memory.resident_nbytes == 0
    memory.map()[:5000] = 1
    assert 8192 <= memory.resident_nbytes < 1 << 20
    with pytest.raises(FileExistsError):
        ipc.SharedMemory.create_file(path, 1)
    assert ipc.SharedMemory(os.open(path, os.O_RDWR)).map()[4999] == 1


def test_populating_allocates_pages_and_reports_a_lack_of_room():
    memory = ipc.SharedMemory.create(1 << 20)
    mapped = memory.map()
    ipc.populate(mapped.data_ptr() + 5000, 10_000)
    assert memory.resident_nbytes == 3 * mmap.PAGESIZE
    ipc.populate(mapped.data_ptr(), 0)
    with pytest.raises(OSError, match="no room for 4096 bytes") as full:
        ipc.populate(mmap.PAGESIZE, 4096)  # nothing is mapped at the second page: the kernel cannot back it
    assert full.value.errno == errno.ENOSPC


def test_memory_that_cannot_be_mapped_is_an_error_with_its_size():
    memory = ipc.SharedMemory.create(1 << 50)  # sparse: more than an address space holds
    with pytest.raises(OSError, match=f"mapping {1 << 50} bytes"):
        memory.map()


@pytest.mark.promise("A SIGKILL leaves no shared memory and no socket behind")
@pytest.mark.process
def test_nothing_is_left_behind_by_a_killed_process():
    ready = FORK.Event()

    def hold():
        ipc.SharedMemory.create(1 << 20, name="rl-left").map().fill_(1)
        ready.set()
        signal.pause()

    child = FORK.Process(target=hold)
    child.start()
    assert ready.wait(30)
    assert list(Path("/dev/shm").glob("*rl-left*")) == []
    child.kill()
    child.join(30)
    assert list(Path("/dev/shm").glob("*rl-left*")) == []
