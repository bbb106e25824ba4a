import pytest
import torch

from rl_omni import SdeKind, logprobs_of, mean_of, noise_schedule

TIMES = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0], dtype=torch.float64)


def oracle(x, v, t, after, std, sample):
    """Flow-GRPO, equation 9, as it is printed: drift with sigma_t and dt, in float64, and torch's Gaussian."""
    dt = t - after
    sigma = std / dt**0.5
    drift = v + sigma**2 / (2 * t) * (x + (1 - t) * v)
    mean = x - drift * dt
    return mean, torch.distributions.Normal(mean, std).log_prob(sample).sum()


@pytest.mark.promise("Log-probs of denoising steps equal a float64 oracle")
def test_log_probs_equal_the_float64_oracle():
    torch.manual_seed(0)
    x, v, sample = torch.randn(3, 4, 3, 6, 6, dtype=torch.float64)
    stds = noise_schedule(TIMES, 0.7, SdeKind.FLOW_GRPO)
    mean = mean_of(x, v, TIMES[:-1], TIMES[1:], stds)
    found = logprobs_of(sample, mean, stds)
    for i in range(4):
        expected, logprob = oracle(x[i], v[i], TIMES[i], TIMES[i + 1], stds[i], sample[i])
        assert torch.allclose(mean[i], expected, rtol=0, atol=1e-12)
        assert abs(found[i] - logprob) < 1e-9 * abs(logprob)
    single = mean_of(x.float(), v.float(), TIMES[:-1].float(), TIMES[1:].float(), stds.float())
    assert torch.allclose(logprobs_of(sample.float(), single, stds.float()).double(), found, rtol=1e-5)


def test_noise_schedules_have_their_papers_values():
    flow = noise_schedule(TIMES, 0.7, SdeKind.FLOW_GRPO)
    # 0.7 sqrt(t / (1 - t)) sqrt(0.25), t = 0.75 taken for t = 1
    assert flow.tolist() == pytest.approx([0.35 * 3**0.5, 0.35 * 3**0.5, 0.35, 0.35 / 3**0.5])
    assert noise_schedule(TIMES, 0.3, SdeKind.DANCE_GRPO).tolist() == pytest.approx([0.15] * 4)
    assert noise_schedule(TIMES[[0, -1]], 1.0, SdeKind.FLOW_GRPO).tolist() == [1.0]


def test_a_step_without_noise_is_an_euler_step():
    x, v = torch.randn(2, 4, 3, 2, 2, dtype=torch.float64)
    stds = noise_schedule(TIMES, 0.0, SdeKind.FLOW_GRPO)
    mean = mean_of(x, v, TIMES[:-1], TIMES[1:], stds)
    assert torch.equal(mean, x + v * -0.25)
    assert logprobs_of(mean, mean, stds).tolist() == [0.0] * 4


def test_the_sde_has_the_marginals_of_the_flow():
    """Data N(2, 0.25), whose velocity is known: the samples have its mean and variance, as those of the ODE."""
    torch.manual_seed(0)
    times = torch.linspace(1, 0, 201, dtype=torch.float64)
    stds = noise_schedule(times, 0.7, SdeKind.FLOW_GRPO)
    x = torch.randn(1, 1, 100, 200, dtype=torch.float64)
    for t, after, std in zip(times[:-1], times[1:], stds, strict=True):
        mixed = x - (1 - t) * 2
        variance = (1 - t) ** 2 * 0.25 + t**2
        velocity = mixed * (t - (1 - t) * 0.25) / variance - 2  # E[noise - data | x_t]
        mean = mean_of(x, velocity, t[None], after[None], std[None])
        x = mean + std * torch.randn_like(x)
    assert x.mean().item() == pytest.approx(2, abs=0.03)
    assert x.std().item() == pytest.approx(0.5, abs=0.03)
