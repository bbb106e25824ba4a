"""The digest: its definition by hand, every instruction set against plain torch, and what it must notice."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_csrc import ArgumentError, _cpu, digest, digest_finish, digest_many, digest_sum
from rl_csrc.buffers import digest as digests

MASK = (1 << 64) - 1
LEVELS = (0, 1, 2)


@pytest.fixture(params=LEVELS, ids=["baseline", "avx2", "avx512"], autouse=True)
def level(request):
    if _cpu.set_isa(request.param) != request.param:
        pytest.skip("this machine has no such instruction set")
    yield request.param
    _cpu.set_isa(-1)


def by_hand(data: bytes) -> int:
    """FRAMES.md's definition, one word at a time, sharing nothing with the code under test."""

    def mix(x):
        for _ in range(2):
            x = ((x ^ (x >> 32)) * 0xD6E8FEB86659FD93) & MASK
        return x ^ (x >> 32)

    step = 0x9E3779B97F4A7C15
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    total = sum(mix(word ^ ((i + 1) * step & MASK)) for i, word in enumerate(words))
    return mix((total + (len(data) + 1) * step) & MASK)


def test_known_values():
    # Written down once, so that no later change of the definition goes unnoticed.
    assert digest(b"") == 5627194300713089401
    assert digest(b"hello") == 0x6AF01DBF1E8A36BC
    assert digest(torch.arange(10)) == 0xE855EFC93334ED2A


@given(st.binary(max_size=700))
def test_equals_the_definition(data):
    assert digest(data) == by_hand(data)


@pytest.mark.parametrize("nbytes", [1, 7, 8, 63, 64, 65, 4095, 4096, 65_535, 65_536, 100_003, (1 << 20) + 13])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_equals_plain_torch_at_any_alignment(nbytes, shift):
    raw = torch.randint(0, 256, (nbytes + shift,), dtype=torch.uint8)[shift:]
    assert digest_sum(raw, offset=64) == digests.reference_sum(raw, 64)


@given(st.binary(max_size=400), st.lists(st.integers(0, 50), max_size=4))
def test_pieces_add_up(data, cuts):
    edges = sorted({0, len(data), *(8 * c for c in cuts if 8 * c < len(data))})
    total = sum(digest_sum(data[a:b], offset=a) for a, b in itertools.pairwise(edges))
    assert digest_finish(total & MASK, len(data)) == digest(data)


def test_every_single_bit_counts():
    data = bytearray(range(96))
    seen = {digest(data)}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(digest(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * len(data) + 1


def test_order_length_and_signs_count():
    x = torch.randn(4096)
    swapped = x.clone()
    swapped[[10, 700]] = x[[700, 10]]
    negated = x.clone()
    negated[[1, 3, 5, 7]] *= -1  # the top bit of four words: what linear sums miss
    longer = torch.cat([x, torch.zeros(1)])
    assert len({digest(t) for t in (x, swapped, negated, longer, x[:-1])}) == 5


def test_only_the_bytes_count():
    x = torch.randn(6, 4)
    assert digest(x) == digest(x.view(-1).view(torch.int32)) == digest(bytes(x.numpy().tobytes()))
    assert digest(x.t()) == digest(x.t().contiguous()) != digest(x)
    assert digest(torch.nn.Parameter(x)) == digest(x)
    z = torch.randn(5, dtype=torch.complex64)
    assert digest(z.conj()) == digest(z.conj().resolve_conj())
    negated = z[:1].conj().imag  # contiguous, as it is one number
    assert digest(negated) == digest(negated.resolve_neg().clone())


def test_a_piece_must_start_on_a_word():
    with pytest.raises(ArgumentError, match="offset is 4"):
        digest_sum(b"abc", offset=4)


def test_not_bytes():
    with pytest.raises(TypeError):
        digest("text")


def test_digests_of_many_pieces_are_those_of_each():
    data = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    pieces = data.split([0, 7, 1000, 3993])
    assert digest_many(pieces) == [digest(piece) for piece in pieces]
    assert digest_many([]) == []
