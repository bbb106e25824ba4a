"""The rule `code`: what the policy wrote is run in a sandbox, against the tests of its row."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field

from rl_agent.errors import SandboxError
from rl_agent.registry import check_sandboxes, create_grader
from rl_agent.types import SandboxLimits
from rl_trainer.errors import InputError, RewardError
from rl_trainer.rewards.completions import code_of

if TYPE_CHECKING:
    from rl_trainer.config.schema import AgentSection, RewardSection

_OUTPUT_BYTES = 1 << 24
"""Bytes of output that are compared: as many as a file may have."""


class CodeTests:
    """Code reward: 1 if the last block of Python in a completion passes its row's tests, else 0.

    The row's ground truth is Python that asserts, or a list of such texts; or `{"inputs": [...], "outputs": [...]}`,
    text for standard input and what has to be printed, spaces at the ends of lines aside; with `fn_name`, JSON of the
    function's arguments, one a line, and of what it returns. Either may be JSON text as a whole. What is
    expected is never in the process that runs the code: printed text is compared here, and assertions run in a process
    of their own, which calls the code's functions and gets plain values back (`CodeGrader.judge`). Every test has
    its own processes, which end at their limits; a test that does not come to its end has not passed, however it ends.
    Code is shut off from network and files where the kernel permits: see `rl_agent.sandbox.Grader`.

    Args:
        num_workers: Tests that run at a time.
        timeout_s: Deadline of one test, seconds.
        memory_mb: Memory of one test, all its processes together, MiB.
        is_partial: Give the share of the tests that pass.
        needs: Isolation that is required; without it there is no score.
        sandbox: Kind of sandboxes that the code runs in, such as podman, or a mapping with `kind` and its options.

    Raises:
        SandboxError: there is no such sandbox, or it cannot do what is asked for.
    """

    max_tests: int | None = None
    """Most tests of a row that are run."""
    code_of = staticmethod(code_of)

    def __init__(
        self,
        num_workers: int,
        *,
        timeout_s: Annotated[float, Field(gt=0)] = 10.0,
        memory_mb: Annotated[int, Field(ge=64)] = 1024,
        is_partial: bool = False,
        needs: Sequence[Literal["network", "files", "processes"]] = (),
        sandbox: str | Mapping[str, Any] = "process",
    ) -> None:
        limits = SandboxLimits(timeout_s=timeout_s, memory_bytes=memory_mb << 20, output_bytes=_OUTPUT_BYTES)
        self._grader = create_grader(
            num_workers=num_workers, limits=limits, max_waiting=1 << 20, needs=needs, sandbox=sandbox
        )
        self._is_partial = is_partial

    async def start(self) -> str:
        """Start a sandbox now, so that a machine without fails before anything is generated; returns what holds in it.

        Raises:
            SandboxError: none can be started, or shut off as asked.
        """
        return str(await self._grader.check())

    async def call(self, text: str, row: Mapping[str, Any]) -> float:
        """The score.

        Raises:
            RewardError: the row has no tests that can be read.
            SandboxError, FailureError: the tests could not be run.
        """
        tests, code = _tests_of(row)[: self.max_tests], self.code_of(text)
        if code is None:
            return 0.0
        num_passed = 0
        for given, expected in tests:
            if await self._passes(code, given, expected):
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


class PrimeCode(CodeTests):
    """Code reward as verl's for `codecontests`, `apps`, `codeforces` and `taco`.

    The share of the first ten tests that pass, of what follows the last ```` ```python ````; a text without a block is
    all code.
    """

    max_tests = 10

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers, is_partial=True)

    @staticmethod
    def code_of(text: str) -> str | None:
        """Code that is run."""
        return text.rpartition("```python")[2].partition("```")[0]


RULES: Mapping[str, type[CodeTests]] = {"code": CodeTests, "verl/prime_code": PrimeCode}
"""Rules that run what the policy wrote, by name."""


def sandbox_facts(reward: RewardSection, agent: AgentSection) -> list[tuple[str, str]]:
    """Sandbox limits on this machine, as lines of the plan; empty where no code of the policy runs.

    Raises:
        InputError: no sandbox can be started as it is asked for.
    """
    lines = list[tuple[str, str]]()
    try:
        if (found := check_sandboxes(agent.loop, agent.options)) is not None:
            lines.append(("sandbox", found))
        given = {repr(part.options): part for part in reward.parts.values() if part.rule in RULES}
        found = {asyncio.run(_report(part.rule, part.options)): None for part in given.values() if part.rule}
        if "python" in agent.options.get("tools", ()) and "sandbox" not in agent.options:
            found[asyncio.run(_report("code", {}))] = None
        lines += [("code", each) for each in found]
    except SandboxError as error:
        raise InputError(str(error)) from error
    return lines


async def _report(rule: str, options: Mapping[str, Any]) -> str:
    tests = RULES[rule](1, **options)
    try:
        said = await tests.start()
        return said if "sandbox" in options else f"on this machine, {said}"
    finally:
        await tests.close()


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
        name = named.get("fn_name")
        inputs, outputs = (_list(named.get(key)) for key in ("inputs", "outputs"))
        if inputs and len(inputs) == len(outputs):
            if name:
                return [(_call(str(name), a, b), None) for a, b in zip(inputs, outputs, strict=True)]
            texts = [(_text(a), _text(b)) for a, b in zip(inputs, outputs, strict=True)]
            if all(text is not None for pair in texts for text in pair):
                return cast("list[tuple[str, str | None]]", texts)
    elif (texts := _list(truth)) and all(isinstance(text, str) for text in texts):
        return [(text, None) for text in texts]
    raise RewardError(
        f"the ground truth of a row of {row['data_source']!r} is {truth!r:.80}; the rule code needs Python that "
        "asserts, a list of such texts, or {'inputs': [...], 'outputs': [...]} of as many texts each"
    )


def _list(value: Any) -> list[Any]:
    return list(cast("Sequence[Any]", value)) if isinstance(value, Sequence) and not isinstance(value, str) else []


def _text(value: Any) -> str | None:
    """Text of an input or output, which may be a list of its lines."""
    lines: list[Any] = [value] if isinstance(value, str) else _list(value)
    return "\n".join(lines) if lines and all(isinstance(line, str) for line in lines) else None


def _call(name: str, given: Any, expected: Any) -> str:
    """Test of a function, or of a method of `class Solution`, with JSON's values; a tuple is a list there."""
    if not name.isidentifier():
        raise RewardError(f"fn_name={name!r:.80} is not the name of a function")
    arguments = f"[{','.join(given.strip().splitlines())}]" if isinstance(given, str) else json.dumps(given)
    wanted = expected if isinstance(expected, str) else json.dumps(expected)
    return f"""import json
def plain(value):
    return [plain(each) for each in value] if type(value) in (list, tuple) else value
try:
    function = Solution().{name}
except NameError:
    function = {name}
found, wanted = plain(function(*json.loads({arguments!r}))), json.loads({wanted!r})
assert found == wanted or (type(wanted) is list and len(wanted) == 1 and found == wanted[0])
"""


def _plain(text: str) -> list[str]:
    return [line.rstrip() for line in re.split(r"\r\n|\r|\n", text.rstrip())]
