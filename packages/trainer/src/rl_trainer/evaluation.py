"""Evaluation on held-out rows: accuracy, pass@k and maj@k with confidence intervals, from any rollout server."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import rl_agent.registry
import rl_rollout.registry
from rl_agent.base import Policy
from rl_trainer.errors import RolloutFailedError
from rl_trainer.pipeline.roles import server_config
from rl_trainer.pipeline.rollout_source import hash_seed
from rl_trainer.rewards import Scorer, answer_of
from rl_trainer.samples import Order, ShownSample
from rl_trainer.workers.agent import create_runner, thinking_of
from rl_trainer.workers.grading import Grading, scored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_agent.types import Failure
    from rl_rollout.base import RolloutServer
    from rl_trainer.config import Config
    from rl_trainer.data import Datasets
    from rl_trainer.rewards.scorer import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimate of a mean over problems, with its confidence interval."""

    mean: float
    half_width: float
    """Half width of the 95% confidence interval: 1.96 standard errors between problems, clustered by problem
    (Miller, "Adding Error Bars to Evals", 2411.00640). NaN with one problem."""

    @staticmethod
    def of(per_problem: Sequence[float]) -> Estimate:
        """The mean of one number per problem."""
        n = len(per_problem)
        error = stdev(per_problem) / math.sqrt(n) if n > 1 else math.nan
        return Estimate(mean=fmean(per_problem), half_width=1.96 * error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Samples of one held-out row."""

    prompt: str
    """The last message of the row's prompt."""
    completions: tuple[str, ...]
    """Text of each completion that ended well."""
    answers: tuple[str, ...]
    rewards: tuple[float, ...]
    right: tuple[bool, ...] | None
    """Whether each of them is correct; None where the reward does not say so."""
    num_failed: int
    """Completions that did not end well; they are in no estimate."""
    failure: str = ""
    """Row, type and message of the last of them."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased pass@k, the chance that one of k samples is right: 1 - C(n - c, k) / C(n, k), arXiv 2107.03374."""
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def maj_at_n(answers: Sequence[str], right: Sequence[bool]) -> float:
    """maj@n: whether the most frequent answer is right, the mean over ties (self-consistency, arXiv 2203.11171)."""
    counts = Counter(answers)
    most = max(counts.values())
    first = dict(zip(reversed(answers), reversed(right), strict=True))
    return fmean(first[answer] for answer, count in counts.items() if count == most)


def summarise(problems: Sequence[Problem], ks: Sequence[int]) -> dict[str, Estimate]:
    """Mean reward, accuracy, pass@k for each k, and maj@n; the reward alone if it does not measure correctness.

    A problem of which fewer than k completions ended well does not enter pass@k.

    Raises:
        RolloutFailedError: nothing ended well.
    """
    scored = [p for p in problems if p.rewards]
    if not scored:
        reasons = [f"; for example {problem.failure}" for problem in problems if problem.failure]
        raise RolloutFailedError(f"all completions failed, so the policy cannot be judged{(*reasons, '')[0]}")
    found = {"reward": Estimate.of([fmean(p.rewards) for p in scored])}
    judged = [(p.answers, p.right) for p in scored if p.right is not None]
    if len(judged) < len(scored):
        return found
    found["accuracy"] = Estimate.of([fmean(right) for _, right in judged])
    for k in ks:
        chances = [pass_at_k(len(right), sum(right), k) for _, right in judged if len(right) >= k]
        if chances:
            found[f"pass@{k}"] = Estimate.of(chances)
    most = max(len(right) for _, right in judged)
    if most > 1:
        found[f"maj@{most}"] = Estimate.of([maj_at_n(answers, right) for answers, right in judged])
    return found


async def sample(
    config: Config, data: Datasets, *, num_samples: int, url: str | None = None, num_rows: int | None = None
) -> list[Problem]:
    """Sample every held-out row `num_samples` times, at `rollout.eval_temperature` (one) or `rollout.temperature`.

    `config` is prepared by `prepare_policy`; the tokenizer of `model.path` is used even where a server at `url`
    answers.
    """
    rows = data.eval[:num_rows]
    places = [data.where(index, is_eval=True) for index in range(len(rows))]
    rollout, model_path = config.rollout, Path(str(config.model.path))
    server: RolloutServer
    if url is None:
        server = rl_rollout.registry.launch_server(rollout.backend, server_config(config, model_path))
    else:
        server = rl_rollout.registry.connect_server(url, timeout_s=config.timeout_s)
    router = rl_rollout.registry.create_router([server])
    async with AsyncExitStack() as stack:
        await router.start()
        stack.push_async_callback(router.stop)
        takes_videos = router.capabilities.takes_videos
        tokenizer = rl_agent.registry.create_tokenizer(str(model_path), takes_videos=takes_videos)
        thinking = thinking_of(tokenizer, config.reward, config.agent)
        scorer = Scorer(config.reward, thinking=thinking)
        stack.push_async_callback(scorer.close)
        runner = create_runner(config.agent, {"": Policy(router, tokenizer)})
        sampling: Mapping[str, Any] = {
            "temperature": rollout.eval_temperature if num_samples == 1 else rollout.temperature,
            "top_p": rollout.top_p,
            "max_new_tokens": rollout.max_new_tokens,
            "seed": hash_seed(f"{config.seed}/eval"),
        }
        samples: list[list[tuple[str, str, Score]]] = [[] for _ in rows]
        failures: list[Sequence[Failure]] = [()] * len(rows)
        grading = Grading(rows, scorer)
        groups = runner.run_groups(
            rows,
            sampling,
            group_size=num_samples,
            on_failure="mask",
            min_group_size=1,
            grade=grading.grade,
            complete=grading.complete,
        )
        async for group in groups:
            failures[group.row_index] = group.failures
            for rollout in group.rollouts:
                samples[group.row_index] += [
                    (output.text, answer_of(thinking.answer(output.text)), score) for output, score in scored(rollout)
                ]
        await runner.close()
    return [
        Problem(
            prompt=row["prompt"][-1]["content"],
            completions=tuple(text for text, _, _ in found),
            answers=tuple(answer for _, answer, _ in found),
            rewards=tuple(score.reward for _, _, score in found),
            right=right_of([score for _, _, score in found]),
            num_failed=len(failed),
            failure=f"{where}: {failed[-1].message}" if failed else "",
        )
        for row, where, found, failed in zip(rows, places, samples, failures, strict=True)
    ]


def right_of(scores: Sequence[Score]) -> tuple[bool, ...] | None:
    """Which completions are correct; None where nothing says so of one."""
    right = tuple(score.is_right for score in scores if score.is_right is not None)
    return right if len(right) == len(scores) else None


def fresh(
    config: Config, data: Datasets, *, url: str | None, order: Order, count: int, num_samples: int
) -> list[ShownSample]:
    """Fresh completions of the first `count` held-out rows, by the policy in `model.path`."""
    problems = asyncio.run(sample(config, data, num_samples=num_samples, url=url, num_rows=count))
    found = [
        ShownSample(title=f"row {number}, sample {index}", prompt=problem.prompt, completion=text, reward=reward)
        for number, problem in enumerate(problems, 1)
        for index, (text, reward) in enumerate(zip(problem.completions, problem.rewards, strict=True), 1)
    ]
    return found if order == "first" else sorted(found, key=lambda shown: shown.reward, reverse=order == "best")
