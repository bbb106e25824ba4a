"""The draw itself, against hand-computed distributions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_rollout.backends.embedded.sampler import mix, sample, stream_seed, streams_of, truncate, uniform

PROBS = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])


def draw(logits, *, temperature=1.0, seeds=None, positions=None, top_k=0, top_p=1.0):
    rows = logits.shape[0]
    ids, logprobs, distribution = sample(
        logits,
        temperature=torch.full((rows,), temperature or 1.0),
        streams=streams_of(torch.arange(rows) if seeds is None else seeds),
        positions=torch.zeros(rows, dtype=torch.int64) if positions is None else positions,
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p),
        is_greedy=None if temperature else torch.ones(rows, dtype=torch.bool),
    )
    assert distribution.gather(-1, ids[:, None])[:, 0].equal(logprobs) or logprobs.isnan().any()
    return ids, logprobs


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


def test_frequencies_are_the_probabilities():
    n = 40_000
    ids, logprobs = draw(PROBS.log().expand(n, -1))
    frequencies = torch.bincount(ids, minlength=5) / n
    assert (frequencies - PROBS).abs().max() < 5 * math.sqrt(0.25 / n)
    torch.testing.assert_close(logprobs, PROBS.log()[ids])


def test_temperature_is_in_the_draw_and_in_the_logprob():
    # At temperature 1/2 probabilities are squared and normalised.
    squared = PROBS**2 / (PROBS**2).sum()
    n = 40_000
    ids, logprobs = draw(PROBS.log().expand(n, -1), temperature=0.5)
    assert (torch.bincount(ids, minlength=5) / n - squared).abs().max() < 5 * math.sqrt(0.25 / n)
    torch.testing.assert_close(logprobs, squared.log()[ids])


def test_greedy_takes_the_most_likely_at_temperature_one():
    ids, logprobs = draw(PROBS.log().expand(3, -1), temperature=0.0, top_k=1, top_p=0.1)
    assert ids.tolist() == [0, 0, 0]
    torch.testing.assert_close(logprobs, torch.full((3,), math.log(0.5)))


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, 5),
        (2, 1.0, 2),
        (9, 1.0, 5),
        (0, 0.5, 1),
        (0, 0.51, 2),
        (0, 0.75, 2),
        (0, 0.9, 3),
        (0, 1e-9, 1),
        (3, 0.9, 3),
        (3, 0.8, 2),
    ],
)
def test_truncation_keeps_and_renormalises(top_k, top_p, kept):
    # (3, 0.8): of the first three, 0.5 / 0.9 = 0.556 and 0.25 / 0.9 = 0.278 reach 0.8 together.
    ids, logprobs = draw(PROBS.log().expand(2000, -1), top_k=top_k, top_p=top_p)
    assert set(ids.tolist()) == set(range(kept))
    torch.testing.assert_close(logprobs, (PROBS / PROBS[:kept].sum()).log()[ids])


def test_truncation_does_not_touch_rows_that_did_not_ask():
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)) * 30
    top_k, top_p = torch.tensor([0, 5, 0, 0]), torch.tensor([1.0, 1.0, 0.5, 1.0])
    cut = truncate(logits, top_k, top_p)
    assert cut[0].equal(logits[0])
    assert cut[3].equal(logits[3])
    assert cut[1].isfinite().sum() == 5
    assert not cut[2].isfinite().all()


@given(st.integers(0, 2**31), st.integers(2, 200), st.integers(0, 5))
def test_the_drawn_token_is_never_an_impossible_one(seed, vocab_size, position):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, vocab_size, generator=generator) * 20
    logits[:, torch.randint(vocab_size, (vocab_size // 2,), generator=generator)] = float("-inf")
    ids, logprobs = draw(logits, positions=torch.full((8,), position))
    if logits.isfinite().any():
        assert logprobs.isfinite().all()
        assert logits.gather(-1, ids[:, None]).isfinite().all()


def test_rows_with_nan_are_told_by_their_logprob_and_spoil_no_other():
    logits = PROBS.log().repeat(3, 1)
    logits[1, 2] = float("nan")
    ids, logprobs = draw(logits)
    alone, _ = draw(PROBS.log().repeat(3, 1))
    assert not logprobs[1].isfinite()
    assert logprobs[[0, 2]].isfinite().all()
    assert ids[[0, 2]].equal(alone[[0, 2]])


def test_stream_seeds_fit_and_differ():
    seeds = [stream_seed(seed, index) for seed in (0, 1, 2**40, -5) for index in range(1000)]
    assert len(set(seeds)) == 4000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
