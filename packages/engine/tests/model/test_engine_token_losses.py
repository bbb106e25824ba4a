"""Losses that Tinker's clients name, against their definitions in float64."""

import pytest
import torch

from rl_engine import BatchCounts, ConfigError, ModelOutput, create_loss
from rl_engine.testing import ragged

LENGTHS = [3, 1, 5]


def importance_sampling(logprobs, old, advantages):
    return -((logprobs - old).exp() * advantages).sum()


def ppo(logprobs, old, advantages, low=0.8, high=1.2):
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


def cispo(logprobs, old, advantages, low=0.0, high=4.0):
    return -((logprobs - old).exp().clamp(low, high).detach() * logprobs * advantages).sum()


def dro(logprobs, old, advantages, beta=0.05):
    return -(logprobs * advantages - 0.5 * beta * (logprobs - old) ** 2).sum()


def draw(seed):
    """Log-probs, those of the sampler and advantages: ratios from 0.1 to 10."""
    generator = torch.Generator().manual_seed(seed)
    old, change, advantages = torch.randn(3, sum(LENGTHS), generator=generator, dtype=torch.float64)
    return (old - 2 + change).requires_grad_(), old - 2, advantages


def output_of(logprobs, **more):
    offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    counts = BatchCounts(tokens=99.0, sequences=9.0)  # which sums do not look at
    return ModelOutput(token_logprobs=logprobs, cu_seqlens=offsets, counts=counts, **more)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("definition", "settings", "named"),
    [
        (importance_sampling, {}, {}),
        (ppo, {}, {}),
        (ppo, {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}, {"low": 0.5, "high": 3.0}),
        (cispo, {}, {}),
        (cispo, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, {"low": 0.8, "high": 1.2}),
        (dro, {}, {}),
        (dro, {"beta": 0.5}, {"beta": 0.5}),
    ],
)
def test_a_policy_loss_and_its_gradient_are_those_defined(definition, settings, named, seed):
    logprobs, old, advantages = draw(seed)
    wanted = definition(logprobs, old, advantages, **named)
    (gradient,) = torch.autograd.grad(wanted, logprobs)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        given = logprobs.detach().to(dtype).requires_grad_()
        columns = {
            "logprobs": ragged(old.split(LENGTHS), dtype),
            "advantages": ragged(advantages.split(LENGTHS), dtype),
        }
        loss, _ = create_loss(definition.__name__, settings)(output_of(given), columns)
        (found,) = torch.autograd.grad(loss, given)
        assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=tolerance, abs=tolerance)
        torch.testing.assert_close(found.double(), gradient, rtol=tolerance, atol=tolerance)


def test_weights_of_tokens_scale_a_policy_loss():
    logprobs, old, advantages = draw(0)
    weights = torch.arange(sum(LENGTHS), dtype=torch.float64) / 4
    columns = {name: ragged(each.split(LENGTHS), torch.float64) for name, each in
               (("logprobs", old), ("advantages", advantages), ("weights", weights))}  # fmt: skip
    loss, _ = create_loss("importance_sampling")(output_of(logprobs), columns)
    assert float(loss.detach()) == pytest.approx(
        float(importance_sampling(logprobs, old, advantages * weights).detach())
    )


@pytest.mark.parametrize("width", [1, 3])
def test_cross_entropy_weighs_one_or_several_targets(width):
    logprobs, weights, _ = draw(1)
    asked = logprobs if width == 1 else logprobs[:, None] - torch.arange(width)
    weights = weights if width == 1 else weights[:, None] * torch.arange(width)
    more = {} if width == 1 else {"token_candidate_logprobs": asked}
    columns = {"weights": ragged(weights.split(LENGTHS), torch.float64)}
    loss, _ = create_loss("cross_entropy")(output_of(logprobs, **more), columns)
    assert float(loss.detach()) == pytest.approx(-float((asked * weights).sum().detach()))


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        (
            "reinforce",
            {},
            "There is no loss 'reinforce'; there are: cross_entropy, importance_sampling, ppo, cispo, dro",
        ),
        ("dro", {"clip": 1.0}, "The loss dro has no setting 'clip'; it has: beta"),
        ("cross_entropy", {"beta": 1.0}, "it has: none"),
        ("dro", {"beta": -1.0}, "beta of the loss dro is -1.0; it is a finite number, 0 or more"),
        ("ppo", {"clip_high_threshold": float("inf")}, "is inf"),
        ("ppo", {"clip_low_threshold": 1.1}, "clips ratios to 1.1 and 1.2; the lower is at most 1"),
    ],
)
def test_unknown_losses_and_settings_are_refused(name, settings, told):
    with pytest.raises(ConfigError, match=told):
        create_loss(name, settings)
