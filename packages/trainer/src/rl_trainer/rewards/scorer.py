"""Scorer: rewards of completions, by the data source's rule or by the reward parts of the configuration."""

from __future__ import annotations

import asyncio
import inspect
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from rl_trainer.config.schema import RewardPart, RewardSection
from rl_trainer.errors import PlanError, RewardError
from rl_trainer.rewards import verl
from rl_trainer.rewards.code import RULES as CODE_RULES
from rl_trainer.rewards.code import CodeTests
from rl_trainer.rewards.completions import Thinking
from rl_trainer.rewards.process_pool import FunctionPool
from rl_trainer.rewards.rules import ISOLATED, MATH, RULES, TRUTHS, is_text, isolated, resolve_reward, rule_of_source
from rl_trainer.rewards.served import ServedReward
from rl_trainer.rewards.trl import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence

    from rl_rollout.types import ServerAddress
    from rl_trainer.rewards.trl import BatchRewards

T = TypeVar("T")
Value = float | dict[str, float] | None
"""What a part gives for a completion: a number, numbers by name, or None where it does not apply."""
SERVED = ("judge", "classifier", "loop")
"""Kinds of parts whose values come from servers, or from the agent loop."""
_CORRECTNESS = ("accuracy", "acc")
"""What reward functions call the component that says whether an answer is correct."""
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Score of a completion: its reward, and its components."""

    reward: float
    """The parts, weighted and added."""
    components: Mapping[str, float] = field(default_factory=dict)
    """The parts by name, not weighted; empty where the reward has none."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each component; 0 of those that do not apply."""
    missing: frozenset[str] = frozenset()
    """Components that do not apply to this row; they are 0 among the others."""
    is_right: bool | None = None
    """Whether the answer is correct: full marks, 1 or more, of what judges it; None: nothing says so."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What TRL's functions gave to `log_metric`, and the terms of an agent loop's own reward, by name."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What they gave to `log_extra` for this completion, by column."""

    def less(self, penalty: float) -> Score:
        """Subtract a penalty, which is a separate component if the reward has components."""
        if not self.components:
            return replace(self, reward=self.reward - penalty)
        return replace(
            self,
            reward=self.reward - penalty,
            components={**self.components, "overlong": -penalty},
            weights={**self.weights, "overlong": 1.0},
        )

    def with_logs(self, batches: Iterable[BatchRewards], index: int) -> Score:
        """Add what functions logged for the completion of this index in its batch."""
        metrics = {name: value for batch in batches for name, value in batch.metrics.items()}
        extra = {name: values[index] for batch in batches for name, values in batch.extra.items()}
        return replace(self, metrics=metrics, extra=extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Completion to score."""

    text: str
    token_ids: Sequence[int] = ()
    """Its token ids, for TRL's functions."""
    loop_reward: float | None = None


class _Source(Protocol):
    async def call(self, text: str, row: Mapping[str, Any]) -> float | dict[str, float]: ...
    async def close(self) -> None: ...


class Scorer:
    """Scorer of completions, many at a time on one event loop.

    Without `path` and `parts` a completion has its agent loop's reward, and where that gives none, the one by its data
    source's rule. Rules that parse what the policy wrote, and functions, run in processes of their own, which are
    killed when they get stuck.

    `num_sharing` processes share the rate limits of served models.
    """

    def __init__(
        self,
        section: RewardSection | None = None,
        *,
        num_sharing: int = 1,
        thinking: Thinking | None = None,
        num_steps: int = 0,
    ) -> None:
        self._num_steps = num_steps
        self.section = section or RewardSection()
        """Where rewards come from."""
        self._thinking = thinking or Thinking()
        self._graders: dict[str, CodeTests] = {}
        self._num_sharing = num_sharing
        self._isolated = self._pool(f"{isolated.__module__}:{isolated.__name__}")
        parts = self.section.parts
        self._parts = {"": RewardPart(kind="function", path=self.section.path)} if self.section.path else dict(parts)
        self._sources = {name: self._source(name, part) for name, part in self._parts.items()}
        self._names: dict[str, frozenset[str]] = {}
        self.step = 0
        """Step of the run, for functions that ask for `trainer_state`: the newest weight version that was graded."""

    def _source(self, name: str, part: RewardPart) -> _Source | None:
        if part.kind in ("judge", "classifier"):
            return ServedReward(
                name,
                part,
                num_sharing=self._num_sharing,
                timeout_s=self.section.timeout_s,
                num_processes=self.section.num_processes,
            )
        if part.rule is not None and part.rule in CODE_RULES:
            return CODE_RULES[part.rule](self.section.num_processes, **part.options)
        if part.kind != "function":
            return None
        assert part.path is not None, "the plan has checked it"
        place, mark, function = part.path.rpartition(":")
        path = f"{Path(place).resolve()}:{function}" if mark and place.endswith(".py") else part.path
        return self._pool(path)

    def _pool(self, path: str) -> FunctionPool:
        return FunctionPool(path, num_processes=self.section.num_processes, timeout_s=self.section.timeout_s)

    async def start(self) -> None:
        """Load functions and start sandboxes, so that their errors come before anything is generated.

        Raises:
            RewardError: a function cannot be loaded.
            SandboxError: code cannot be run as asked.
        """
        begin = (FunctionPool, CodeTests, ServedReward)
        await asyncio.gather(*(s.start() for s in self._sources.values() if isinstance(s, begin)))

    def use(self, servers: Mapping[str, Sequence[ServerAddress]]) -> None:
        """Set the replicas of the reward models that the run serves, by part."""
        for name, addresses in servers.items():
            source = self._sources[name]
            assert isinstance(source, ServedReward), "no other part is served"
            source.use(addresses)

    async def score(self, text: str, row: Mapping[str, Any], loop_reward: float | None = None) -> Score:
        """Score a completion: `values` and `scores` of one.

        Raises:
            RewardError, TimeoutError: there is no score, which is not a score of zero.
        """
        completion = Completion(text=text, loop_reward=loop_reward)
        return (await self.scores([completion], [await self.values(completion, row)], row))[0]

    async def values(self, completion: Completion, row: Mapping[str, Any]) -> dict[str, Value]:
        """What each part gives for a completion, but those that judge the completions of a prompt together.

        Raises:
            RewardError, TimeoutError: a part has no value, which is not a value of zero.
        """
        if not self._parts:
            answer, reward = self._thinking.answer(completion.text), completion.loop_reward
            return {"": await self._rule(None, {}, answer, row) if reward is None else reward}
        alone = [name for name in self._parts if not await self._takes_batch(name)]
        return await _all({name: self._value(name, completion, row) for name in alone})

    async def scores(
        self, completions: Sequence[Completion], values: Sequence[Mapping[str, Value]], row: Mapping[str, Any]
    ) -> list[Score]:
        """Scores of completions of one prompt.

        Raises:
            RewardError, TimeoutError: there are no scores.
        """
        if not self._parts:
            rewards = [value[""] for value in values]
            return [Score(reward=reward, is_right=reward >= 1) for reward in rewards if isinstance(reward, float | int)]
        batch = Batch(
            texts=[each.text for each in completions],
            token_ids=[[*each.token_ids] for each in completions],
            step=self.step,
            num_steps=self._num_steps,
        )
        pools = {n: source for n, source in self._sources.items() if isinstance(source, FunctionPool)}
        pools = {name: pool for name, pool in pools.items() if await pool.takes_batch()}
        together = await _all({name: pool.call_batch(batch, row) for name, pool in pools.items()})
        return [
            self._combined({**value, **{name: found.rewards[index] for name, found in together.items()}}).with_logs(
                together.values(), index
            )
            for index, value in enumerate(values)
        ]

    async def _takes_batch(self, name: str) -> bool:
        source = self._sources[name]
        return isinstance(source, FunctionPool) and await source.takes_batch()

    def _combined(self, values: Mapping[str, Value]) -> Score:
        """Score of the values of all parts."""
        components: dict[str, float] = {}
        missing = set[str]()
        weights: dict[str, float] = {}
        for name in self._parts:  # in their order, which is that of the components
            value = values[name]
            if value is None:
                missing.add(name or "reward")
                components[name or "reward"] = weights[name or "reward"] = 0.0
                continue
            named = self._named(name, value)
            components.update(named)
            weights.update(dict.fromkeys(named, self._parts[name].weight))
        if len(missing) == len(components):
            raise RewardError("no reward function applies to this completion: all of them gave None")
        return Score(
            reward=sum(weights[name] * value for name, value in components.items()),
            components=components,
            weights=weights,
            missing=frozenset(missing),
            is_right=self._is_right({n: v for n, v in components.items() if n not in missing}),
        )

    def _is_right(self, components: Mapping[str, float]) -> bool | None:
        """Correctness by the rules that compare answers; without any, by the one number of functions and agent loop.

        A function with several numbers calls the one that counts `accuracy` or `acc`.
        """
        rules = [name for name, part in self._parts.items() if part.kind == "rule" and compares(part)]
        if rules:
            return all(components[name] >= 1 for name in rules)
        ours = [name for name, part in self._parts.items() if part.kind in ("function", "loop")]
        found = {n: v for n, v in components.items() if n.partition("/")[0] in ours or ours == [""]}
        values = [v for n, v in found.items() if n.rpartition("/")[2] in _CORRECTNESS] or [*found.values()]
        return values[0] >= 1 if len(values) == 1 else None

    async def _value(self, name: str, completion: Completion, row: Mapping[str, Any]) -> Value:
        source, part, text = self._sources[name], self._parts[name], completion.text
        if part.kind == "rule" and compares(part) and not (part.rule or "").startswith("verl/"):
            text = self._thinking.answer(text)  # others look at its form, and verl's at all of it
        if source is not None:
            return await source.call(text, row)
        if part.kind == "rule":
            return await self._rule(part.rule, part.options, text, row)
        if completion.loop_reward is None:
            raise RewardError(f"reward.parts.{name} is the agent loop's own reward, and the loop gave none")
        return completion.loop_reward

    async def _rule(self, name: str | None, options: Mapping[str, Any], text: str, row: Mapping[str, Any]) -> float:
        name = name or resolve_reward(row["data_source"])
        name = verl.rule_of(row["data_source"]) if name == "verl/default" else name
        if name in CODE_RULES:  # that of a data source
            if name not in self._graders:
                self._graders[name] = CODE_RULES[name](self.section.num_processes)
            return await self._graders[name].call(text, row)
        if name not in ISOLATED:
            return RULES[name](text, row, **options)
        asked = {"rule": name, "options": dict(options), "reward_model": row["reward_model"]}
        value = await self._isolated.call(text, asked)
        assert isinstance(value, float), "our rules give numbers"
        return value

    def _named(self, part: str, value: float | dict[str, float]) -> dict[str, float]:
        """Components of a part's value; a function has to give the same names every time."""
        value = value if isinstance(value, dict) else {"": value}
        names = frozenset(value)
        if (before := self._names.setdefault(part, names)) != names:
            raise RewardError(
                f"the reward function gave parts {sorted(names)} and before {sorted(before)}; it has to give the "
                "same ones for every completion"
            )
        return {"/".join(filter(None, (part, name))) or "reward": value[name] for name in sorted(value)}

    async def close(self) -> None:
        """End the processes and connections. Idempotent."""
        for source in (*self._sources.values(), *self._graders.values(), self._isolated):
            if source is not None:
                await source.close()


async def _all(work: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
    """Results by name; the first error is raised and cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(each) for name, each in work.items()}
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return {name: task.result() for name, task in tasks.items()}


def compares(part: RewardPart) -> bool:
    """Whether a rule compares an answer with the ground truth, rather than to look at the form of a text."""
    has_group = part.rule != "regex" or re.compile(part.options["pattern"]).groups > 0
    return part.rule != "format" and has_group


def _rules_of(section: RewardSection, data_source: str, *, is_by_source: bool) -> Iterator[tuple[str, RewardPart]]:
    """Rules that compare a completion with the ground truth of rows of a data source, and their parts."""
    plain = RewardPart(kind="rule")
    parts = section.parts.values() if section.parts else [plain] * (is_by_source and section.path is None)
    for part in parts:
        if part.kind == "rule" and (part.rule is None or compares(part)):
            name = part.rule or rule_of_source(data_source)
            name = verl.rule_of(data_source) if name == "verl/default" else name
            if name is not None:
                yield name, part


def unusable_truth(section: RewardSection, row: Mapping[str, Any], *, is_by_source: bool) -> str | None:
    """Why the ground truth of a row cannot be compared with by the rules that score it; None if it can.

    `is_by_source`: completions have the reward by the rule of their data source where `section` names none.
    """
    truth = row["reward_model"].get("ground_truth")
    for rule, _ in _rules_of(section, row["data_source"], is_by_source=is_by_source):
        if rule not in TRUTHS:
            continue
        kind = "a text or a number" if TRUTHS[rule] is is_text else "a text, or a list of texts"
        if truth is None:
            return f"no ground truth for rule {rule} to compare with: it is null; give {kind}"
        if not TRUTHS[rule](truth) or (rule in MATH and not str(truth).strip()):
            return f"rule {rule} cannot compare with the ground truth {truth!r:.60}; give {kind}"
    return None


def needs_parser(section: RewardSection, row: Mapping[str, Any]) -> bool:
    """Whether a rule reads the ground truth of a row as an expression, so that it may not be able to."""
    truth = str(row["reward_model"].get("ground_truth")).strip()
    rules = {rule for rule, _ in _rules_of(section, row["data_source"], is_by_source=True)}
    return bool(rules & {*MATH}) and not _NUMBER.fullmatch(truth)


def check_rule(key: str, part: RewardPart) -> None:
    """Check the rule of a part, and its options.

    Raises:
        PlanError: no such rule, or options that it does not have, lacks or cannot use.
    """
    names = sorted([*RULES, *CODE_RULES])
    if part.rule is None:
        if part.options:
            raise PlanError(
                f"{key}.options are those of a rule, and {key}.rule names none: the data source's has no options. Name "
                f"one of {', '.join(names)}, or leave them out"
            )
        return
    if part.rule not in names:
        raise PlanError(f"{key}.rule={part.rule!r} is not a rule; there are {', '.join(names)}")
    _check_options(f"{key}.options", part.options, part.rule, CODE_RULES.get(part.rule) or RULES[part.rule])


def _check_options(key: str, options: Mapping[str, Any], rule: str, function: Callable[..., Any]) -> None:
    """Check options against a function's keyword-only parameters."""
    known = {p.name: p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    there = ", ".join(known)
    for name in options:
        if name not in known:
            raise PlanError(f"{key}.{name} does nothing with rule={rule}, whose options are {there}; leave it out")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise PlanError(f"{key} lacks {name}, without which there is no rule={rule}")
    taker = function.__init__ if inspect.isclass(function) else function
    hints = get_type_hints(taker, include_extras=True) if options else {}
    for name, value in options.items():
        try:
            TypeAdapter(hints[name]).validate_python(value, strict=isinstance(value, (bool, str)))
        except ValidationError as error:
            said = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise PlanError(f"{key}.{name}={value!r} cannot be used: {said}") from error
