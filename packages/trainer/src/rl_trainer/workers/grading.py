"""Grading of rollouts: the scorer's values as each ends, and the scores when its group does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_agent.errors import contained, described
from rl_agent.types import LARGEST_REWARD, AgentLoopOutput, Failure, FailureKind, GroupResult, RolloutResult
from rl_trainer.errors import RewardError, TrainerError
from rl_trainer.plugins import Filter, filter_named
from rl_trainer.rewards import Completion, Score, Scorer
from rl_trainer.workers.columns import GIVEN, ROLLOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_trainer.config.schema import BatchConfig
    from rl_trainer.data import Row
    from rl_trainer.workers.columns import Sample

_SCORE, _VALUES = "score", "reward_values"
"""Extra fields of a trajectory: its score, and before its group is complete the values of what judges it alone."""
_TERM = "reward/"
"""Start of the metrics of a trajectory that are terms of its loop's reward."""


def overlong_penalty(num_tokens: int, longest: int, buffer: int) -> float:
    """Length penalty of a completion: 0 up to `longest - buffer` tokens, then linear up to 1.

    Soft overlong punishment, arXiv 2503.14476, equation 13. Nothing with a buffer of 0.
    """
    return min(max(num_tokens - (longest - buffer), 0) / buffer, 1.0) if buffer else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedGroup:
    """Outcome of a group that was generated: what the controller needs of one that it does not hold."""

    group_id: int
    """Unique in the run."""
    attempt: int
    """Number of workers that died while they generated it."""
    rewards: tuple[float, ...]
    """Rewards of the policy's own samples."""

    @classmethod
    def of(cls, tags: Sequence[Mapping[str, Any]]) -> GradedGroup:
        """The outcome by the tags of the group's rows."""
        return cls(group_id=tags[0]["group_id"], attempt=tags[0]["attempt"], rewards=tuple(sampled_rewards(tags)))


def sampled_rewards(tags: Sequence[Mapping[str, Any]]) -> list[float]:
    """Rewards of the policy's own samples among rows with these tags."""
    return [each["reward"] for each in tags if not each.get(GIVEN)]


def group_filter(batch: BatchConfig) -> Filter:
    """Filter by the tags of a group's rows: `batch.filter`, whose errors end the run, and `batch.dynamic_sampling`."""
    keeps = None if batch.filter is None else filter_named(batch.filter)

    def checked(tags: Sequence[Mapping[str, Any]]) -> bool:
        if batch.dynamic_sampling and len({each["reward"] for each in tags}) == 1:
            return False
        try:
            return keeps is None or bool(keeps(tags))
        except Exception as error:
            raise TrainerError(f"batch.filter={batch.filter} raised {type(error).__name__}: {error}") from error

    return checked


class Grading:
    """Grading hooks of `AgentRunner.run_groups`; `scored` reads the scores. A scorer that raises is a counted failure.

    What judges one completion does so as its rollout ends, and what compares completions when their group does.
    """

    def __init__(self, rows: Sequence[Row], scorer: Scorer, penalty: Callable[[int], float] | None = None) -> None:
        self._rows, self._scorer, self._penalty = rows, scorer, penalty

    async def grade(self, result: RolloutResult) -> RolloutResult:
        """Add the values of what judges one completion, or fail the rollout."""
        outputs, row = result.outputs, self._rows[result.row_index]
        assert not isinstance(outputs, Failure), "those are not graded"
        self._scorer.step = max(self._scorer.step, *(max(output.weight_versions) for output in outputs))
        try:
            scoring = (contained(self._scorer.values(_completion(o), row)) for o in outputs)
            values = await asyncio.gather(*scoring)
        except Exception as error:  # noqa: BLE001 - a scorer is a plug-in: whatever it raises is a counted failure
            return replace(result, outputs=_reward_failure(error, row))
        added = ({ROLLOUT: result.rollout_index, _VALUES: each} for each in values)
        marked = (
            replace(o, extra_fields={**o.extra_fields, **fields}) for o, fields in zip(outputs, added, strict=True)
        )
        return replace(result, outputs=tuple(marked))

    async def complete(self, group: GroupResult, given: Sequence[RolloutResult] = ()) -> GroupResult:
        """Add the scores of a group's rollouts and of those that its row gives, or fail the group."""
        if failures := [each.outputs for each in given if isinstance(each.outputs, Failure)]:
            return replace(group, rollouts=(), failures=(*group.failures, *failures))
        rollouts = [*group.rollouts, *(each.outputs for each in given if not isinstance(each.outputs, Failure))]
        outputs, row = [output for rollout in rollouts for output in rollout], self._rows[group.row_index]
        values = [output.extra_fields[_VALUES] for output in outputs]
        try:
            found = await contained(self._scorer.scores([*map(_completion, outputs)], values, row))
            scores = iter([_sized(score) for score in found])
        except Exception as error:  # noqa: BLE001 - as of `grade`
            return replace(group, rollouts=(), failures=(*group.failures, _reward_failure(error, row)))
        return replace(group, rollouts=tuple(tuple(self._scored(o, next(scores)) for o in each) for each in rollouts))

    def _scored(self, output: AgentLoopOutput, score: Score) -> AgentLoopOutput:
        if self._penalty is not None:
            score = score.less(self._penalty(len(output.completion_token_ids)))
        terms = {name[len(_TERM) :]: value for name, value in output.metrics.items() if name.startswith(_TERM)}
        score = replace(score, metrics={**terms, **score.metrics})
        fields = {name: value for name, value in output.extra_fields.items() if name != _VALUES}
        return replace(output, extra_fields={**fields, _SCORE: score})


def _completion(output: AgentLoopOutput) -> Completion:
    return Completion(text=output.text, token_ids=output.completion_token_ids, loop_reward=output.reward)


def _sized(score: Score) -> Score:
    """Check that a score and its components can be squared in float32.

    Raises:
        RewardError: one cannot.
    """
    for name, value in {"the reward": score.reward, **score.components}.items():
        if not abs(value) <= LARGEST_REWARD:
            raise RewardError(f"{name} is {value:g}; a number of at most {LARGEST_REWARD:g} is needed")
    return score


def _reward_failure(error: Exception, row: Row) -> Failure:
    message = f"the reward of {row['data_source']!r} raised {described(error)}"
    return Failure(kind=FailureKind.GRADER, stage="reward", message=message, is_retryable=False)


def scored(outputs: Sequence[AgentLoopOutput]) -> list[Sample]:
    """Trajectories that `Grading` has scored, with their scores."""
    return [(output, output.extra_fields[_SCORE]) for output in outputs]
