"""Validation of trajectories: pure checks whether one can be trained on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rl_agent.errors import OutputError
from rl_agent.types import LARGEST_REWARD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_agent.types import AgentLoopOutput

FINISH_REASONS = ("stop", "length", "abort", "timeout")
_MAX_LOGPROB = 1e-3
"""Highest log-prob that is accepted: rounding of a log-softmax over a large vocabulary may exceed 0 by so much."""


def validate_output(output: AgentLoopOutput) -> None:
    """Check that a trajectory can be trained on.

    One entry per completion token in every column, or per step where `columns` take the place of tokens; flags 0 or 1
    with at least one 1; where the model wrote, a finite log-prob, not positive for a token, and a weight version from
    0; elsewhere exactly 0.0 and -1; rewards finite, one per turn where there are per-turn ones; routed experts, where
    there are such, of every token but the last and all alike.

    Raises:
        OutputError: names the field, the position and the value.
    """
    _check_ids("prompt_token_ids", output.prompt_token_ids)
    if output.completion_token_ids or not output.columns:
        _check_ids("completion_token_ids", output.completion_token_ids)
    num_tokens, what = len(output.completion_token_ids), "completion tokens"
    if not num_tokens:
        num_tokens, what = len(output.loss_mask), "entries of loss_mask"
    for name in ("loss_mask", "rollout_logprobs", "weight_versions"):
        if len(getattr(output, name)) != num_tokens:
            raise OutputError(f"{name} has {len(getattr(output, name))} entries for {num_tokens} {what}")
    _check_mask(output)
    _check_experts(output)
    _check_summary(output)


def _check_ids(name: str, ids: Sequence[int]) -> None:
    if not ids:
        raise OutputError(f"{name} is empty; a trajectory needs at least one token there")
    if min(ids) < 0:
        raise _error(name, next(i for i, token in enumerate(ids) if token < 0), ids, "a token id is not negative")


def _check_mask(output: AgentLoopOutput) -> None:
    mask, logprobs, versions = output.loss_mask, output.rollout_logprobs, output.weight_versions
    highest = _MAX_LOGPROB if output.completion_token_ids else math.inf
    for i, (flag, logprob, version) in enumerate(zip(mask, logprobs, versions, strict=True)):
        if flag == 1:
            if not (math.isfinite(logprob) and logprob <= highest):
                raise _error(
                    "rollout_logprobs", i, logprobs, "the model wrote this token, so it is finite and at most 0"
                )
            if version < 0:
                raise _error("weight_versions", i, versions, "the model wrote this token, so it is a version from 0 up")
        elif flag != 0:
            raise _error("loss_mask", i, mask, "a flag is 1 where the model wrote the token and 0 elsewhere")
        elif logprob != 0:
            raise _error("rollout_logprobs", i, logprobs, "the model did not write this token, so it is 0")
        elif version != -1:
            raise _error("weight_versions", i, versions, "the model did not write this token, so it is -1")
    if 1 not in mask:
        raise OutputError("loss_mask has no 1: the model wrote none of the completion, so there is nothing to train on")


def _check_experts(output: AgentLoopOutput) -> None:
    experts = output.routed_experts
    num_fed = len(output.prompt_token_ids) + len(output.completion_token_ids) - 1
    has_more = bool(output.images) and len(experts) > num_fed  # an image is one id, and has an entry for each token
    if len(experts) not in (0, num_fed) and not has_more:
        raise OutputError(f"routed_experts has {len(experts)} entries for {num_fed} tokens, the last one left out")
    shapes = {tuple(map(len, token)) for token in experts if token}
    if len(shapes) > 1 or any(len(set(shape)) > 1 for shape in shapes):
        raise OutputError(
            f"routed_experts has entries of {sorted(shapes)} experts by layer; all tokens have the same layers, and "
            "all layers as many experts"
        )


def _check_summary(output: AgentLoopOutput) -> None:
    if output.finish_reason not in FINISH_REASONS:
        raise OutputError(f"finish_reason is {output.finish_reason!r}; allowed are {', '.join(FINISH_REASONS)}")
    if output.num_turns < 1:
        raise OutputError(f"num_turns is {output.num_turns}; a trajectory holds at least one generation")
    if output.reward is not None and not abs(output.reward) <= LARGEST_REWARD:
        raise OutputError(
            f"reward is {output.reward}; give a number of at most {LARGEST_REWARD:g}, None to have it graded later, or "
            "fail the rollout"
        )
    if output.turn_rewards and len(output.turn_rewards) != output.num_turns:
        raise OutputError(f"turn_rewards has {len(output.turn_rewards)} entries for {output.num_turns} turns")
    for i, reward in enumerate(output.turn_rewards):
        if not abs(reward) <= LARGEST_REWARD:
            raise _error("turn_rewards", i, output.turn_rewards, f"a reward is at most {LARGEST_REWARD:g}")


def _error(name: str, index: int, values: Sequence[Any], rule: str) -> OutputError:
    return OutputError(f"{name}[{index}] is {values[index]!r}; {rule}")
