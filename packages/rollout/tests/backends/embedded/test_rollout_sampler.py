"""What a token is drawn from where a request cuts it off, and seeds; the draw itself is tested in rl-csrc."""

import math

import pytest
import torch

from rl_csrc import sampling
from rl_rollout.backends.embedded.model.sampler import cut, stream_seed, truncate

PROBS = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])


def draw(logits, *, temperature=1.0, top_k=0, top_p=1.0, is_greedy=None):
    """As the engine does."""
    rows = logits.shape[0]
    temperature = torch.full((rows,), temperature)
    logits, left = cut(logits, temperature, torch.full((rows,), top_k), torch.full((rows,), top_p), is_greedy)
    streams = sampling.streams_of(torch.arange(rows))
    where = torch.zeros(rows, dtype=torch.int64)
    return sampling.draw(logits, temperature=left, streams=streams, positions=where, is_greedy=is_greedy)


def test_greedy_takes_the_most_likely_whatever_is_cut_off():
    ids, logprobs = draw(PROBS.log().expand(3, -1), top_k=1, top_p=0.1, is_greedy=torch.ones(3, dtype=torch.bool))
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


def test_the_nucleus_is_of_the_scaled_distribution():
    # Squared, the first has 0.5^2 / 0.3433 = 0.728 of the mass, and the first two 0.91.
    ids, logprobs = draw(PROBS.log().expand(2000, -1), temperature=0.5, top_p=0.9)
    assert set(ids.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs, torch.tensor([0.8, 0.2]).log()[ids])


def test_truncation_does_not_touch_rows_that_did_not_ask():
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)) * 30
    top_k, top_p = torch.tensor([0, 5, 0, 0]), torch.tensor([1.0, 1.0, 0.5, 1.0])
    cut = truncate(logits, top_k, top_p)
    assert cut[0].equal(logits[0])
    assert cut[3].equal(logits[3])
    assert cut[1].isfinite().sum() == 5
    assert not cut[2].isfinite().all()


def test_stream_seeds_fit_and_differ():
    seeds = [stream_seed(seed, index) for seed in (0, 1, 2**40, -5) for index in range(1000)]
    assert len(set(seeds)) == 4000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
