"""Action heads: chunks of actions with exact log-probs, as bins or by a flow."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rl_omni.errors import PipelineError
from rl_omni.sampler import SdeKind, logprobs_of, mean_of, noise_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class ActionHead(torch.nn.Module):
    """Distribution over chunks of H actions of D numbers, given a hidden state; numbers are from -1 to 1.

    A sample is what the engine needs to compute its log-prob again: bins, or every state of the flow.
    """

    kind: ClassVar[str]

    def __init__(self, hidden_size: int, chunk_size: int, action_size: int) -> None:
        super().__init__()
        self.hidden_size, self.chunk_size, self.action_size = hidden_size, chunk_size, action_size

    @abstractmethod
    def sample(self, hidden: Tensor, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """Sample a chunk for each of (B, N) hidden states; returns samples and their (B,) log-probs."""

    @abstractmethod
    def logprobs(self, hidden: Tensor, samples: Tensor) -> Tensor:
        """Log-probs of samples, (B,): the sum over a chunk's numbers, and over the steps of a flow."""

    @abstractmethod
    def actions(self, samples: Tensor) -> Tensor:
        """Actions of samples, (B, H, D) float32 from -1 to 1."""

    @abstractmethod
    def imitation_loss(self, hidden: Tensor, actions: Tensor) -> Tensor:
        """Mean loss by which the head learns (B, H, D) actions of demonstrations."""

    @abstractmethod
    def check(self, samples: Tensor) -> str | None:
        """Why samples of a batch, with the steps as first axis, cannot be this head's; None if they can."""


class BinsHead(ActionHead):
    """Head of bins: every number is one of `num_bins` classes, as in OpenVLA (2406.09246, section 3.3).

    The numbers of a chunk are independent given the hidden state (parallel decoding, 2502.19645), in one pass; OpenVLA
    decodes them one after another. A sample is (H, D) int64.
    """

    kind = "bins"

    def __init__(self, hidden_size: int, chunk_size: int, action_size: int, num_bins: int = 256) -> None:
        super().__init__(hidden_size, chunk_size, action_size)
        self.num_bins = num_bins
        self.logits = torch.nn.Linear(hidden_size, chunk_size * action_size * num_bins)

    def _logprobs(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).unflatten(-1, (self.chunk_size, self.action_size, self.num_bins)).log_softmax(-1)

    def sample(self, hidden: Tensor, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """Sample bins."""
        probs = self._logprobs(hidden).exp().flatten(1, 2).cpu()
        drawn = [torch.multinomial(p, 1, generator=g) for p, g in zip(probs, generators, strict=True)]
        samples = torch.stack(drawn).view(-1, self.chunk_size, self.action_size).to(hidden.device)
        return samples, self.logprobs(hidden, samples)

    def logprobs(self, hidden: Tensor, samples: Tensor) -> Tensor:
        """Log-probs of bins."""
        return self._logprobs(hidden).gather(-1, samples[..., None]).sum((1, 2, 3))

    def actions(self, samples: Tensor) -> Tensor:
        """Centres of bins."""
        return (2 * samples + 1) / self.num_bins - 1

    def imitation_loss(self, hidden: Tensor, actions: Tensor) -> Tensor:
        """Cross-entropy of the bins of actions."""
        bins = ((actions + 1) / 2 * self.num_bins).long().clamp(0, self.num_bins - 1)
        return -self.logprobs(hidden, bins).mean()

    def check(self, samples: Tensor) -> str | None:
        """Check shape and range."""
        if samples.dtype != torch.int64 or samples.shape[1:] != (self.chunk_size, self.action_size):
            return f"{samples.dtype} of shape {tuple(samples.shape)}; int64 (S, {self.chunk_size}, {self.action_size})"
        if len(samples) and not (samples.min() >= 0 and samples.max() < self.num_bins):
            return f"bins from {samples.min()} to {samples.max()}; 0 to {self.num_bins - 1}"
        return None


class FlowHead(ActionHead):
    """Flow-matching head for continuous chunks, as SmolVLA's action expert (2506.01844), a small MLP.

    Sampled by the SDE of `rl_omni.sampler`, so that every one of its `num_steps` steps is a Gaussian and a chunk has an
    exact log-prob (Flow-GRPO, 2505.05470). A sample is (K + 1, H, D) float32: the states from noise to the action.
    """

    kind = "flow"

    def __init__(
        self, hidden_size: int, chunk_size: int, action_size: int, num_steps: int = 4, noise: float = 0.5
    ) -> None:
        super().__init__(hidden_size, chunk_size, action_size)
        self.num_steps, self.noise = num_steps, noise
        width, size = 4 * hidden_size, chunk_size * action_size
        self.expert = torch.nn.Sequential(
            torch.nn.Linear(hidden_size + size + 2, width),
            torch.nn.SiLU(),
            torch.nn.Linear(width, width),
            torch.nn.SiLU(),
            torch.nn.Linear(width, size),
        )

    def _velocity(self, hidden: Tensor, states: Tensor, times: Tensor) -> Tensor:
        features = torch.cat([hidden, states.flatten(1), times[:, None], times[:, None].square()], -1)
        return self.expert(features).view_as(states)

    def _schedule(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        times = torch.linspace(1, 0, self.num_steps + 1, dtype=hidden.dtype, device=hidden.device)
        return times, noise_schedule(times, self.noise, SdeKind.FLOW_GRPO)

    def sample(self, hidden: Tensor, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """Sample the states of the SDE."""
        times, stds = self._schedule(hidden)
        count, shape = len(hidden), (self.num_steps + 1, 1, self.chunk_size, self.action_size)
        noise = torch.stack([torch.randn(shape, generator=each) for each in generators]).to(hidden)
        states, logprobs = [noise[:, 0]], hidden.new_zeros(count)
        for step, (start, end, std) in enumerate(zip(times[:-1], times[1:], stds, strict=True), 1):
            t, after, spread = (each.expand(count) for each in (start, end, std))
            mean = mean_of(states[-1], self._velocity(hidden, states[-1], t), t, after, spread)
            states.append(mean + std * noise[:, step])
            logprobs = logprobs + logprobs_of(states[-1], mean, spread)
        return torch.stack(states, 1)[:, :, 0], logprobs

    def logprobs(self, hidden: Tensor, samples: Tensor) -> Tensor:
        """Log-probs of the states, all steps of all chunks in one pass."""
        times, stds = self._schedule(hidden)
        count = len(hidden)
        hidden = hidden.repeat_interleave(self.num_steps, 0)
        before, after = (each.flatten(0, 1)[:, None] for each in (samples[:, :-1], samples[:, 1:]))
        t, end, spread = (each.repeat(count) for each in (times[:-1], times[1:], stds))
        mean = mean_of(before, self._velocity(hidden, before, t), t, end, spread)
        return logprobs_of(after, mean, spread).view(count, self.num_steps).sum(1)

    def actions(self, samples: Tensor) -> Tensor:
        """Last states, clamped."""
        return samples[:, -1].clamp(-1, 1)

    def imitation_loss(self, hidden: Tensor, actions: Tensor) -> Tensor:
        """Flow matching: squared error of the velocity at eight random times, since the expert costs little."""
        hidden, actions = hidden.repeat_interleave(8, 0), actions.repeat_interleave(8, 0)
        noise, times = torch.randn_like(actions), torch.rand(len(actions), device=actions.device)
        mixed = actions + times.view(-1, 1, 1) * (noise - actions)
        return (self._velocity(hidden, mixed, times) - (noise - actions)).square().mean()

    def check(self, samples: Tensor) -> str | None:
        """Check shape and numbers."""
        shape = (self.num_steps + 1, self.chunk_size, self.action_size)
        if samples.dtype != torch.float32 or samples.shape[1:] != shape or not samples.isfinite().all():
            return f"{samples.dtype} of shape {tuple(samples.shape)}; finite float32 (S, {', '.join(map(str, shape))})"
        return None


HEADS: dict[str, type[ActionHead]] = {head.kind: head for head in (BinsHead, FlowHead)}


def create_head(settings: dict[str, Any]) -> ActionHead:
    """Create a head from `kind` and the arguments of its class.

    Raises:
        PipelineError: there is no such kind, or it has other arguments.
    """
    given = dict(settings)
    kind = given.pop("kind", None)
    if kind not in HEADS:
        raise PipelineError(f"action head {kind!r} is none of {', '.join(HEADS)}")
    try:
        return HEADS[kind](**given)
    except (TypeError, RuntimeError) as error:
        raise PipelineError(f"action head {kind} cannot be made of {given}: {error}") from error
