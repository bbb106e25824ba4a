"""Check that an installed rl-csrc computes with the torch beside it: kernels and gradients against plain torch."""

from __future__ import annotations

import sys

import torch

import rl_csrc

_TOLERANCE = 1e-5


def main() -> None:
    """Print a line; raise AssertionError where a kernel and plain torch differ."""
    torch.manual_seed(0)
    logits, labels = torch.randn(64, 300, requires_grad=True), torch.randint(300, (64,))
    rewards, offsets, mask = torch.randn(64), torch.tensor([0, 40, 64]), torch.ones(64, dtype=torch.int64)
    advantages, groups = rl_csrc.group_norm(rewards, torch.arange(64) // 4), rewards.view(16, 4)
    spread = groups.std(1, keepdim=True) + 1e-6
    wanted = ((groups - groups.mean(1, keepdim=True)) / spread).flatten()
    compare("group_norm", advantages, wanted)
    plain = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    ours = rl_csrc.logprobs(logits, labels).logprobs
    compare("logprobs", ours, plain)
    old = plain.detach() + 0.3 * torch.randn(64)
    ratio = (plain - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    found = rl_csrc.policy_loss(ours, old, advantages, mask, offsets).loss
    compare("policy_loss", found, loss)
    compare("gradient", torch.autograd.grad(found, logits)[0], torch.autograd.grad(loss, logits)[0])
    version = sys.version.partition(" ")[0]
    sys.stdout.write(f"rl-csrc works with torch {torch.__version__} on Python {version}\n")


def compare(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raise AssertionError where they differ by more than rounding."""
    difference = float((found - wanted).detach().abs().max())
    assert difference < _TOLERANCE, f"{name} differs by {difference}"


if __name__ == "__main__":
    main()
