"""SDE sampler of flow-matching models: noise schedules, and the Gaussian of one denoising step.

The reverse-time SDE has the marginals of the flow's ODE at every noise level (Flow-GRPO, 2505.05470, section 4.2).
Every step is a Gaussian, so that a trajectory of pictures has exact log-probs, as a trajectory of tokens has.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class SdeKind(StrEnum):
    """Noise of the SDE by time t."""

    FLOW_GRPO = "flow_grpo"
    """noise * sqrt(t / (1 - t)) (2505.05470); at t = 1 that of the second time."""
    DANCE_GRPO = "dance_grpo"
    """Constant `noise` (2505.07818)."""


def noise_schedule(times: Tensor, noise: float, kind: SdeKind) -> Tensor:
    """Standard deviation of the noise of each step, (S,) for S + 1 falling times.

    Args:
        times: (S + 1,) times from 1 to 0.
        noise: Scale of the noise; 0 is the deterministic ODE.
        kind: Shape of the schedule.
    """
    start, end = times[:-1], times[1:]
    # t = 1 divides by 0. A schedule of one step has no second time inside (0, 1): half way takes its role.
    second = float(times[1]) if 0 < times[1] < 1 else 0.5
    inner = torch.where(start == 1, torch.full_like(start, second), start)
    scale = torch.sqrt(inner / (1 - inner)) if kind == SdeKind.FLOW_GRPO else torch.ones_like(start)
    return noise * scale * torch.sqrt(start - end)


def mean_of(latents: Tensor, velocity: Tensor, times: Tensor, next_times: Tensor, stds: Tensor) -> Tensor:
    """Mean of the latents after one step, (B, C, H, W).

    Args:
        latents: (B, C, H, W) latents x_t.
        velocity: (B, C, H, W) prediction of noise - data.
        times: (B,) times t, above 0.
        next_times: (B,) times after the step.
        stds: (B,) standard deviation of the noise that the step adds.
    """
    t, after, std = (each.view(-1, 1, 1, 1) for each in (times, next_times, stds))
    predicted_noise = latents + (1 - t) * velocity
    return latents + velocity * (after - t) - std.square() / (2 * t) * predicted_noise


def logprobs_of(sample: Tensor, mean: Tensor, stds: Tensor) -> Tensor:
    """Natural log-density of each sample under its Gaussian, (B,): the sum over C, H and W; 0 where its std is 0.

    Papers that average over latents instead take a different ratio; divide by C * H * W to compare.
    """
    is_random = stds > 0
    safe = torch.where(is_random, stds, torch.ones_like(stds)).view(-1, 1, 1, 1)
    terms = -0.5 * ((sample - mean) / safe).square() - safe.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(is_random, terms.sum((1, 2, 3)), torch.zeros_like(stds))
