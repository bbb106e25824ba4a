"""A policy loss of one's own: `rl-train quickstart algorithm.loss=examples/own_loss.py:importance_weighted`."""

import rl_trainer


@rl_trainer.reads("num_turns")  # any column of the rollouts, of the reference and critic, or of a stage
def importance_weighted(loss):
    """REINFORCE weighted by the ratio to the sampler, less where a trajectory took more turns."""
    ratio = (loss.logprobs - loss.rollout_logprobs).exp().clamp(max=2.0)
    turns = loss.columns["num_turns"].repeat_interleave(loss.cu_seqlens.diff())
    return -ratio * loss.advantages / turns  # (T,)
