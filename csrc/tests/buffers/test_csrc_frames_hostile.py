"""Frames that were damaged, cut or forged: an error or an equal result, never anything outside the block."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_csrc import FrameError, digest, frames
from rl_csrc.buffers.frames import Ragged

MAPPING = {
    "w": torch.arange(12, dtype=torch.int16).reshape(3, 4),
    "r": Ragged(Ragged(torch.arange(6.0), torch.tensor([0, 2, 6])), torch.tensor([0, 2], dtype=torch.int32)),
    "b": b"some bytes",
    "e": torch.empty(0, 3),
}
GOOD = bytes(frames.encode(MAPPING, checksum=True).to_bytes())
HEADER = int.from_bytes(GOOD[24:28], "little")
ENTRY = struct.Struct("<QQIHBBBBBBIQQQQ")
FIELDS = (
    *("offset", "nbytes", "name_offset", "name_nbytes", "kind", "dtype", "ndim", "levels", "wide0", "wide1", "dims"),
    *("offset0", "nbytes0", "offset1", "nbytes1"),
)


def sign(block: bytearray) -> bytearray:
    """Store a right header digest, as a forger would, so that the checks behind it are reached."""
    header = int.from_bytes(block[24:28], "little")
    if 64 <= header <= len(block):
        block[56:64] = digest(bytes(block[:56]) + bytes(8) + bytes(block[64:header])).to_bytes(8, "little")
    return block


def use(view):
    """Touch everything that a view offers."""
    for name, value in view.items():
        assert name in view
        while isinstance(value, tuple):
            assert value[1][0] == 0
            value = value[0]
        if isinstance(value, torch.Tensor):
            value.view(torch.uint8).sum() if value.ndim else value.clone()
        else:
            bytes(value)


def forged(index, **changes):
    block = bytearray(GOOD)
    at = 64 + 64 * index
    entry = dict(zip(FIELDS, ENTRY.unpack_from(block, at), strict=True))
    ENTRY.pack_into(block, at, *{**entry, **changes}.values())
    return sign(block)


def test_the_forger_works():
    use(frames.decode(forged(0)))


def is_refused(block):
    try:
        frames.decode(block)
    except FrameError:
        return True
    return False


def test_cut_short():
    assert [size for size in range(0, len(GOOD), 7) if not is_refused(bytearray(GOOD[:size]))] == []


def test_no_flipped_bit_of_the_header_survives():
    def flipped(number):
        block = bytearray(GOOD)
        block[number // 8] ^= 1 << number % 8
        return block

    assert [number for number in range(8 * HEADER) if not is_refused(flipped(number))] == []


@pytest.mark.process
@given(st.integers(HEADER, len(GOOD) - 1), st.integers(0, 7))
def test_a_flipped_bit_of_the_payload_is_found_by_verify(byte, bit):
    block = bytearray(GOOD)
    block[byte] ^= 1 << bit
    with pytest.raises(FrameError):
        frames.decode(block, verify=True)


@pytest.mark.promise("A damaged frame is an error, or views inside the block")
@pytest.mark.process
@given(st.lists(st.tuples(st.integers(8, HEADER - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=600)
def test_forged_headers_give_an_error_or_views_inside(changes):
    block = bytearray(GOOD)
    for at, byte in changes:
        block[at] = byte
    try:
        view = frames.decode(sign(block))
    except FrameError:
        return
    use(view)


@given(st.binary(max_size=300))
def test_noise_is_not_a_frame(noise):
    with pytest.raises(FrameError):
        frames.decode(bytearray(noise))


HUGE = 2**63


@pytest.mark.parametrize(
    ("index", "changes", "says"),
    [
        (0, {"offset": HUGE}, "values do not lie"),
        (0, {"offset": 2**64 - 64}, "values do not lie"),
        (0, {"offset": 0}, "values do not lie"),
        (0, {"offset": HEADER + 8}, "values do not lie"),
        (0, {"nbytes": 2**64 - 1}, "values do not lie"),
        (0, {"nbytes": 20}, "as many bytes"),
        (0, {"name_offset": 2**32 - 1}, "outside the names"),
        (0, {"name_nbytes": 65535}, "outside the names"),
        (0, {"name_offset": 1}, "same name"),
        (0, {"kind": 3}, "kind and dtype"),
        (0, {"kind": 2}, "kind and dtype"),
        (0, {"dtype": 0}, "kind and dtype"),
        (0, {"dtype": 200}, "kind and dtype"),
        (0, {"ndim": 33}, "outside the dims"),
        (0, {"dims": 2**32 - 1}, "outside the dims"),
        (0, {"ndim": 1}, "as many bytes"),
        (0, {"levels": 1}, "kind does not go"),
        (1, {"levels": 0}, "kind does not go"),
        (1, {"levels": 3}, "kind does not go"),
        (1, {"wide0": 3}, "neither int32 nor int64"),
        (1, {"offset0": HEADER}, "offsets do not lie"),
        (1, {"nbytes0": 0}, "no entry"),
        (1, {"nbytes0": 20}, "a part of one"),
        (1, {"nbytes0": 16}, "do not rise"),
        (2, {"offset": HEADER}, "behind the entry"),
        (2, {"ndim": 1, "dims": 0}, "kind does not go"),
    ],
)
def test_forged_entries(index, changes, says):
    with pytest.raises(FrameError, match=says):
        frames.decode(forged(index, **changes))


def test_forged_dims():
    at = 64 + 64 * len(MAPPING)
    for first, second in [(2**62, 4), (2**64 - 1, 1), (2**32, 2**32), (2**63, 0)]:
        block = bytearray(GOOD)
        struct.pack_into("<2Q", block, at, first, second)
        with pytest.raises(FrameError, match="2\\^63|as many"):
            frames.decode(sign(block))


def test_forged_names():
    for bad in (b"\xff", b"\xc0", b"\x80"):
        block = bytearray(GOOD)
        at = 64 + 64 * len(MAPPING) + 8 * 5
        assert block[at : at + 4] == b"wrbe"
        block[at : at + 1] = bad
        with pytest.raises(FrameError, match="UTF-8"):
            frames.decode(sign(block))


def test_offsets_that_fall_are_found_where_they_lie():
    block = bytearray(GOOD)
    offset0 = ENTRY.unpack_from(block, 128)[11]
    for inner in [(0, 7, 6), (1, 2, 6), (0, 2, 5), (0, -1, 6), (0, 2**62, 6)]:
        struct.pack_into("<3q", block, offset0, *inner)
        with pytest.raises(FrameError, match="do not rise"):
            frames.decode(block)


def test_a_block_that_is_not_aligned_says_so():
    block = torch.empty(len(GOOD) + 8, dtype=torch.uint8)
    block[3 : 3 + len(GOOD)] = torch.frombuffer(bytearray(GOOD), dtype=torch.uint8)
    with pytest.raises(FrameError, match="multiple of 8"):
        frames.decode(block[3:])


def test_verify_needs_a_digest():
    with pytest.raises(FrameError, match="checksum=True"):
        frames.decode(frames.encode({"x": b"a"}).to_bytes(), verify=True)


def test_another_version_says_what_to_do():
    block = bytearray(GOOD)
    block[8] = 2
    with pytest.raises(FrameError, match="version 2.*upgrade"):
        frames.decode(block)
