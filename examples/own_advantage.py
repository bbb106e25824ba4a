"""An advantage of one's own: `rl-train quickstart algorithm.advantage=examples/own_advantage.py:above_median`."""

import torch


def above_median(data):
    """Reward less the median of its group, at each token that the model wrote."""
    rewards = data.sum_rewards()  # (B,)
    medians = torch.stack([rewards[data.group_ids == group].median() for group in data.group_ids])
    return data.broadcast(rewards - medians)  # (T,)
