"""Records of training steps: staleness, lengths, rewards and losses of a batch, from its tags."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rl_trainer.errors import StaleWeightsError
from rl_trainer.metrics import StepRecord
from rl_trainer.workers.columns import GIVEN, TOOL_ERROR, TRUNCATED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_trainer.config.schema import ReplaySection
    from rl_trainer.metrics import Evaluation
    from rl_trainer.pipeline.rollout_source import Generated, RolloutSource
    from rl_trainer.pipeline.staleness import AgeBound


def ages_of(
    generated: Generated, *, version: int, bound: AgeBound, replay: ReplaySection | None = None
) -> dict[str, float]:
    """Staleness metrics of a batch, after the check that no token is older than allowed.

    An age is that of a sample's oldest token, in weight versions: `staleness_N` is the share of samples of age N,
    in addition to `staleness_mean` and `staleness_max`.

    Replayed groups may be older than fresh ones.

    Raises:
        StaleWeightsError: a token is older or newer than `bound` allows.
    """
    ages: Counter[int] = Counter()
    batch, reused = generated.batch, {group.group_id for group in generated.reused}
    spans = [
        (tags["weight_version_min"], tags["weight_version_max"], tags["group_id"] in reused) for tags in batch.tags
    ]
    for (low, high, is_reused), count in Counter(spans).items():
        limit = replay.max_age if replay is not None and is_reused else bound.most
        if not low <= high <= version - bound.least or (limit is not None and version - low > limit):
            sample_id = batch.sample_ids[spans.index((low, high, is_reused))]
            raise StaleWeightsError(
                f"sample {sample_id} has tokens of weight versions {low} to {high}; weights of version {version} may "
                f"learn from {'any up' if limit is None else version - limit} to {version - bound.least}"
            )
        ages[version - low] += count
    shares = {f"staleness_{age}": ages[age] / len(batch) for age in range(max(ages, default=0) + 1)}
    mean = sum(age * count for age, count in ages.items()) / len(batch)
    return {**shares, "staleness_mean": mean, "staleness_max": float(max(ages, default=0))}


def record_of(
    step: int,
    generated: Generated,
    source: RolloutSource,
    ages: Mapping[str, float],
    updates: Mapping[str, Sequence[Mapping[str, float]]],
    held_out: Evaluation | None,
    phase_s: dict[str, float],
) -> StepRecord:
    """The step's record: metrics averaged over its optimizer steps, staleness, lengths, rewards and times.

    `updates` has the optimizer steps by policy. Metrics of several policies begin with their names.
    """
    reused = {group.group_id for group in generated.reused}
    tags = [tags for tags in generated.batch.tags if tags["group_id"] not in reused and not tags.get(GIVEN)]
    metrics = dict[str, float]()
    for policy, taken in updates.items():
        own = [tag for tag in tags if tag.get("policy", "") == policy]
        found = update_means(taken)
        if policy:
            found |= {"samples": float(len(own)), **part_means(own), **completion_metrics(own)}
            found |= {"reward": fmean(tag["reward"] for tag in own)} if own else {}
        metrics |= {f"{policy}/{name}" if policy else name: value for name, value in found.items()}
    metrics |= {"dropped_groups": generated.dropped_groups, "late_groups": generated.late_groups}
    metrics |= {"stopped_groups": generated.stopped_groups, "replayed_groups": len(reused)}
    metrics |= {**ages, **part_means(tags), **completion_metrics(tags), **(held_out.policy_rewards if held_out else {})}
    return StepRecord(
        step=step,
        position=source.position,
        pending=source.pending,
        held=source.held,
        reward=generated.reward,
        accuracy=None if held_out is None else held_out.accuracy,
        eval_reward=None if held_out is None else held_out.reward,
        eval_prompts=None if held_out is None else held_out.num_prompts,
        num_tokens=sum([tag["num_tokens"] for tag in tags]),
        num_truncated=num_truncated(tags),
        failures={**generated.failures, **(held_out.failures if held_out else {})},
        last_failure=generated.last_failure or (held_out.last_failure if held_out else ""),
        last_tool_error=next((tag[TOOL_ERROR] for tag in reversed(tags) if TOOL_ERROR in tag), ""),
        metrics=metrics,
        phase_s=phase_s,
        rows=tuple(group.row_index for group in generated.groups),
    )


def update_means(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of optimizer steps, averaged; the learning rate is the last one's."""
    names = {name: None for update in updates for name in update}  # in order
    means = {name: fmean(u[name] for u in updates if name in u) for name in names}
    return means | {name: value for update in updates[-1:] for name, value in update.items() if name == "lr"}


def num_truncated(tags: Sequence[Mapping[str, Any]]) -> int:
    """Number of completions that were cut off by their length or the deadline of the rollout."""
    return len([None for tag in tags if tag["finish_reason"] in TRUNCATED])


_COUNTS = {"unknown_tokens": "num_unknown", "tool_errors": "num_tool_error"}
"""Tags of completions whose sum is a metric, by its name."""


def completion_metrics(tags: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of completions: lengths in tokens, truncated share, spread of rewards, groups with equal rewards.

    With `unknown_tokens`, ids that the tokenizer has not, and `tool_errors`, exceptions of tools, if there were any.
    """
    if not tags:
        return {}
    rewards, lengths = [tag["reward"] for tag in tags], [tag["num_tokens"] for tag in tags]
    groups = [tag["group_id"] for tag in tags]
    first = dict(zip(groups, rewards, strict=True))  # one reward per group
    has_signal = {group for group, reward in zip(groups, rewards, strict=True) if reward != first[group]}
    mean = fmean(rewards)
    return {
        "completion_tokens_mean": fmean(lengths),
        "completion_tokens_max": float(max(lengths)),
        "truncated_share": num_truncated(tags) / len(tags),
        "reward_std": fmean([(reward - mean) ** 2 for reward in rewards]) ** 0.5,
        "groups_without_signal": 1 - len(has_signal) / len(first),
        **{name: float(count) for name, tag in _COUNTS.items() if (count := sum(each.get(tag, 0) for each in tags))},
    }


def part_means(tags: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means of reward components, unweighted, as `reward/NAME`; empty where rewards have none."""
    names = dict.fromkeys(name for tag in tags for name in tag.get("parts", {}))  # a sample lacks what does not apply
    return {f"reward/{name}": fmean(t["parts"][name] for t in tags if name in t["parts"]) for name in names}
