from dataclasses import replace

import pytest

from rl_agent import AgentLoopOutput, OutputError, validate_output

# user prompt of 2 tokens; the model wrote 10 and 11, a tool wrote 12, the model wrote 13
VALID = AgentLoopOutput(
    prompt_token_ids=(5, 6),
    completion_token_ids=(10, 11, 12, 13),
    loss_mask=(1, 1, 0, 1),
    rollout_logprobs=(-0.5, 0.0, 0.0, -3.0),
    weight_versions=(0, 1, -1, 1),
    finish_reason="stop",
    num_turns=2,
)


def test_a_valid_trajectory_passes():
    validate_output(VALID)
    validate_output(replace(VALID, reward=-1.5, turn_rewards=(0.0, 1.0)))


def test_steps_take_the_place_of_tokens():
    """One entry per denoising step, whose log-prob is that of a density."""
    steps = replace(VALID, completion_token_ids=(), rollout_logprobs=(50.0, 0.0, 0.0, -3.0), columns={"latents": None})
    validate_output(steps)
    with pytest.raises(OutputError, match="weight_versions has 3 entries for 4 entries of loss_mask"):
        validate_output(replace(steps, weight_versions=(0, 1, -1)))
    with pytest.raises(OutputError, match=r"rollout_logprobs\[0\] is inf"):
        validate_output(replace(steps, rollout_logprobs=(float("inf"), 0.0, 0.0, -3.0)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt_token_ids": ()}, "prompt_token_ids is empty"),
        ({"completion_token_ids": ()}, "completion_token_ids is empty"),
        ({"prompt_token_ids": (5, -1)}, r"prompt_token_ids\[1\] is -1"),
        ({"loss_mask": (1, 1, 0)}, "loss_mask has 3 entries for 4 completion tokens"),
        ({"rollout_logprobs": (-0.5,) * 5}, "rollout_logprobs has 5 entries for 4"),
        ({"weight_versions": ()}, "weight_versions has 0 entries for 4"),
        ({"loss_mask": (1, 1, 2, 1)}, r"loss_mask\[2\] is 2; a flag is 1 where"),
        ({"loss_mask": (0,) * 4, "rollout_logprobs": (0.0,) * 4, "weight_versions": (-1,) * 4}, "loss_mask has no 1"),
        ({"rollout_logprobs": (float("nan"), 0.0, 0.0, -3.0)}, r"rollout_logprobs\[0\] is nan"),
        ({"rollout_logprobs": (-0.5, float("-inf"), 0.0, -3.0)}, r"rollout_logprobs\[1\] is -inf"),
        ({"rollout_logprobs": (-0.5, 0.25, 0.0, -3.0)}, r"rollout_logprobs\[1\] is 0.25"),
        ({"rollout_logprobs": (-0.5, 0.0, -0.1, -3.0)}, r"rollout_logprobs\[2\] is -0.1; the model did not write"),
        ({"weight_versions": (0, -1, -1, 1)}, r"weight_versions\[1\] is -1; the model wrote"),
        ({"weight_versions": (0, 1, 1, 1)}, r"weight_versions\[2\] is 1; the model did not write"),
        ({"finish_reason": "eos"}, "finish_reason is 'eos'; allowed are stop, length, abort"),
        ({"num_turns": 0}, "num_turns is 0"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"turn_rewards": (1.0,)}, "turn_rewards has 1 entries for 2 turns"),
        ({"turn_rewards": (1.0, float("inf"))}, r"turn_rewards\[1\] is inf"),
    ],
)
def test_what_cannot_be_trained_on_is_named(change, sentence):
    with pytest.raises(OutputError, match=sentence):
        validate_output(replace(VALID, **change))
