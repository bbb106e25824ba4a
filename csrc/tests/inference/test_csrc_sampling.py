"""Draws of tokens: hand-computed distributions, and the kernel of every level beside plain torch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_csrc import ArgumentError, _cpu, sampling
from rl_csrc.inference.sampling import mix, streams_of, uniform

LEVELS = list(range(_cpu.set_kernel_level(-1) + 1))
PROBS = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])


@pytest.fixture(params=["reference", *LEVELS])
def draw(request):
    """The draw in plain torch, and by every instruction set that this machine has."""
    if request.param == "reference":
        yield sampling.reference
        return
    assert _cpu.set_kernel_level(request.param) == request.param
    yield sampling.draw
    _cpu.set_kernel_level(-1)


def arguments(rows, temperature=1.0, position=0, is_greedy=None):
    return {
        "temperature": torch.full((rows,), temperature),
        "streams": streams_of(torch.arange(rows)),
        "positions": torch.full((rows,), position),
        "is_greedy": None if is_greedy is None else torch.full((rows,), is_greedy),
    }


def test_mix_is_splitmix64():
    # First outputs of SplitMix64 seeded with 0 and 1 (state = seed + golden, then the finaliser).
    golden = 0x9E3779B97F4A7C15
    states = [golden - 2**64, (golden + 1) - 2**64]
    assert [x % 2**64 for x in mix(torch.tensor(states)).tolist()] == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]


def test_uniform_is_flat_and_does_not_repeat():
    u = uniform(streams_of(torch.arange(200_000) % 500), torch.arange(200_000) // 500)
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    assert len(u.unique()) == 200_000
    # 100 bins of 2000 expected, standard deviation 45.
    assert (torch.histc(u, bins=100) - 2000).abs().max() < 6 * 45


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_are_the_probabilities(draw, temperature):
    # At temperature 1/2 probabilities are squared and normalised.
    want = PROBS ** (1 / temperature) / (PROBS ** (1 / temperature)).sum()
    n = 40_000
    ids, logprobs = draw(PROBS.log().expand(n, -1).contiguous(), **arguments(n, temperature))
    assert (torch.bincount(ids, minlength=5) / n - want).abs().max() < 5 * math.sqrt(0.25 / n)
    torch.testing.assert_close(logprobs, want.log()[ids])


def test_the_numbers_are_those_of_uniform(draw):
    # 1000 equal tokens cut [0, 1) into a thousandth each.
    options = arguments(500, position=7)
    ids, _ = draw(torch.zeros(500, 1000), **options)
    u = uniform(options["streams"], options["positions"])
    is_clear = ((u * 1000) % 1 - 0.5).abs() < 0.499
    assert is_clear.sum() > 450
    assert ids[is_clear].equal((u * 1000).long()[is_clear])


def test_greedy_takes_the_most_likely(draw):
    logits = torch.randn(20, 77, generator=torch.Generator().manual_seed(0))
    is_greedy = torch.arange(20) % 2 == 0
    options = arguments(20) | {"is_greedy": is_greedy}
    ids, logprobs = draw(logits, **options)
    assert ids[is_greedy].equal(logits.argmax(-1)[is_greedy])
    assert ids[~is_greedy].equal(draw(logits, **arguments(20))[0][~is_greedy])
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0])


def test_greedy_tells_logits_apart_that_scaling_makes_the_same(draw):
    one = torch.tensor(1.0)
    logits = torch.stack([one, torch.nextafter(one, 2 * one), one, torch.nextafter(one, -one)]).repeat(1, 20)
    ids, _ = draw(logits, **arguments(1, is_greedy=True))
    assert logits[0, ids[0]] == logits.max()


@pytest.mark.process
@given(st.integers(0, 2**31), st.integers(1, 200), st.integers(0, 5))
def test_kernel_and_reference_draw_the_same_possible_tokens(seed, vocab_size, position):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, vocab_size, generator=generator) * 20
    logits[:, torch.randint(vocab_size, (vocab_size // 2,), generator=generator)] = float("-inf")
    options = arguments(8, 0.7, position)
    want = sampling.reference(logits, **options)
    for level in LEVELS:
        _cpu.set_kernel_level(level)
        ids, logprobs = sampling.draw(logits, **options)
        assert logits.gather(-1, ids[:, None]).isfinite().all()
        torch.testing.assert_close(logprobs, (logits / 0.7).log_softmax(-1).gather(-1, ids[:, None])[:, 0])
        assert (ids == want[0]).float().mean() >= 7 / 8  # a number may fall between the two roundings of a boundary


def test_rows_of_a_wider_tensor_are_read_where_they_lie(draw):
    wide = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    ids, logprobs = draw(wide[:, :40], **arguments(6))
    assert ids.equal(draw(wide[:, :40].contiguous(), **arguments(6))[0])
    torch.testing.assert_close(logprobs, wide[:, :40].log_softmax(-1).gather(-1, ids[:, None])[:, 0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_greedy", [None, True])
def test_non_finite_rows_show_in_their_own_logprob_only(draw, bad, is_greedy):
    logits = PROBS.log().repeat(3, 1)
    logits[1, 2] = bad
    ids, logprobs = draw(logits, **arguments(3, is_greedy=is_greedy))
    alone, _ = draw(PROBS.log().repeat(3, 1), **arguments(3, is_greedy=is_greedy))
    assert not logprobs[1].isfinite()
    assert 0 <= ids[1] < 5
    assert logprobs[[0, 2]].isfinite().all()
    assert ids[[0, 2]].equal(alone[[0, 2]])


def test_a_row_without_a_possible_token_is_told_by_its_logprob(draw):
    ids, logprobs = draw(torch.full((50, 5), float("-inf")), **arguments(50))
    assert ((ids >= 0) & (ids < 5)).all()
    assert not logprobs.isfinite().any()


def test_what_does_not_fit_is_refused():
    options = arguments(3)
    with pytest.raises(ArgumentError, match="at least one token"):
        sampling.draw(torch.zeros(3, 0), **options)
    with pytest.raises(ArgumentError, match="streams"):
        sampling.draw(torch.zeros(4, 5), **options | {"temperature": torch.ones(4)})
    with pytest.raises(ArgumentError, match="temperature"):
        sampling.draw(torch.zeros(3, 5), **options | {"temperature": torch.ones(3).double()})
