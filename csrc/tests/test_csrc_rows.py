"""Rows laid together and dealt to parts, against torch and against a search through all ways to deal them."""

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
