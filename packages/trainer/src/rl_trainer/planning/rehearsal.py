"""`rl-train --dry-run`: tries in seconds what would fail after start-up: the chat template, the reward, the server."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rl_agent
from rl_agent.errors import AgentError
from rl_trainer.errors import ConfigError, InputError, RewardError
from rl_trainer.rewards import Scorer, resolve_reward

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rl_trainer.config import Config, RewardSection
    from rl_trainer.data import Row

_PROGRAMS = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "tensorrt_llm"}
"""Package that a rollout backend's server is started from, unless rollout.options.command names a program."""
_MADE_UP = "I do not know."


def rehearse(config: Config, rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Rehearse the first row: chat template, reward, server; returns lines of the plan.

    Raises:
        InputError: something that the run needs does not work; in one sentence.
    """
    row = next(iter(rows), None)
    found = [("server's program", _program(config))] if config.rollout.backend in _PROGRAMS else []
    if row is None:
        return found
    if config.model.path is not None:
        found.append(("chat template", _tokens(Path(config.model.path), row, config.data.max_prompt_tokens)))
    served = [name for name, part in config.reward.parts.items() if part.kind in ("judge", "classifier", "loop")]
    if not served and (config.reward.path or config.reward.parts or config.agent.loop == "single_turn"):
        found.append(("reward tried", asyncio.run(_reward(config.reward, row))))
    return found


def reward_source(reward: RewardSection, rows: Iterable[Row]) -> str:
    """Source of rewards, as a line of the plan."""
    if reward.path is not None:
        return f"{reward.path} (reward.path)"
    if reward.parts:
        parts = (f"{name}: {part.rule or part.path or part.url or part.kind}" for name, part in reward.parts.items())
        return f"{', '.join(parts)} (reward.parts)"
    by_source: dict[str, str] = {}
    for row in rows:
        if row["data_source"] not in by_source:
            by_source[row["data_source"]] = resolve_reward(row["data_source"])
    rules = (f"rule {rule} for data_source={source}" for source, rule in sorted(by_source.items()))
    return f"the agent loop's own, or {'; '.join(rules) or 'the rule of the data source'}"


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
    if {"data_source", "solution_str", "ground_truth"} <= {*names, *(each.arg for each in found.args.kwonlyargs)}:
        return
    needed = len(names) - len(found.args.defaults)
    if not needed <= 2 <= len(names):
        raise ConfigError(
            f"{key}={path} takes ({', '.join(names)}); a reward is called with (text, row), or as verl does with "
            "(data_source, solution_str, ground_truth, extra_info)"
        )


def _program(config: Config) -> str:
    backend, command = config.rollout.backend, config.rollout.options.get("command")
    if command is None:
        name = _PROGRAMS[backend]
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"rollout.backend={backend} starts {name}, which is not installed here; install it, or give "
                "rollout.options.command the program of the environment that has it"
            )
        return f"{name} of this environment"
    program = command.split()[0] if isinstance(command, str) else command[0]
    if (place := shutil.which(program)) is None:
        raise ConfigError(f"rollout.options.command starts {program}, which is not there; give its whole path")
    return place


def _tokens(folder: Path, row: Row, longest: int) -> str:
    try:
        tokenizer = rl_agent.load_tokenizer(str(folder))
        ids, _ = rl_agent.tokenize_prompt(tokenizer, dict(row))
    except (AgentError, ValueError, OSError) as error:
        told = str(error).splitlines()[0]
        raise InputError(
            f"the first row cannot be written by the chat template of model.path={folder}: {told}"
        ) from error
    told = f"the first prompt has {len(ids)} tokens"
    return told if len(ids) <= longest else f"{told}, more than data.max_prompt_tokens={longest}: it would be left out"


async def _reward(section: RewardSection, row: Row) -> str:
    truth = row["reward_model"].get("ground_truth")
    texts = {"a made-up completion": _MADE_UP} | ({} if truth is None else {"the ground truth": str(truth)})
    scorer, told = Scorer(section), list[str]()
    try:
        await scorer.start()
        for what, text in texts.items():
            told.append(f"{what} {await _scored(scorer, text, row)}")
    except (RewardError, OSError) as error:
        raise InputError(f"the reward cannot be used: {error}") from error
    finally:
        await scorer.close()
    return ", ".join(told)


async def _scored(scorer: Scorer, text: str, row: Mapping[str, Any]) -> str:
    try:
        return f"{(await scorer.score(text, row)).reward:g}"
    except RewardError as error:  # a function may refuse a text: that is no score, and no mistake
        if "TypeError" in str(error):
            raise
        return f"no score ({error})"
    except TimeoutError as error:
        raise RewardError(str(error)) from error
