"""Rows laid together and dealt to parts, against torch and against a search through all ways to deal them."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_csrc import rows
from rl_csrc.errors import ArgumentError


def test_offsets_of_rows_that_are_alike():
    offsets = rows.row_offsets([torch.zeros(2, 3), torch.zeros(0, 3), torch.ones(4, 3, requires_grad=True)])
    assert offsets is not None
    assert (offsets.tolist(), offsets.dtype) == ([0, 2, 2, 6], torch.int64)
    offsets += 1  # its memory is its own


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, 1),
        torch.tensor(1.0),
        torch.zeros(4)[::2],
        torch.zeros(2, dtype=torch.complex64),
        torch._neg_view(torch.ones(2)),
        torch.zeros(2, device="meta"),
        [1.0],
    ],
    ids=["dtype", "dims", "scalar", "strided", "complex", "negated", "device", "list"],
)
def test_rows_that_are_not_alike_or_not_plain_have_none(other):
    assert rows.row_offsets([torch.zeros(2), other]) is None
    assert rows.row_offsets([other, torch.zeros(2)]) is None


def test_rows_cut_out_of_a_column():
    offsets = torch.tensor([0, 3, 3, 10, 12])
    assert rows.ends(offsets[1:]) == (3, 12)
    start, stop, longest, own = rows.cut(offsets, 1, 3, [])
    assert (start, stop, longest, own.tolist()) == (3, 12, 7, [0, 0, 7, 9])
    own += 1  # its memory is its own
    assert offsets.tolist() == [0, 3, 3, 10, 12]
    assert rows.cut(offsets, 4, 0, [])[:3] == (12, 12, 0)


def test_offsets_that_are_known_are_not_made_again():
    known = [torch.tensor([0, 2]), torch.tensor([0, 2, 5])]
    assert rows.cut(torch.tensor([4, 4, 6, 9]), 1, 2, known)[3] is known[1]
    assert rows.cut(torch.tensor([4, 4, 6, 9]), 0, 2, known)[3].tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("offsets", "first", "count", "match"),
    [
        (torch.tensor([0, 1]), 0, 2, "2 rows from 0 on are not among the 1"),
        (torch.tensor([0, 1]), 2, 0, "0 rows from 2 on"),
        (torch.tensor([0, 1]), 1, (1 << 64) - 1, "rows from 1 on"),
        (torch.tensor([0, 4, 3]), 0, 2, "fall from 4 to 3"),
        (torch.tensor([0, 1], dtype=torch.int32), 0, 1, "contiguous int64 tensor"),
        (torch.arange(4)[::2], 0, 1, "contiguous int64 tensor"),
        (torch.tensor(0), 0, 0, "contiguous int64 tensor"),
        (torch.empty(0, dtype=torch.int64), 0, 0, "contiguous int64 tensor"),
        ([0, 1], 0, 1, "not <class 'list'>"),
    ],
    ids=["many", "beyond", "overflow", "falling", "dtype", "strided", "scalar", "empty", "list"],
)
def test_rows_that_a_column_does_not_have(offsets, first, count, match):
    with pytest.raises(ArgumentError, match=match):
        rows.cut(offsets, first, count, [])


def test_join_is_a_concatenation_or_nothing():
    pieces = [torch.arange(5), torch.tensor(7), torch.arange(1_000_000), torch.empty(0, dtype=torch.int64)]
    out = torch.full((8 * 1_000_006 + 3,), 0xAA, dtype=torch.uint8)
    assert rows.join(pieces, out)
    assert torch.equal(out[:-3].view(torch.int64), torch.cat([piece.reshape(-1) for piece in pieces]))
    assert out[-3:].tolist() == [0xAA] * 3
    before = out.clone()
    for lazy in (torch._neg_view(torch.ones(2)), torch.zeros(4)[::2], torch.tensor([1j]).conj()):
        assert not rows.join([torch.zeros(1), lazy], out)
    assert torch.equal(out, before)
    with pytest.raises(ArgumentError, match="more bytes than the 15 of out"):
        rows.join([torch.arange(2)], torch.zeros(15, dtype=torch.uint8))


def big_joins() -> tuple[list[tuple[list[torch.Tensor], torch.Tensor]], list[torch.Tensor]]:
    """Two joins of megabytes, with pieces that are empty, small, and end inside of what one thread takes at once."""
    pieces = [[torch.randint(0, 9, (n,)) for n in (300_000, 5, 0, 123_457)], [torch.rand(700_001)]]
    joins = [(each, torch.full((8 * 500_000,), 0xAA, dtype=torch.uint8)) for each in pieces]
    return joins, [torch.cat(each).view(torch.uint8) for each in pieces]


@pytest.mark.process
@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "let go of"])
def test_joins_are_whole_once_finished_or_released(is_finished):
    for _ in range(50):
        joins, expected = big_joins()
        joining = rows.begin_joins(joins)
        assert joining is not None
        if is_finished:
            joining.finish()
            joining.finish()  # nothing more
        else:
            del joining
        for (_, out), whole in zip(joins, expected, strict=True):
            assert torch.equal(out[: len(whole)], whole)
            assert set(out[len(whole) :].tolist()) == {0xAA}


def test_joins_that_overlap_in_time_do_without_the_thread():
    all_joins = [big_joins() for _ in range(3)]
    begun = [rows.begin_joins(joins) for joins, _ in all_joins]
    for joining, (joins, expected) in zip(begun, all_joins, strict=True):
        joining.finish()
        assert all(torch.equal(out[: len(w)], w) for (_, out), w in zip(joins, expected, strict=True))


def test_joins_are_begun_whole_or_not_at_all():
    out = torch.full((64,), 0xAA, dtype=torch.uint8)
    assert rows.begin_joins([([torch.zeros(1)], out[:8]), ([torch.zeros(4)[::2]], out[8:])]) is None
    with pytest.raises(ArgumentError, match="more bytes than the 4 of out"):
        rows.begin_joins([([torch.zeros(1)], out[:8]), ([torch.arange(1)], out[8:12])])
    assert set(out.tolist()) == {0xAA}
    nothing = rows.begin_joins([])
    assert nothing is not None
    nothing.finish()


def test_what_is_copied_lives_until_it_is():
    out = torch.zeros(4_000_000, dtype=torch.int64)
    joining = rows.begin_joins([([torch.arange(4_000_000)], out)])  # nobody else refers to this piece
    torch.full((4_000_000,), -1)  # its memory, had it been let go of
    joining.finish()
    assert torch.equal(out, torch.arange(4_000_000))


CHILD = """
import os, sys, numpy, torch
from rl_csrc import rows

def copy():
    out = torch.from_numpy(numpy.zeros(1_000_000))
    rows.begin_joins([([source], out)]).finish()
    return bool((out.numpy() == source.numpy()).all())

source = torch.from_numpy(numpy.arange(1e6))
assert copy()
begun_before = torch.from_numpy(numpy.zeros(1_000_000))
joining = rows.begin_joins([([source], begun_before)])
child = os.fork()
joining.finish()  # in both
good = bool((begun_before.numpy() == source.numpy()).all()) and copy()
if not child:
    os._exit(0 if good else 1)
sys.exit(0 if good and os.waitpid(child, 0)[1] == 0 else 1)
"""


@pytest.mark.process
def test_a_forked_child_has_a_thread_of_its_own():
    subprocess.run([sys.executable, "-W", "ignore", "-c", CHILD], check=True, timeout=120)


def test_slices_of_several_sources():
    sources = [torch.arange(6), torch.arange(100, 106)]
    out = torch.zeros(5, dtype=torch.int64)
    assert rows.join_slices(sources, [(1, 4, 6), (0, 0, 3), (0, 2, 2)], out, width=8) == 40
    assert out.tolist() == [104, 105, 0, 1, 2]


@pytest.mark.parametrize("wrong", [(2, 0, 1), (0, 0, 7), (0, 3, 2), (0, 6, 7)])
def test_a_slice_outside_of_its_source_is_refused(wrong):
    with pytest.raises(ArgumentError, match="lies in none of the 2 sources"):
        rows.join_slices([torch.arange(6)] * 2, [wrong], torch.zeros(9, dtype=torch.int64), width=8)


def test_slices_need_a_width_and_room():
    with pytest.raises(ArgumentError, match="width is 0"):
        rows.join_slices([torch.arange(6)], [(0, 0, 1)], torch.zeros(9), width=0)
    with pytest.raises(ArgumentError, match="more bytes than the 8 of out"):
        rows.join_slices([torch.arange(6)], [(0, 0, 2)], torch.zeros(1, dtype=torch.int64), width=8)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=24), st.integers(1, 4))
def test_balanced_parts(lengths: list[int], num_parts: int):
    lengths = lengths * num_parts
    order = rows.balanced_order(lengths, num_parts)
    assert sorted(order) == list(range(len(lengths)))
    room = len(lengths) // num_parts
    parts = [order[i * room : (i + 1) * room] for i in range(num_parts)]
    assert all(part == sorted(part) for part in parts)
    # By hand: longest first, each to the smallest sum that has room.
    sums, counts, expected = [0] * num_parts, [0] * num_parts, [[] for _ in range(num_parts)]
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        part = min((p for p in range(num_parts) if counts[p] < room), key=sums.__getitem__)
        sums[part] += lengths[row]
        counts[part] += 1
        expected[part].append(row)
    assert parts == [sorted(part) for part in expected]


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(ArgumentError, match="3 rows cannot be dealt to 2 equal parts"):
        rows.balanced_order([1, 2, 3], 2)
    with pytest.raises(ArgumentError, match="may not fit into 64 bits"):
        rows.balanced_order([1 << 62, 1 << 62], 2)
