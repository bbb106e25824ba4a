"""Checks of rewards before the start: functions, rules, packages, keys of services; and a line of the plan."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rl_trainer import plugins
from rl_trainer.errors import ConfigError, InputError
from rl_trainer.rewards.rules import check_packages, resolve_reward
from rl_trainer.rewards.verl import rule_of
from rl_trainer.rewards.worker import GROUP

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rl_trainer.config.schema import RewardPart, RewardSection
    from rl_trainer.data import Row


def check_rewards(reward: RewardSection, rows: Iterable[Row]) -> None:
    """Check that every part of the reward can be had for these rows, running no code of the user's.

    Raises:
        InputError: one cannot.
    """
    sources = {row["data_source"] for row in rows}
    own = {
        f"reward.parts.{name}.{key}": path
        for name, part in reward.parts.items()
        for key, path in (("path", part.path), ("prompt", part.prompt_function), ("parser", part.parser))
    }
    for key, path in ({"reward.path": reward.path} | own).items():
        if path is not None:
            plugins.check(path, GROUP, key=key)
            check_signature(path, key)
    for name, part in reward.parts.items():
        model = part.served_model
        if model is not None and not (Path(model.path) / "config.json").is_file():
            raise InputError(
                f"reward.parts.{name}.model.path={model.path} has no config.json, so it is not a folder of a model"
            )
        if part.api_key_env is not None and not os.environ.get(part.api_key_env):
            raise ConfigError(f"reward.parts.{name}.api_key_env={part.api_key_env} is not set in the environment")
        if part.rule is not None:
            check_packages(part.rule, f"reward.parts.{name}.rule={part.rule} and its like")
    is_by_rule = any(part.kind == "rule" and part.rule is None for part in reward.parts.values())
    is_by_rule |= not (reward.path or reward.parts)
    if is_by_rule:
        for source in sources:
            resolve_reward(source)
    if any(part.rule == "verl/default" for part in reward.parts.values()):
        for source in sources:
            rule_of(source)


def reward_source(reward: RewardSection, rows: Iterable[Row]) -> str:
    """Source of rewards, as a line of the plan."""
    if reward.path is not None:
        return f"{reward.path} (reward.path)"
    if reward.parts:
        parts = (
            f"{name}: {part.rule or part.path or part.url or _served(part) or part.kind}"
            for name, part in reward.parts.items()
        )
        return f"{', '.join(parts)} (reward.parts)"
    by_source: dict[str, str] = {}
    for row in rows:
        if row["data_source"] not in by_source:
            by_source[row["data_source"]] = resolve_reward(row["data_source"])
    rules = (f"rule {rule} for data_source={source}" for source, rule in sorted(by_source.items()))
    return f"the agent loop's own, or {'; '.join(rules) or 'the rule of the data source'}"


def _served(part: RewardPart) -> str | None:
    model = part.served_model
    return model and f"{part.kind} {model.path}, {model.num_replicas} served by the run"


def check_signature(path: str, key: str) -> None:
    """Check that a reward function of a file takes what it is called with, running none of its code.

    Raises:
        ConfigError: it takes neither (text, row) nor what verl gives.
    """
    place, _, name = path.rpartition(":")
    if not place.endswith(".py"):
        return
    tree = ast.parse(Path(place).read_text())
    found = next(
        (n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == name), None
    )
    if found is None or found.decorator_list or found.args.vararg is not None:
        return
    names = [each.arg for each in (*found.args.posonlyargs, *found.args.args)]
    if {"prompts", "completions", "completion_ids"} & {
        *names,
        *(each.arg for each in found.args.kwonlyargs),
    } and "text" not in names:
        return  # as TRL calls it
    if {"data_source", "solution_str", "ground_truth"} <= {*names, *(each.arg for each in found.args.kwonlyargs)}:
        return
    needed = len(names) - len(found.args.defaults)
    if not needed <= 2 <= len(names):
        raise ConfigError(
            f"{key}={path} takes ({', '.join(names)}); a reward is called with (text, row), as verl does with "
            "(data_source, solution_str, ground_truth, extra_info), or as TRL does with (prompts, completions, "
            "**columns)"
        )
