"""A stage of one's own, and an advantage that reads what it wrote.

`rl-train quickstart algorithm.stages='[own_stage.py:variety]' algorithm.advantage=own_stage.py:varied`
"""

import torch

import rl_trainer


@rl_trainer.reads("completion_token_ids")
def variety(rows):
    """A column: the share of different tokens in each completion."""
    completions = rows["completion_token_ids"].unbind()
    return {"variety": torch.tensor([len(ids.unique()) / len(ids) for ids in completions])}


@rl_trainer.reads("variety")
def varied(data):
    """Reward and variety, less their mean over the batch."""
    rewards = data.sum_rewards() + 0.1 * data.columns["variety"]
    return data.broadcast(rewards - rewards.mean())
