"""Deltas: apply(encode(new, old), old) is new to the bit, at every instruction set, and damage never writes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_csrc import ArgumentError, DeltaError, _cpu, delta, digest, frames

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool]
LEVELS = (0, 1, 2)


@pytest.fixture(params=LEVELS, ids=["baseline", "avx2", "avx512"], autouse=True)
def level(request):
    if _cpu.set_isa(request.param) != request.param:
        pytest.skip("this machine has no such instruction set")
    yield request.param
    _cpu.set_isa(-1)


def bits(tensor):
    return tensor.view(torch.uint8).reshape(-1)


def test_by_hand():
    old = torch.zeros(1000, dtype=torch.int16)
    new = old.clone()
    new[[3, 4, 300]] = torch.tensor([7, 8, 9], dtype=torch.int16)
    d = delta.encode(new, old)
    # Three unchanged, then 3; none, then 4; 295 unchanged = 255 + 40, then 300.
    assert d.gaps.tolist() == [3, 0, 255, 40]
    assert d.values.tolist() == [7, 8, 9]
    assert d.table.tolist() == [[3, 4]]
    assert delta.apply(old, d) == 3
    assert torch.equal(old, new)


@given(
    st.sampled_from(DTYPES),
    st.integers(0, 3000),
    st.sampled_from([0.0, 0.001, 0.01, 0.2, 1.0]),
    st.integers(0, 2**31),
)
def test_round_trip(dtype, n, fraction, seed):
    g = torch.Generator().manual_seed(seed)
    item = torch.empty(0, dtype=dtype).element_size()
    old = torch.randint(0, 256, (n, item), dtype=torch.uint8, generator=g)
    new = torch.where(torch.rand(n, 1, generator=g) < fraction, torch.randint_like(old, 256), old)
    a, b = new.reshape(-1).view(dtype), old.clone().reshape(-1).view(dtype)
    d = delta.encode(a, b, max_fraction=3.0)
    assert d.num_changed == (new != old).any(dim=1).sum()
    again = delta.Delta.from_mapping(frames.decode(frames.encode(d.as_mapping()).to_bytes()))
    delta.apply(b, again)
    assert torch.equal(bits(b), new.reshape(-1))
    delta.apply(b, d)  # overwriting twice is overwriting once
    assert torch.equal(bits(b), new.reshape(-1))


def test_several_chunks_and_a_long_silence():
    old = torch.randn(400_000)
    new = old.clone()
    new[[0, 65535, 65536, 262144, 399_999]] += 1
    d = delta.encode(new, old)
    assert d.table[:, 0].tolist() == [2, 1, 0, 0, 1, 0, 1]
    assert d.table[2].tolist() == [0, 0]  # an unchanged chunk has no gaps either
    delta.apply(old, d)
    assert torch.equal(old, new)


def test_bits_decide_not_values():
    old = torch.tensor([0.0, float("nan"), 1.0])
    new = torch.tensor([-0.0, float("nan"), 1.0])
    d = delta.encode(new, old, max_fraction=2)
    assert d.num_changed == 1
    delta.apply(old, d)
    assert torch.signbit(old[0])


def test_too_much_change_is_none():
    old = torch.zeros(10_000, dtype=torch.bfloat16)
    assert delta.encode(old + 1, old) is None
    assert delta.encode(old + 1, old, max_fraction=1.6) is not None


def test_one_percent_stays_under_two_percent_of_the_bytes():
    old = torch.randn(1_000_000).bfloat16()
    new = torch.where(torch.rand(old.shape) < 0.01, -old, old)
    d = delta.encode(new, old)
    assert d.nbytes < 0.02 * old.nbytes


def test_apply_bumps_the_version_and_refuses_strangers():
    old = torch.zeros(100)
    d = delta.encode(torch.ones(100), old, max_fraction=2)
    before = old._version
    delta.apply(old, d)
    assert old._version > before
    for target in (torch.zeros(70_000), torch.zeros(99), torch.zeros(100, dtype=torch.float64)):
        kept = target.clone()
        with pytest.raises(DeltaError):
            delta.apply(target, d)
        assert torch.equal(target, kept)
    with pytest.raises(ArgumentError, match="contiguous"):
        delta.apply(torch.zeros(20, 10).t()[:10], d)
    with pytest.raises(ArgumentError, match="same dtype, shape and device"):
        delta.encode(torch.zeros(3), torch.zeros(4))


def damage_cases():
    g = torch.Generator().manual_seed(7)
    for n in (100, 66_000):
        old = torch.randint(0, 100, (n,), dtype=torch.int16, generator=g)
        yield old, delta.encode(torch.where(torch.rand(n, generator=g) < 0.02, old + 1, old), old)


DAMAGE_CASES = list(damage_cases())


@given(st.sampled_from([0, 1]), st.sampled_from(["table", "gaps"]), st.integers(0, 1 << 20), st.integers(1, 255))
def test_damage_is_an_error_and_writes_nothing(case, name, at, flip):
    old, d = DAMAGE_CASES[case]
    n = old.numel()
    arrays = {key: array.clone() for key, array in d.as_mapping().items()}
    flat = arrays[name].view(-1).view(torch.uint8)
    flat[at % flat.numel()] ^= flip
    guarded = torch.full((n + 128,), 55, dtype=torch.int16)
    target = guarded[64 : 64 + n]
    target.copy_(old)
    try:
        delta.apply(target, delta.Delta(**arrays))
    except DeltaError:
        assert torch.equal(target, old)
    assert (guarded[:64] == 55).all()
    assert (guarded[64 + n :] == 55).all()


LEAF = 512 << 10


def parsed(content, num_elements, dtype):
    """The three arrays of a difference that was laid out as one run of bytes."""
    gap_bytes, num_changed = content[:16].clone().view(torch.int64).tolist()
    num_chunks = -(-num_elements // delta.CHUNK_ELEMENTS)
    gaps_at = 16 + 8 * num_chunks
    values_at = gaps_at + -(-gap_bytes // 8) * 8
    item = torch.empty(0, dtype=dtype).element_size()
    assert content.numel() == values_at + num_changed * item
    return delta.Delta(
        table=content[16:gaps_at].clone().view(torch.int32).view(-1, 2),
        gaps=content[gaps_at : gaps_at + gap_bytes],
        values=content[values_at:].clone().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item]),
    )


def leaves(tensor):
    return tensor.reshape(-1).view(torch.uint8).split(LEAF)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 300_000),
    st.sampled_from([0.0, 0.001, 0.01, 0.2, 1.0]),
    st.integers(0, 2**31),
)
def test_advance_is_encode_apply_and_digest(dtype, n, fraction, seed):
    """Over leaves and chunks that do not fit, at any size of element: the bytes are those of the three steps."""
    g = torch.Generator().manual_seed(seed)
    item = torch.empty(0, dtype=dtype).element_size()
    old = torch.randint(0, 256, (n, item), dtype=torch.uint8, generator=g)
    new = torch.where(torch.rand(n, 1, generator=g) < fraction, torch.randint(0, 256, old.shape, generator=g), old)
    fresh, base = new.to(torch.uint8).reshape(-1).view(dtype), old.clone().reshape(-1).view(dtype)
    before = [leaf.clone() for leaf in leaves(base)]
    digests = [digest(leaf) for leaf in before]
    out = torch.full((3 * LEAF,), 7, dtype=torch.uint8)
    done = []
    while len(done) < len(digests):
        got = delta.advance(fresh, base, digests, out, first=len(done), leaf_nbytes=LEAF, enough=1000)
        assert got
        assert all(leaf.nbytes for leaf in got[:-1])
        for leaf in got:
            index = len(done)
            fresh_leaf = leaves(fresh)[index]
            assert leaf.digest == digest(fresh_leaf)
            expected = delta.encode(fresh_leaf.view(dtype), before[index].view(dtype))
            content = out[leaf.offset : leaf.offset + leaf.nbytes]
            if expected is None or leaf.nbytes == 0:
                assert leaf.nbytes == 0
                assert expected is None or expected.nbytes + 16 + 7 >= fresh_leaf.numel()
            else:
                assert leaf.content_digest == digest(content)
                found = parsed(content, fresh_leaf.numel() // item, dtype)
                assert torch.equal(found.table, expected.table)
                assert torch.equal(found.gaps, expected.gaps)
                assert torch.equal(found.values, expected.values)
                target = before[index].view(dtype)
                assert delta.apply_digest(target, found) == leaf.digest
                assert torch.equal(bits(target), fresh_leaf)
            done.append(leaf)
    assert torch.equal(bits(base), bits(fresh))


def test_advance_writes_nothing_behind_out():
    """One gap and one value are just as many bytes as allowed, and the zeros between them are more."""
    for room in range(24, 49):
        fresh, base = torch.zeros(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
        base[100] = 1
        memory = torch.full((64,), 7, dtype=torch.uint8)
        digests = [digest(base)]
        got = delta.advance(fresh, base, digests, memory[:room], leaf_nbytes=LEAF, max_fraction=5 / fresh.nbytes)
        assert bool((memory[room:] == 7).all()), room
        assert [leaf.nbytes for leaf in got] == ([16 + 8 + 8 + 4] if room >= 36 else []), room


def test_advance_leaves_what_it_does_not_return():
    """A full `out` ends it, and the leaves behind are as they were."""
    fresh = torch.randint(0, 100, (3 * LEAF // 2,), dtype=torch.int16)
    base = fresh.clone()
    base[::100] += 1
    kept, digests = base.clone(), [digest(leaf) for leaf in leaves(base)]
    got = delta.advance(fresh, base, digests, torch.empty(LEAF, dtype=torch.uint8), leaf_nbytes=LEAF, enough=1)
    assert len(got) == 1
    assert torch.equal(base[: LEAF // 2], fresh[: LEAF // 2])
    assert torch.equal(base[LEAF // 2 :], kept[LEAF // 2 :])
    assert delta.advance(fresh, base, digests, torch.empty(100, dtype=torch.uint8), leaf_nbytes=LEAF) == []
    for wrong in ({"digests": digests[:1]}, {"leaf_nbytes": 1000}, {"alignment": 3}, {"out": torch.empty(9)}):
        arguments = {"digests": digests, "out": torch.empty(LEAF, dtype=torch.uint8), "leaf_nbytes": LEAF} | wrong
        with pytest.raises(ArgumentError):
            delta.advance(fresh, base, **arguments)
