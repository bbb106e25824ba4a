"""Arenas: allocation by property, pins across processes, stale references, and readers that die."""

import gc
import itertools
import os
import socket
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_csrc import ArenaFullError, ArgumentError, StaleBlockError, frames
from rl_csrc.arena import Arena, ArenaClient, BlockRef, FreeExtents, size_class

PAGE = 4096


def test_size_classes_by_hand():
    assert [size_class(n) // PAGE for n in (0, 1, PAGE, PAGE + 1, 15 * PAGE, 16 * PAGE + 1, 17 * PAGE, 33 * PAGE)] == [
        1, 1, 1, 2, 15, 18, 18, 36,
    ]  # fmt: skip


@given(st.integers(1, 1 << 34))
def test_size_classes_waste_little(nbytes):
    size = size_class(nbytes)
    assert nbytes <= size <= max(PAGE, nbytes * 9 / 8 + PAGE)
    assert size_class(size) == size


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=80))
def test_extents_never_overlap_and_always_merge(steps):
    extents, taken = FreeExtents(100), {}
    for is_take, n in steps:
        if is_take:
            start = extents.take(n)
            if start is None:
                assert extents.largest < n
            else:
                assert all(start + n <= s or s + m <= start for s, m in taken.items())
                assert 0 <= start <= 100 - n
                taken[start] = n
        elif taken:
            start = sorted(taken)[n % len(taken)]
            extents.give(start, taken.pop(start))
        assert extents.free_bytes == 100 - sum(taken.values())
        free = sorted(extents.extents())
        assert all(a + m < b for (a, m), (b, _) in itertools.pairwise(free))
    for start, n in taken.items():
        extents.give(start, n)
    assert extents.extents() == [(0, 100)]


def test_alloc_view_free_reuse():
    arena = Arena(64 * PAGE)
    a = arena.alloc(1000)
    view = arena.view(a)
    assert view.shape == (1000,)
    assert view.data_ptr() % 256 == 0
    view.fill_(7)
    slice_ = view[10:20].view(torch.int16)
    arena.free(a)
    del view
    gc.collect()
    assert arena.stats().num_retired == 1  # the slice still pins it
    with pytest.raises(StaleBlockError, match="was freed"):
        arena.view(a)
    with pytest.raises(StaleBlockError, match="free a block once"):
        arena.free(a)
    assert slice_[0] == 0x0707
    del slice_
    assert arena.reclaim() == PAGE
    assert arena.stats().free_bytes == 64 * PAGE
    b = arena.alloc(1000)
    assert b.block == a.block
    assert b.generation == a.generation + 2


def test_full_says_what_is_live_and_comes_back():
    arena = Arena(8 * PAGE)
    refs = [arena.alloc(2 * PAGE) for _ in range(4)]
    pin = arena.view(refs[1])
    with pytest.raises(ArenaFullError, match=f"live_bytes={8 * PAGE}"):
        arena.alloc(1)
    for ref in refs:
        arena.free(ref)
    with pytest.raises(ArenaFullError, match=f"retired_bytes={2 * PAGE}"):
        arena.alloc(8 * PAGE)
    del pin
    arena.alloc(8 * PAGE)


def test_more_blocks_than_lines():
    arena = Arena(64 * PAGE, max_blocks=2)
    refs = [arena.alloc(1), arena.alloc(1)]
    with pytest.raises(ArenaFullError):
        arena.alloc(1)
    arena.free(refs[0])
    arena.alloc(1)


def test_trim_gives_pages_back():
    arena = Arena(1024 * PAGE, max_blocks=16)
    ref = arena.alloc(100 * PAGE)
    arena.view(ref).fill_(9)
    blocks = os.fstat(arena.fd).st_blocks
    arena.trim()
    assert os.fstat(arena.fd).st_blocks < blocks - 900 * 8
    assert (arena.view(ref) == 9).all()
    again = arena.view(arena.alloc(500 * PAGE))
    again.fill_(1)
    assert (again == 1).all()


@given(st.lists(st.tuples(st.sampled_from(["alloc", "free", "pin", "drop"]), st.integers(0, 30)), max_size=60))
def test_no_live_or_pinned_block_is_ever_overwritten(steps):
    arena = Arena(40 * PAGE, max_blocks=12, prefault=False)
    client = ArenaClient(arena.fd, prefault=False)
    live, pinned = [], []
    for number, (step, n) in enumerate(steps):
        if step == "alloc":
            try:
                ref = arena.alloc((n + 1) * 1000)
            except ArenaFullError:
                continue
            arena.view(ref).fill_(number)
            live.append((ref, number))
        elif step == "free" and live:
            arena.free(live.pop(n % len(live))[0])
        elif step == "pin" and live:
            ref, value = live[n % len(live)]
            pinned.append((client.view(ref), value))
        elif step == "drop" and pinned:
            pinned.pop(n % len(pinned))
        assert all((arena.view(ref) == value).all() for ref, value in live)
        assert all((view == value).all() for view, value in pinned)


CLIENT = """
import socket, sys, time
import torch
from rl_csrc import frames
from rl_csrc.arena import ArenaClient, BlockRef
connection = socket.socket(fileno=int(sys.argv[1]))
client = ArenaClient.receive(connection, timeout_s=60)
ref = BlockRef(int(sys.argv[2]), int(sys.argv[3]))
tensors = frames.decode(client.view(ref), verify=True).to_dict()
print(int(tensors["x"].sum()), flush=True)
time.sleep(600)
"""


def test_a_killed_reader_loses_its_pins():
    arena = Arena(64 * PAGE)
    frame = frames.encode({"x": torch.arange(1000)}, checksum=True)
    ref = arena.alloc(frame.nbytes)
    frame.write_into(arena.view(ref))
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", CLIENT, str(theirs.fileno()), *map(str, ref)]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)
    with ours, theirs:
        try:
            arena.share(ours)
            assert process.stdout.readline() == "499500\n"
            arena.free(ref)
            assert arena.reclaim() == 0  # the other process still looks at it
            process.kill()
            process.wait()
            assert arena.reclaim() == size_class(frame.nbytes)
            assert arena.stats().num_retired == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_reference_made_up_is_stale():
    arena = Arena(8 * PAGE)
    arena.alloc(1)
    for ref in (BlockRef(0, 3), BlockRef(1, 1), BlockRef(0, 0), BlockRef(1 << 40, 1)):
        with pytest.raises(StaleBlockError):
            arena.view(ref)


def test_what_is_not_an_arena_is_refused():
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    with pytest.raises(ArgumentError, match="sealed"):
        ArenaClient(fd)
    os.close(fd)
    with pytest.raises(ArgumentError, match="nbytes=0"):
        Arena(0)


def test_views_outlive_arena_and_client():
    arena = Arena(8 * PAGE)
    ref = arena.alloc(10)
    client = ArenaClient(arena.fd)
    view = client.view(ref)
    view.fill_(4)
    del arena, client
    gc.collect()
    assert view.tolist() == [4] * 10


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on fork beside threads
def test_a_forked_child_does_not_drop_its_parents_pins():
    arena = Arena(8 * PAGE)
    ref = arena.alloc(10)
    view = arena.view(ref)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            del view
            gc.collect()
            try:
                arena.view(ref)
            except RuntimeError:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    arena.free(ref)
    assert arena.reclaim() == 0
    del view
    assert arena.reclaim() == PAGE
