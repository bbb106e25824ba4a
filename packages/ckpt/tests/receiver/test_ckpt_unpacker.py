"""Buckets that no honest sender would send: refused in a sentence, and nothing outside of their place is touched."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_csrc
from rl_ckpt import DigestError, ProtocolError, ReceiverState, TensorError, UsageError
from rl_ckpt.protocol.messages import Bucket
from rl_ckpt.receiver.slots import HeldBuckets
from rl_ckpt.receiver.unpacker import Scratch, Unpacker
from rl_ckpt.tensors import delta
from rl_ckpt.tensors.buckets import Codec, Span
from rl_ckpt.tensors.digest import combine, leaves_of
from rl_ckpt.tensors.spec import TensorSpec, as_bytes
from rl_csrc.buffers.bucket import BucketPlan, aligned

BUCKET_BYTES = 1024
SPECS = [
    TensorSpec(name="a", dtype=torch.float32, shape=(10, 3)),
    TensorSpec(name="b", dtype=torch.uint8, shape=(3000,)),
    TensorSpec(name="b, too", dtype=torch.uint8, shape=(3000,), alias_of=1),
    TensorSpec(name="c", dtype=torch.bfloat16, shape=()),
    TensorSpec(name="d", dtype=torch.int64, shape=(0, 7)),
    TensorSpec(name="e", dtype=torch.float16, shape=(128,)),
    TensorSpec(name="e, too", dtype=torch.float16, shape=(128,), alias_of=5),
    TensorSpec(name="e, once more", dtype=torch.float16, shape=(128,), alias_of=5),
]


class Ring:
    """A ring of one bucket, inside guarded memory."""

    def __init__(self):
        self.memory = torch.randint(0, 256, (3 * BUCKET_BYTES,), dtype=torch.uint8)
        self.slots = [self.memory[BUCKET_BYTES : 2 * BUCKET_BYTES]]
        self.is_sender_memory = False

    def begin(self, bucket, pieces, *, is_stop):
        return False

    def fetch(self, bucket):
        pass

    def refresh(self, slot):
        return False


def unpacker(targets=None, has_base=False):
    return Unpacker(
        version=1,
        previous=ReceiverState.IDLE,
        sender="sender pid 1",
        bucket_bytes=BUCKET_BYTES,
        specs=SPECS,
        scratch=Scratch(),
        held_buckets=HeldBuckets(1, is_debug=False),
        has_base=has_base,
        targets=targets,
    )


def honest(slot):
    """The buckets that a sender would send of `SPECS`, digests of whatever is in the slot."""
    plan, buckets = BucketPlan(BUCKET_BYTES), {}
    for tensor, spec in enumerate(SPECS):
        if spec.alias_of is not None:
            span = Span(tensor, Codec.ALIAS, 0, 0, plan.offset, 0, 0, rl_csrc.digest(b""))
            buckets[plan.bucket].append(span)
            continue
        for piece in plan.place(spec.num_bytes):
            digest = rl_csrc.digest(slot[piece.bucket_offset : piece.bucket_offset + piece.num_bytes])
            span = Span(
                tensor, Codec.RAW, 0, piece.offset, piece.bucket_offset, piece.num_bytes, spec.num_bytes, digest
            )
            buckets.setdefault(piece.bucket, []).append(span)
    return [
        Bucket(sequence, 0, aligned(spans[-1].bucket_offset + spans[-1].num_bytes), tuple(spans))
        for sequence, spans in buckets.items()
    ]


def test_what_an_honest_sender_sends_is_taken():
    ring, into = Ring(), {spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in SPECS}
    for targets in (None, into):
        one, names = unpacker(targets), []
        for bucket in honest(ring.slots[0]):
            names += [name for name, _ in one.unpack(bucket, ring)]
        assert one.is_whole()
        assert names == ([spec.name for spec in SPECS] if targets is None else [])
        assert len(one.digests) == len(SPECS)
        assert one.missing() == []


def test_a_tie_that_does_not_follow_its_tensor_is_refused():
    """Twice, after another, in the bucket behind, before it is whole, of another shape, or of none that is tied."""
    ring = Ring()
    buckets = honest(ring.slots[0])
    last = buckets[-1]
    add_aliases = last.spans[-1]
    for wrong in (
        [(*last.spans, add_aliases)],
        [(*last.spans, add_aliases._replace(tensor=2))],
        [last.spans[:-1], (add_aliases._replace(bucket_offset=0),)],
        [(*last.spans[:-3], last.spans[-2]._replace(bucket_offset=last.spans[-3].bucket_offset))],
        [(*last.spans[:-1], add_aliases._replace(tensor=0))],
    ):
        one = unpacker()
        for bucket in buckets[:-1]:
            one.unpack(bucket, ring)
        *before, spans = wrong
        for sequence, some in enumerate(before, last.sequence):
            one.unpack(Bucket(sequence, 0, last.used_bytes, some), ring)
        used = last.used_bytes if len(spans) > 1 else 0
        with pytest.raises(ProtocolError, match="does not fit after what came before"):
            one.unpack(Bucket(one.num_buckets, 0, used, spans), ring)


def test_a_tensor_that_was_not_declared_is_refused():
    span = Span(len(SPECS), Codec.RAW, 0, 0, 0, 0, 0, rl_csrc.digest(b""))
    with pytest.raises(ProtocolError, match="has declared 8"):
        unpacker().unpack(Bucket(0, 0, 0, (span,)), Ring())


@pytest.mark.parametrize("is_strided", [False, True])
def test_a_difference_is_applied_to_plain_memory_only(is_strided):
    """A copy of a strided target would get it, with the digest that is due."""
    spec, base = SPECS[0], torch.randn(10, 3)
    base_copy = delta.BaseCopy()
    base_copy.note(spec, leaves_of(base_copy.replace(spec, as_bytes(base))))
    fresh = base.clone()
    fresh[0, 0] += 1
    ((part,),) = base_copy.advance(spec, as_bytes(fresh))
    target = base.t().contiguous().t() if is_strided else base.clone()
    ring, one = Ring(), unpacker({"a": target}, has_base=True)
    num_bytes = len(part.content)
    ring.slots[0][:num_bytes] = part.content
    span = Span(0, Codec.DELTA, 0, 0, 0, num_bytes, num_bytes, combine(leaves_of(part.content)))
    bucket = Bucket(0, 0, aligned(num_bytes), (span,))
    if is_strided:
        with pytest.raises(ProtocolError, match="which this end did not ask for"):
            one.unpack(bucket, ring)
        assert torch.equal(target, base)
    else:
        one.unpack(bucket, ring)
        assert torch.equal(target, fresh)


small = st.integers(0, 2**13) | st.sampled_from([0, 256, 512, 1024, 120, 3000, 2**32 - 1])
wide = small | st.integers(0, 2**64 - 1)
field = st.sampled_from(["tensor", "codec", "start", "offset", "bucket_offset", "num_bytes", "total_bytes", "digest"])


@pytest.mark.process
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_one_wrong_field_is_always_found(data):
    """Of any span of any bucket: never an index error, never a byte outside, never a tensor that is not verified."""
    ring = Ring()
    before = ring.memory.clone()
    guard = torch.zeros(5000, dtype=torch.uint8)
    is_into = data.draw(st.booleans())
    targets = {spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in SPECS} if is_into else None
    if targets is not None:
        targets["b"] = guard[1000:4000]
    one, buckets = unpacker(targets, has_base=data.draw(st.booleans())), honest(ring.slots[0])
    which = data.draw(st.integers(0, len(buckets) - 1))
    spans = list(buckets[which].spans)
    index = data.draw(st.integers(0, len(spans) - 1))
    values = {name: getattr(spans[index], name) for name in Span._fields}
    name = data.draw(field)
    wrong = data.draw((small if name in {"tensor", "codec"} else wide).filter(lambda value: value != values[name]))
    spans[index] = Span(**(values | {name: wrong}))
    buckets[which] = Bucket(buckets[which].sequence, 0, buckets[which].used_bytes, tuple(spans))

    def run():
        for bucket in buckets:
            one.unpack(bucket, ring)

    with pytest.raises((ProtocolError, DigestError, TensorError)):
        run()
    assert torch.equal(ring.memory, before)
    assert not guard[:1000].any()
    assert not guard[4000:].any()


@pytest.mark.process
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.builds(Span, small, st.integers(0, 4), wide, wide, wide, wide, wide, wide), max_size=6), small, small
)
def test_any_bucket_is_read_or_refused(spans, slot, used_bytes):
    ring, one = (
        Ring(),
        unpacker({spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in SPECS}, has_base=True),
    )
    before = ring.memory.clone()
    try:
        one.unpack(Bucket(0, slot, used_bytes, tuple(spans)), ring)
    except (ProtocolError, DigestError, TensorError):
        pass
    else:
        assert used_bytes == 0 or spans
    assert torch.equal(ring.memory, before)


@settings(max_examples=120, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_any_difference_is_applied_or_refused_whole(content, is_plausible):
    spec = TensorSpec(name="w", dtype=torch.float32, shape=(50,))
    base = torch.randn(50)
    if is_plausible:  # an honest one with some bytes overwritten
        fresh = base.clone()
        fresh[::7] += 1
        base_copy = delta.BaseCopy()
        base_copy.note(spec, leaves_of(base_copy.replace(spec, as_bytes(base))))
        ((part,),) = base_copy.advance(spec, as_bytes(fresh))
        raw = bytearray(part.content.tolist())
        for i, value in enumerate(content[:4]):
            raw[(value * 7 + i) % len(raw)] ^= value
        content = bytes(raw)
    memory = torch.frombuffer(bytearray(content + bytes(8)), dtype=torch.uint8)[: len(content)]
    target = base.clone()
    try:
        delta.apply(memory, target.view(torch.uint8), spec)
    except ProtocolError:
        assert torch.equal(target, base)


@pytest.mark.parametrize(
    "change", [{"sequence": 1}, {"slot": 1}, {"used_bytes": 0}, {"used_bytes": 512}, {"used_bytes": 1280}], ids=str
)
def test_a_bucket_out_of_order_or_of_a_wrong_size_is_refused(change):
    ring, into = Ring(), {spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in SPECS}
    first = honest(ring.slots[0])[0]
    assert first.used_bytes == 256
    one = unpacker(into)
    with pytest.raises(ProtocolError):
        one.unpack(replace(first, **change), ring)
    assert not any(as_bytes(tensor).any() for tensor in into.values())


def test_a_consumer_holds_all_slots_but_one():
    """Or nothing could be sent any more."""
    held = HeldBuckets(4, is_debug=False)
    holds = []
    for sequence in range(3):
        held.hand_out(sequence, [])
        holds.append(held.hold())
        assert held.recycle() == []
    held.hand_out(3, [])
    with pytest.raises(UsageError, match="3 buckets are held, and a session has 4; release one"):
        held.hold()
    holds[1].release()
    held.hold()
    assert held.recycle() == [1]
    assert held.close() == [0, 2, 3]


def test_a_bucket_is_free_when_its_last_hold_is_released():
    """However often the others are."""
    held = HeldBuckets(4, is_debug=False)
    held.hand_out(0, [])
    first, second = held.hold(), held.hold()
    assert held.recycle() == []
    held.hand_out(1, [])
    first.release()
    first.release()
    assert held.recycle() == [1]
    second.release()
    assert held.recycle() == [0]
    assert held.close() == []
