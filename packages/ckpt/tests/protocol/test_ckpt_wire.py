"""The messages of WIRE.md: bytes by hand, round trips, and whatever a stranger may send."""

import contextlib
import re
import struct
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_ckpt import ProtocolError
from rl_ckpt.protocol.messages import (
    KINDS,
    NONCE_BYTES,
    PROOF_BYTES,
    Abort,
    AbortReason,
    Begin,
    Bucket,
    Buckets,
    Commit,
    Committed,
    Decoder,
    Free,
    Hello,
    Manifest,
    Mapped,
    NewGroup,
    Proof,
    Ready,
    Seal,
    Session,
    Sources,
    Staged,
    Stream,
    decode,
    encode,
)
from rl_ckpt.tensors.buckets import Span
from rl_ckpt.tensors.spec import DTYPE_CODES, TensorSpec

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
span = st.builds(Span, u32, u32, u64, u64, u64, u64, u64, u64)
spec = st.builds(
    TensorSpec,
    name=st.text(max_size=20).filter(lambda s: s.isprintable()),
    dtype=st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.bool]),
    shape=st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
)
bucket = st.builds(Bucket, u32, u32, u64, st.lists(span, max_size=5).map(tuple))
message = st.one_of(
    st.builds(Hello, u16, u16, u32, st.binary(min_size=16, max_size=16)),
    st.builds(Proof, st.binary(min_size=32, max_size=32)),
    st.builds(Session, u64, u32, u32, u64, st.binary(max_size=40)),
    st.builds(Stream, u64, u32, u32),
    st.builds(Ready, u64, u64, u64, u32),
    st.builds(Begin, u64, u64),
    st.builds(Manifest, u32, st.lists(spec, max_size=5).map(tuple)),
    st.builds(Buckets, st.lists(bucket, min_size=1, max_size=3).map(tuple)),
    st.builds(Free, st.lists(u32, min_size=1, max_size=5).map(tuple)),
    st.builds(Seal, u32, u32, u64, u64),
    st.builds(Staged, u64, u64, u32, u32, u64, u32, u32),
    st.builds(Commit, u64),
    st.builds(NewGroup, u32, u32, u32, u32),
    st.builds(
        Sources,
        st.lists(st.tuples(st.binary(min_size=64, max_size=64), u64), max_size=4).map(tuple),
        st.lists(st.tuples(u32, u32, u64), max_size=4).map(tuple),
    ),
    st.builds(Mapped, u32, u32, st.lists(u64, max_size=5).map(tuple)),
    st.builds(Committed, u64),
    st.builds(Abort, st.sampled_from(AbortReason), st.text(max_size=30)),
)


def test_a_message_written_out_by_hand():
    head = b"RLCK" + bytes([4, 0, 0, 0, 16, 0, 0, 0, 7, 0, 0, 0])
    body = bytes([0x05, 0x01, 0, 0, 0, 0, 0, 0]) + bytes([0x04, 0x01, 0, 0, 0, 0, 0, 0])
    data = head + struct.pack("<I", zlib.crc32(body + head)) + body
    assert encode(Begin(0x105, 0x104), 7) == data
    assert Decoder().feed(data) == [(7, Begin(0x105, 0x104))]


def test_a_manifest_written_out_by_hand():
    code = DTYPE_CODES[torch.bfloat16]
    body = struct.pack("<IIBBHIQQ", 3, 2, code, 2, 3, 2**32 - 1, 5, 6) + b"a.b"
    body += struct.pack("<BBHIQQ", code, 2, 1, 3, 5, 6) + b"c"
    first = TensorSpec(name="a.b", dtype=torch.bfloat16, shape=(5, 6))
    manifest = Manifest(3, (first, TensorSpec(name="c", dtype=torch.bfloat16, shape=(5, 6), alias_of=3)))
    assert encode(manifest, 0)[20:] == body
    assert decode(5, body) == manifest
    assert [spec.alias_of for spec in decode(5, body).specs] == [None, 3]
    assert manifest.specs[0].num_bytes == 60


def test_a_tensor_is_tied_to_one_before_it_or_refused():
    spec = TensorSpec(name="a", dtype=torch.bool, shape=(), alias_of=4)
    assert decode(5, encode(Manifest(5, (spec,)), 0)[20:]).specs[0].alias_of == 4
    with pytest.raises(ProtocolError, match="alias of 4"):
        decode(5, encode(Manifest(4, (spec,)), 0)[20:])


def test_the_dtype_codes_are_those_of_the_specification():
    table = Path(__file__).parents[2].joinpath("WIRE.md").read_text()
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ") and "`torch." in line]
    assert {name.strip(" `"): int(code) for code, name in rows} == {str(d): c for d, c in DTYPE_CODES.items()}


SIZES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}


def written_formats():
    """Of WIRE.md's table: for each kind the name, the fields with a size, and whether more follows."""
    text = Path(__file__).parents[2].joinpath("WIRE.md").read_text()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 5 and cells[0].isdecimal():
            head, _, rest = cells[3].partition(";")
            found = re.findall(r"(\w+) (u8|u16|u32|u64|\d+ bytes)", head)
            yield int(cells[0]), cells[1], found, bool(rest)


@pytest.mark.promise("The wire format is the one written down")
def test_the_specification_lists_the_code_s_message_formats():
    """Names, order and sizes of all fields in front; hand-made bytes above hold what the table cannot say."""
    written = {kind: (name, fields, has_rest) for kind, name, fields, has_rest in written_formats()}
    assert {kind: name for kind, (name, _, _) in written.items()} == {
        kind: message.__name__ for kind, message in KINDS.items()
    }
    for kind, (name, fields, has_rest) in written.items():
        message = KINDS[kind]
        codes = "".join(
            f"{struct.calcsize(SIZES[size])}x" if field == "reserved" else SIZES.get(size) or f"{size.split()[0]}s"
            for field, size in fields
        )
        assert message.LAYOUT.format == f"<{codes}", name
        assert has_rest == bool(message.TAILS), name
        fixed = [field for field, _ in fields if field != "reserved"]
        num_counts = sum(tail.is_counted for tail in message.TAILS)
        names = message.__match_args__[: len(message.__match_args__) - len(message.TAILS)]
        assert tuple(fixed[: len(fixed) - num_counts]) == names, name
    assert (NONCE_BYTES, PROOF_BYTES) == (16, 32)


@pytest.mark.process
@given(st.lists(st.tuples(u32, message), max_size=6), st.lists(st.integers(1, 50), min_size=1))
def test_messages_survive_any_cut_of_the_stream(messages, cuts):
    stream = b"".join(encode(message, sync) for sync, message in messages)
    decoder, got = Decoder(), []
    while stream:
        length, cuts = cuts[0], cuts[1:] + cuts[:1]
        got += decoder.feed(stream[:length])
        stream = stream[length:]
    assert got == messages
    assert decoder.is_empty


@given(message, st.data())
def test_a_flipped_bit_is_never_taken_for_a_message(message, data):
    raw = bytearray(encode(message, 1))
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(ProtocolError):
        assert Decoder().feed(bytes(raw)) == []  # a length that grew: the rest is waited for


@given(st.sampled_from(sorted(KINDS)), st.binary(max_size=200))
def test_any_body_is_read_or_refused(kind, body):
    with contextlib.suppress(ProtocolError):
        decode(kind, body)


@given(st.binary(min_size=20, max_size=200))
def test_any_stream_is_read_or_refused(stream):
    with pytest.raises(ProtocolError):
        Decoder().feed(stream)


@pytest.mark.parametrize("name", ["x" * 65536, "\ud800"])
def test_names_that_do_not_fit_the_wire(name):
    with pytest.raises(ProtocolError, match="Manifest"):
        encode(Manifest(0, (TensorSpec(name=name, dtype=torch.bool, shape=()),)), 0)
