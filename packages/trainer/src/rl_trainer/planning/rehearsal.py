"""`rl-train --dry-run`: tries in seconds what would fail after start-up: the chat template, the reward, the server."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import random
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import rl_agent
from rl_agent.errors import AgentError
from rl_trainer.data.datasets import Complaints
from rl_trainer.data.rows import Row
from rl_trainer.errors import ConfigError, DataError, InputError, RewardError
from rl_trainer.rewards import Scorer, resolve_reward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rl_agent.base import Generator
    from rl_trainer.config import Config, RewardSection
    from rl_trainer.data import Datasets

_PROGRAMS = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "tensorrt_llm"}
"""Package that a rollout backend's server is started from, unless rollout.options.command names a program."""
_MADE_UP = "I do not know."


def rehearse(
    config: Config, rows: Sequence[Row], where: Callable[[int], str] = "row {0}".format
) -> list[tuple[str, str]]:
    """Rehearse the first row: chat template, reward, server; the reward on other kinds of rows as well.

    Args:
        config: Configuration of the run.
        rows: Rows of the run.
        where: Gives the location of a row by its index.

    Returns:
        Lines of the plan.

    Raises:
        InputError: something that the run needs does not work; in one sentence.
    """
    row = next(iter(rows), None)
    found = [("server's program", _program(config))] if config.rollout.backend in _PROGRAMS else []
    if row is None:
        return found
    if config.model.path is not None:
        found.append(("chat template", _tokens(config, row)))
    served = [name for name, part in config.reward.parts.items() if part.kind in ("judge", "classifier", "loop")]
    if not served and (config.reward.path or config.reward.parts or config.agent.loop == "single_turn"):
        complaints = Complaints(is_error=config.data.on_bad_row == "error")
        found.append(("reward tried", asyncio.run(_reward(config.reward, rows, where, complaints))))
        complaints.check(len(rows) - complaints.count, of_all="tried ")
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


_SAMPLE_S = 5.0
"""Seconds for which rows are checked before anything starts; agent workers check the others before the first step."""
_STREAM_SAMPLE = 256


def check_rows(config: Config, datasets: Datasets) -> list[tuple[str, str]]:
    """Check that rows can be asked, in random order: all of a small dataset, else as many as five seconds allow.

    Returns:
        Line of the plan: how many were checked, and how many are left out.

    Raises:
        InputError: rows cannot be used (names five), or the prompts of all are too long.
    """
    if config.model.path is None:  # the small model that is made takes the rows that it learns from
        return []
    complaints, longest = Complaints(is_error=config.data.on_bad_row == "error"), config.data.max_prompt_tokens
    rows, places = list[Row](), list[str]()
    if datasets.stream is not None:
        for index in range(_STREAM_SAMPLE):
            try:
                rows.append(datasets.stream[index])
                places.append(datasets.stream.where(index))
            except DataError as error:
                complaints.add(str(error))
            if datasets.stream.epoch_size is not None:
                break
    order = [(False, index) for index in range(len(datasets.train))]
    order += [(True, index) for index in range(len(datasets.eval))]
    random.Random(config.seed).shuffle(order)
    rows += [(datasets.eval if is_eval else datasets.train)[index] for is_eval, index in order]
    lengths, num_changed = _measured(config, rows, _SAMPLE_S)
    for at, length in enumerate(lengths):
        if not isinstance(length, int):
            place = at - len(places)
            where = places[at] if place < 0 else datasets.where(order[place][1], is_eval=order[place][0])
            complaints.add(f"{where}: {length}")
    fitting = [length for length in lengths if isinstance(length, int)]
    complaints.check(len(fitting), of_all="checked ")
    num_long = sum(length > longest for length in fitting)
    if num_long == len(fitting) == len(rows) and rows:
        raise InputError(
            f"none of {len(rows)} prompts has at most data.max_prompt_tokens={longest} tokens; the shortest has "
            f"{min(fitting)}"
        )
    total = "a stream" if datasets.stream is not None else f"{len(rows):,}"
    told = f"{len(lengths):,} of {total} checked; {num_long:,} have more than data.max_prompt_tokens={longest}"
    bad = f", {complaints.count:,} cannot be used; for example {complaints.first[0]}" if complaints.count else ""
    lines = [("rows", f"{told}{bad}")]
    if num_changed:
        why = "such as of environments without a seed; a rollout whose prompt turns out too long fails and is counted"
        lines.append(("random prompts", f"{num_changed} of {min(_TWICE, len(rows))} differ when made again, {why}"))
    return lines


_TWICE = 8
"""Prompts that are made twice: environments without a seed open anew each time."""


def _measured(config: Config, rows: Sequence[Row], seconds: float) -> tuple[list[int | str], int]:
    """Prompt lengths as their agent loops send them, or why a row cannot be asked, of as many rows as time allows.

    Returns:
        Lengths, and the number of the first `_TWICE` prompts that differ when they are made again.

    Raises:
        InputError: the tokenizer, its chat template or an agent loop cannot be used.
    """
    from rl_trainer.workers.agent import PromptMeter, create_runner

    folder, until = str(config.model.path), time.monotonic() + seconds

    async def measure(tokenizer: Any) -> tuple[list[int | str], int]:
        runner = create_runner(config.agent, cast("Generator", None), tokenizer)  # nothing is generated
        meter = PromptMeter(
            tokenizer,
            folder,
            num_given=config.batch.given,
            max_new_tokens=config.rollout.max_new_tokens,
            teacher=config.teacher,
        )
        found, num_changed = list[int | str](), 0
        try:
            while len(found) < len(rows) and (not found or time.monotonic() < until):
                chunk = rows[len(found) : len(found) + 64]
                prompts = await runner.prompts(chunk)
                if not found:
                    again = await runner.prompts(chunk[:_TWICE])
                    num_changed = sum(one != two for one, two in zip(prompts[:_TWICE], again, strict=True))
                found += map(meter.length, chunk, prompts)
        finally:
            await runner.close()
        return found, num_changed

    try:
        return asyncio.run(measure(rl_agent.load_tokenizer(folder)))
    except (AgentError, ValueError, OSError) as error:
        told = str(error).splitlines()[0]
        raise InputError(f"prompts cannot be made by the tokenizer of model.path={folder}: {told}") from error


def _tokens(config: Config, row: Row) -> str:
    ((length,), _), longest = _measured(config, [row], _SAMPLE_S), config.data.max_prompt_tokens
    if not isinstance(length, int):
        raise InputError(f"the first row cannot be used: {length}")
    told = f"the first prompt has {length} tokens"
    return told if length <= longest else f"{told}, more than data.max_prompt_tokens={longest}: it would be left out"


_MOST_KINDS = 64
"""Kinds of rows on which a reward is tried."""


def _first_of_kinds(rows: Sequence[Row]) -> list[int]:
    """Index of the first row of each kind: rows whose fields have the same names and types, from one data source."""
    found: dict[object, int] = {}
    for index, row in enumerate(rows):
        nested = {name: type(value) for part in ("reward_model", "extra_info") for name, value in _fields(row, part)}
        kind = (row["data_source"], *({name: type(value) for name, value in row.items()} | nested).items())
        found.setdefault(frozenset(kind), index)
    return list(found.values())[:_MOST_KINDS]


def _fields(row: Row, name: str) -> Iterable[tuple[str, Any]]:
    part = row.get(name)
    return ((f"{name}.{each}", value) for each, value in part.items()) if isinstance(part, dict) else ()


async def _reward(
    section: RewardSection, rows: Sequence[Row], where: Callable[[int], str], complaints: Complaints
) -> str:
    first, *others = _first_of_kinds(rows)
    row = rows[first]
    truth = row["reward_model"].get("ground_truth")
    texts = {"a made-up completion": _MADE_UP} | ({} if truth is None else {"the ground truth": str(truth)})
    scorer, told = Scorer(section), list[str]()
    try:
        await scorer.start()
        for what, text in texts.items():
            told.append(f"{what} {await _scored(scorer, text, row)}")
        if not told[0].endswith(")"):  # a reward that refuses made-up texts says nothing about rows by that
            for index in others:
                try:
                    await scorer.score(_MADE_UP, rows[index])
                except (RewardError, TimeoutError) as error:
                    complaints.add(f"{where(index)}: the reward cannot be used: {error}")
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
