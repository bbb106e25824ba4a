"""Checks of rows before the start: prompts are made, ground truths read and rewards tried, as far as seconds allow.

Agent workers measure every prompt, and look at its ground truth, before the first step; rewards are tried on the kinds
of rows that are left while the workers start.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import rl_agent.registry
from rl_agent.base import Policy
from rl_agent.errors import AgentError, LoopError, PluginError
from rl_trainer.data.datasets import Complaints
from rl_trainer.errors import DataError, InputError, RewardError
from rl_trainer.pipeline.roles import policies_of
from rl_trainer.rewards import Scorer
from rl_trainer.rewards.scorer import SERVED, needs_parser, unusable_truth
from rl_trainer.workers.agent import PromptMeter, create_runner

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from rl_agent.base import Generator as Server
    from rl_agent.base import PromptTokenizer
    from rl_trainer.config import Config
    from rl_trainer.config.schema import RewardSection
    from rl_trainer.data import Datasets
    from rl_trainer.data.datasets import StreamedRows
    from rl_trainer.data.rows import Row

_SAMPLE_S, _REST_S = 5.0, 30.0
"""Seconds to measure prompts, and again to try rewards, before the start; and to try rewards while workers start."""
_STREAM_SAMPLE = 256
_CHUNK = 64
_TWICE = 8
"""Prompts that are made twice: environments without a seed open anew each time."""
_MADE_UP = "I do not know."


class RowCheck:
    """Check of a run's rows, in random order: of a small dataset all, else as many as `_SAMPLE_S` allows.

    Of a stream the first `_STREAM_SAMPLE` are checked. Without `takes_videos` videos are frames, each an image.
    """

    def __init__(self, config: Config, datasets: Datasets, *, takes_videos: bool = False) -> None:
        self._config, self._datasets, self._takes_videos = config, datasets, takes_videos
        self._complaints = Complaints(is_error=config.data.on_bad_row == "error")
        order = [(False, index) for index in range(len(datasets.train))]
        order += [(True, index) for index in range(len(datasets.eval))]
        rest = order[1:]
        random.Random(config.seed).shuffle(rest)
        self._rows: list[Row] = []
        self._places: list[str] = []
        if datasets.stream is not None:
            self._read(datasets.stream)
        self._rows += [(datasets.eval if is_eval else datasets.train)[index] for is_eval, index in (*order[:1], *rest)]
        self._places += [datasets.where(index, is_eval=is_eval) for is_eval, index in (*order[:1], *rest)]
        self._is_by_source = config.agent.loop == "single_turn"
        self._reward = _tried_part(config.reward, is_by_source=self._is_by_source)
        self._kinds = set[object]()
        self._num_tried, self._says_little = 0, False
        self._num_checked = 0
        self._scores = list[str]()
        self._is_ended = False

    def _read(self, stream: StreamedRows) -> None:
        for index in range(_STREAM_SAMPLE):
            try:
                self._rows.append(stream[index])
                self._places.append(stream.where(index))
            except DataError as error:
                self._complaints.add(str(error))
            if stream.epoch_size is not None:
                return

    def sample(self) -> list[tuple[str, str]]:
        """Check rows for `_SAMPLE_S`, and all of them if that suffices.

        Returns:
            Lines of the plan: how many were checked, how many cannot be used, and what the reward gave.

        Raises:
            InputError: rows cannot be used (names five), or the prompts of all are too long.
        """
        if not self._rows:
            return []
        lines = list[tuple[str, str]]()
        if self._config.model.path is not None:  # the small model that is made takes the rows that it learns from
            lines = self._measure(time.monotonic() + _SAMPLE_S)
        asyncio.run(self._try(_SAMPLE_S))
        self._complaints.check(max(self._num_checked, self._num_tried) - self._complaints.count, of_all="checked ")
        if self._scores:
            lines.append(("reward tried", ", ".join(self._scores)))
        if self._complaints.count:
            lines.append(
                ("rows not usable", f"{self._complaints.count:,}, left out; for example {self._complaints.first[0]}")
            )
        return lines

    @contextmanager
    def going_on(self) -> Generator[None]:
        """Run `rest` on a thread while the body starts the workers; an error of the body ends it."""
        errors = list[Exception]()

        def work() -> None:
            try:
                self.rest()
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)

        thread = threading.Thread(target=work, name="rows", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:  # a reward that hangs must not delay the error
            self._is_ended = True
            raise
        thread.join()
        if errors:
            raise errors[0]

    def rest(self) -> None:
        """Try the reward on the kinds of rows that the sample did not reach, for `_REST_S`.

        Raises:
            DataError: it cannot score one; names five such rows.
        """
        if self._num_tried == len(self._rows):
            return
        asyncio.run(self._try(_REST_S))
        self._complaints.check(self._num_tried - self._complaints.count, of_all="checked ")

    def _measure(self, until: float) -> list[tuple[str, str]]:
        longest, total = self._config.data.max_prompt_tokens, len(self._rows)
        lengths, num_changed = self._lengths(until)
        for at, length in enumerate(lengths):
            if not isinstance(length, int):
                self._complaints.add(f"{self._places[at]}: {length}")
        fitting = [length for length in lengths if isinstance(length, int)]
        self._num_checked = len(lengths)
        self._complaints.check(len(fitting), of_all="checked ")
        num_long = sum(length > longest for length in fitting)
        if num_long == len(fitting) == total:
            raise InputError(
                f"none of {total} prompts has at most data.max_prompt_tokens={longest} tokens; the shortest has "
                f"{min(fitting)}"
            )
        of_all = "a stream" if self._datasets.stream is not None else f"{total:,}"
        first = f"; the first prompt has {lengths[0]} tokens" if isinstance(lengths[0], int) else ""
        said = f"{len(lengths):,} of {of_all} checked; {num_long:,} have more than data.max_prompt_tokens={longest}"
        lines = [("rows", f"{said}{first}")]
        if num_changed:
            why = "as of environments without a seed; a rollout whose prompt turns out too long fails and is counted"
            lines.append(("random prompts", f"{num_changed} of {min(_TWICE, total)} differ when made again, {why}"))
        return lines

    def _lengths(self, until: float) -> tuple[list[int | str], int]:
        """Prompt lengths as agent loops send them, or why a row cannot be used, of as many rows as time allows.

        Returns:
            Lengths, and the number of the first `_TWICE` prompts that differ when they are made again.

        Raises:
            InputError: the tokenizer, its chat template or an agent loop cannot be used.
        """
        config, takes_videos = self._config, self._takes_videos
        folder, make = str(config.model.path), rl_agent.registry.create_tokenizer

        async def measure() -> tuple[list[int | str], int]:
            paths = {name: str(own.model.path) for name, own in policies_of(config).items()}
            nothing = cast("Server", None)  # nothing is generated
            policies = {name: Policy(nothing, make(path, takes_videos=takes_videos)) for name, path in paths.items()}
            runner = create_runner(config.agent, policies)
            meter = PromptMeter(cast("PromptTokenizer", next(iter(policies.values())).tokenizer), config, folder)
            found, num_changed = list[int | str](), 0
            try:
                while len(found) < len(self._rows) and (not found or time.monotonic() < until):
                    chunk = self._rows[len(found) : len(found) + _CHUNK]
                    prompts = await runner.prompts(chunk)
                    if not found:
                        again = await runner.prompts(chunk[:_TWICE])
                        num_changed = sum(one != two for one, two in zip(prompts[:_TWICE], again, strict=True))
                    found += map(meter.length, chunk, prompts)
            finally:
                await runner.close()
            return found, num_changed

        try:
            return asyncio.run(measure())
        except (LoopError, PluginError) as error:
            raise InputError(f"agent.loop={self._config.agent.loop} cannot be made: {error}") from error
        except (AgentError, ValueError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"prompts cannot be made by the tokenizer of model.path={folder}: {reason}") from error

    async def _try(self, seconds: float) -> None:
        """Try the reward on a row of each kind, from where the last call ended; the start of its process is extra.

        Raises:
            InputError: it cannot be loaded, or called.
        """
        section = self._reward
        scorer = None if section is None else Scorer(section)
        try:
            if scorer is not None and not self._num_tried:
                await scorer.start()
            until = time.monotonic() + seconds
            while self._num_tried < len(self._rows) and (not self._num_tried or time.monotonic() < until):
                if self._is_ended:
                    return
                at, row = self._num_tried, self._rows[self._num_tried]
                self._num_tried += 1
                if (why := unusable_truth(self._config.reward, row, is_by_source=self._is_by_source)) is not None:
                    if at >= self._num_checked:
                        self._complaints.add(f"{self._places[at]}: {why}")
                elif scorer is not None and (kind := _kind(scorer.section, row)) not in self._kinds:
                    self._kinds.add(kind)
                    await self._score(scorer, at, row)
        except (RewardError, OSError) as error:
            raise InputError(f"the reward cannot be used: {error}") from error
        finally:
            if scorer is not None:
                await scorer.close()

    async def _score(self, scorer: Scorer, at: int, row: Row) -> None:
        if not self._scores:
            truth = row["reward_model"].get("ground_truth")
            texts = {"a made-up completion": _MADE_UP} | ({} if truth is None else {"the ground truth": str(truth)})
            for what, text in texts.items():
                score = await _scored(scorer, text, row)
                self._scores.append(f"{what} {score}")
            self._says_little = "no score" in self._scores[0]  # a reward that refuses made-up texts
        elif not self._says_little:
            try:
                await scorer.score(_MADE_UP, row)
            except (RewardError, TimeoutError) as error:
                self._complaints.add(f"{self._places[at]}: the reward cannot be used: {error}")


def _tried_part(section: RewardSection, *, is_by_source: bool) -> RewardSection | None:
    """The part of the reward that can be tried before servers are there; None if nothing is left."""
    if section.path is not None:
        return section
    if section.parts:
        parts = {name: part for name, part in section.parts.items() if part.kind not in SERVED}
        return replace(section, parts=parts) if parts else None
    return section if is_by_source else None


def _kind(section: RewardSection, row: Row) -> object:
    """Kind of a row: the names and types of its fields and its data source, and a ground truth that is parsed."""
    nested = {name: type(value) for part in ("reward_model", "extra_info") for name, value in _fields(row, part)}
    types = {name: type(value) for name, value in row.items()} | nested
    truth = str(row["reward_model"].get("ground_truth")) if needs_parser(section, row) else None
    return frozenset((row["data_source"], truth, *types.items()))


def _fields(row: Row, name: str) -> Iterable[tuple[str, Any]]:
    part = row.get(name)
    return ((f"{name}.{each}", value) for each, value in part.items()) if isinstance(part, dict) else ()


async def _scored(scorer: Scorer, text: str, row: Row) -> str:
    try:
        return f"{(await scorer.score(text, row)).reward:g}"
    except RewardError as error:  # a function may refuse a text: that is no score, and no mistake
        if "TypeError" in str(error):
            raise
        return f"no score ({error})"
    except TimeoutError as error:
        raise RewardError(str(error)) from error
