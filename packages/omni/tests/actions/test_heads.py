import math

import pytest
import torch

from rl_omni import SdeKind, noise_schedule
from rl_omni.actions import BinsHead, FlowHead
from rl_omni.actions.heads import create_head
from rl_omni.errors import PipelineError


def generators(count, seed=0):
    return [torch.Generator().manual_seed(seed + index) for index in range(count)]


def test_bins_of_equal_logits_have_the_log_prob_of_chance():
    head = BinsHead(4, chunk_size=3, action_size=2, num_bins=5)
    torch.nn.init.zeros_(head.logits.weight)
    torch.nn.init.zeros_(head.logits.bias)
    samples, logprobs = head.sample(torch.randn(7, 4), generators(7))
    assert samples.shape == (7, 3, 2)
    assert logprobs.tolist() == pytest.approx([-6 * math.log(5)] * 7)
    assert head.actions(torch.tensor([0, 2, 4])).tolist() == pytest.approx([-0.8, 0, 0.8])  # centres


def test_a_flow_has_the_log_prob_of_a_float64_oracle():
    """Flow-GRPO, equation 9, step by step with torch's Gaussian."""
    torch.manual_seed(0)
    head = FlowHead(4, chunk_size=2, action_size=3, num_steps=4, noise=0.5).double()
    hidden = torch.randn(5, 4, dtype=torch.float64)
    samples, logprobs = head.sample(hidden, generators(5))
    assert samples.shape == (5, 5, 2, 3)
    times = torch.linspace(1, 0, 5, dtype=torch.float64)
    stds = noise_schedule(times, 0.5, SdeKind.FLOW_GRPO)
    expected = torch.zeros(5, dtype=torch.float64)
    for step in range(4):
        x, t, std, dt = samples[:, step], times[step], stds[step], times[step] - times[step + 1]
        features = torch.cat([hidden, x.flatten(1), torch.tensor([t, t**2], dtype=torch.float64).expand(5, 2)], -1)
        v = head.expert(features).view_as(x)
        mean = x - (v + std**2 / dt / (2 * t) * (x + (1 - t) * v)) * dt
        expected += torch.distributions.Normal(mean, std).log_prob(samples[:, step + 1]).sum((1, 2))
    assert torch.allclose(logprobs, expected, rtol=1e-9)
    assert torch.allclose(head.logprobs(hidden, samples), expected, rtol=1e-6)


@pytest.mark.parametrize("head", [BinsHead(4, 2, 3, num_bins=6), FlowHead(4, 2, 3, num_steps=3)])
def test_a_seed_decides_a_sample_whatever_its_batch(head):
    hidden = torch.randn(6, 4)
    together, logprobs = head.sample(hidden, generators(6))
    alone, logprob = head.sample(hidden[4:5], generators(1, seed=4))
    torch.testing.assert_close(together[4:5], alone)
    torch.testing.assert_close(logprobs[4:5], logprob)
    torch.testing.assert_close(head.logprobs(hidden, together), logprobs)
    assert head.check(together) is None
    assert head.actions(together).shape == (6, 2, 3)
    assert head.actions(together).abs().max() <= 1


@pytest.mark.parametrize("head", [BinsHead(4, 1, 2, num_bins=16), FlowHead(4, 1, 2, num_steps=4, noise=0.2)])
def test_imitation_leads_to_the_demonstrated_action(head):
    torch.manual_seed(0)
    hidden, shown = torch.ones(64, 4), torch.tensor([0.5, -0.25]).expand(64, 1, 2)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        head.imitation_loss(hidden, shown).backward()
        optimizer.step()
    found = head.actions(head.sample(hidden, generators(64))[0])
    assert (found - shown).abs().mean() < 0.15  # half a bin is 0.06; the flow's last step adds noise


def test_samples_of_another_head_are_named():
    bins, flow = BinsHead(4, 1, 2, num_bins=8), FlowHead(4, 1, 2, num_steps=3)
    assert "int64 (S, 1, 2)" in str(bins.check(torch.zeros(3, 4, 1, 2)))
    assert "0 to 7" in str(bins.check(torch.full((3, 1, 2), 8)))
    assert "finite float32 (S, 4, 1, 2)" in str(flow.check(torch.full((3, 4, 1, 2), math.nan)))


@pytest.mark.parametrize(
    ("settings", "message"), [({"kind": "beta"}, "none of bins, flow"), ({"kind": "bins"}, "made")]
)
def test_a_wrong_head_is_refused(settings, message):
    with pytest.raises(PipelineError, match=message):
        create_head(settings)
