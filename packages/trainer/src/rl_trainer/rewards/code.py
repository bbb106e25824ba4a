"""The rule `code`: what the policy wrote is run in a sandbox, against the tests of its row."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field

import rl_agent
from rl_trainer.errors import RewardError

if TYPE_CHECKING:
    from rl_trainer.config import AgentSection, RewardSection

_OUTPUT_BYTES = 1 << 24
"""Bytes of output that are compared: as many as a file may have."""
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class CodeTests:
    """Code reward: 1 if the last fenced block of a completion passes its row's tests, else 0.

    The row's ground truth is Python that asserts, or a list of such texts; or `{"inputs": [...], "outputs": [...]}`,
    text for standard input and what has to be printed, spaces at the ends of lines aside (as JSON text too). What is
    expected is never in the process that runs the code: printed text is compared here, and assertions run in a process
    of their own, which calls the code's functions and gets plain values back (`rl_agent.Grader.judge`). Every test has
    its own processes, which end at their limits; a test that does not come to its end has not passed, however it ends.
    Code is shut off from network and files where the kernel permits: see `rl_agent.Grader`.

    Args:
        num_workers: Tests that run at a time.
        timeout_s: Deadline of one test, seconds.
        memory_mb: Memory of one test, all its processes together, MiB.
        is_partial: Give the share of the tests that pass.
        needs: Isolation that is required; without it there is no score.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        timeout_s: Annotated[float, Field(gt=0)] = 10.0,
        memory_mb: Annotated[int, Field(ge=64)] = 1024,
        is_partial: bool = False,
        needs: Sequence[Literal["network", "files", "processes"]] = (),
    ) -> None:
        limits = rl_agent.SandboxLimits(timeout_s=timeout_s, memory_bytes=memory_mb << 20, output_bytes=_OUTPUT_BYTES)
        self._grader = rl_agent.Grader(num_workers=num_workers, limits=limits, max_waiting=1 << 20, needs=needs)
        self._is_partial = is_partial

    async def start(self) -> None:
        """Start a sandbox process now, so that a machine without sandboxes fails before anything is generated.

        Raises:
            SandboxError: none can be started, or shut off as asked.
        """
        await self._grader.check()

    async def call(self, text: str, row: Mapping[str, Any]) -> float:
        """The score.

        Raises:
            RewardError: the row has no tests that can be read.
            SandboxError, FailureError: the tests could not be run.
        """
        tests, blocks = _tests_of(row), _FENCE.findall(text)
        if not blocks:
            return 0.0
        num_passed = 0
        for given, expected in tests:
            if await self._passes(blocks[-1], given, expected):
                num_passed += 1
            elif not self._is_partial:
                return 0.0
        return num_passed / len(tests)

    async def _passes(self, code: str, given: str, expected: str | None) -> bool:
        if expected is not None:
            result = await self._grader.run(f"{code}\npass", given)  # or a value in the last line would be printed
            return result.kind == "ok" and _plain(result.output) == _plain(expected)
        return (await self._grader.judge(code, given)).kind == "ok"

    async def close(self) -> None:
        """End the processes."""
        await self._grader.close()


def sandbox_facts(reward: RewardSection, agent: AgentSection) -> list[tuple[str, str]]:
    """Sandbox limits on this machine, as lines of the plan; empty where no code of the policy runs.

    Raises:
        SandboxError: no process for code can be started.
    """
    is_graded = any(part.rule == "code" for part in reward.parts.values())
    if not is_graded and agent.loop != "swe" and "python" not in agent.options.get("tools", ()):
        return []

    async def check() -> rl_agent.SandboxReport:
        grader = rl_agent.Grader(num_workers=1)
        try:
            return await grader.check()
        finally:
            await grader.close()

    return [("code", f"on this machine, {asyncio.run(check())}")]


def _tests_of(row: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Tests of a row: `(input, expected output)`, or `(asserting code, None)`."""
    truth: Any = row["reward_model"]["ground_truth"]
    if isinstance(truth, str) and truth.lstrip().startswith(("{", "[")):
        with contextlib.suppress(ValueError):  # it is code
            truth = json.loads(truth)
    if isinstance(truth, str) and truth.strip():
        return [(truth, None)]
    if isinstance(truth, Mapping):
        named = cast("Mapping[str, Any]", truth)
        inputs, outputs = _texts(named.get("inputs")), _texts(named.get("outputs"))
        if inputs and outputs and len(inputs) == len(outputs):
            return list(zip(inputs, outputs, strict=True))
    elif texts := _texts(truth):
        return [(text, None) for text in texts]
    raise RewardError(
        f"the ground truth of a row of {row['data_source']!r} is {truth!r:.80}; the rule code needs Python that "
        "asserts, a list of such texts, or {'inputs': [...], 'outputs': [...]} of as many texts each"
    )


def _texts(value: Any) -> list[str] | None:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    texts: list[Any] = list(cast("Sequence[Any]", value)) if is_list else []
    return texts if texts and all(isinstance(text, str) for text in texts) else None


def _plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
