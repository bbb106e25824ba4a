"""What a refusal advises, applied to what it refuses, is accepted."""

import asyncio
import re
import tomllib
from pathlib import Path

import pytest

import rl_agent
from rl_agent import AgentLoop, AgentRunner, FailureError, Grader, RowError, SandboxLimits, create_loop
from rl_agent.errors import OutputError, ToolDefinitionError
from rl_agent.proxy import RecordingProxy
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_agent.tools.base import FunctionTool
from rl_agent.types import Failure

PACKAGE = Path(rl_agent.__file__).parent
PROMPT = {"prompt": [{"role": "user", "content": "q"}]}


def add(a: int) -> int:
    """Add."""
    return a


def bare(a) -> int:
    """Add."""
    return a


def loop(name, **options):
    return create_loop(name, FakeGenerator(), FakeTokenizer(), **options)


def prompt_of(row, **options):
    return asyncio.run(loop("tool", **options).prompt(row))


ADVICE = {
    "tools, by the loop": (
        lambda: prompt_of(PROMPT),
        RowError,
        "give the loop some",
        lambda: prompt_of(PROMPT, tools=[add]),
    ),
    "tools, by the row": (
        lambda: prompt_of(PROMPT),
        RowError,
        "or name them in the row's field 'tools'",
        lambda: prompt_of({**PROMPT, "tools": ["calculator"]}),
    ),
    "a type": (lambda: FunctionTool(bare), ToolDefinitionError, "give it a type", lambda: FunctionTool(add)),
    "a token": (
        lambda: RecordingProxy(FakeGenerator(), FakeTokenizer(), host="0.0.0.0"),
        ValueError,
        "set api_token, or use 127.0.0.1",
        lambda: RecordingProxy(FakeGenerator(), FakeTokenizer(), host="0.0.0.0", api_token="x"),
    ),
    "an address": (
        lambda: RecordingProxy(FakeGenerator(), FakeTokenizer(), host="0.0.0.0"),
        ValueError,
        "set api_token, or use 127.0.0.1",
        lambda: RecordingProxy(FakeGenerator(), FakeTokenizer(), host="127.0.0.1"),
    ),
    "memory": (
        lambda: Grader(limits=SandboxLimits(memory_bytes=1 << 20)),
        ValueError,
        r"memory_bytes=1048576 must be at least (\d+)",
        lambda: Grader(limits=SandboxLimits(memory_bytes=least_memory())),
    ),
    "workers": (lambda: Grader(num_workers=0), ValueError, "must be positive", lambda: Grader(num_workers=1)),
    "turns": (lambda: loop("gym", max_turns=0), ValueError, "must be positive", lambda: loop("gym", max_turns=1)),
}


def least_memory():
    """The number that the refusal names."""
    with pytest.raises(ValueError, match="at least") as error:
        Grader(limits=SandboxLimits(memory_bytes=1 << 20))
    return int(re.search(r"at least (\d+)", str(error.value))[1])


@pytest.mark.parametrize("name", ADVICE)
def test_advice_is_accepted(name):
    refused, kind, words, followed = ADVICE[name]
    with pytest.raises(kind, match=words):
        refused()
    followed()


def test_a_loop_without_a_trajectory_may_fail_its_rollout():
    class Empty(AgentLoop):
        async def run(self, sampling_params, row):
            return []

    class Failing(AgentLoop):
        async def run(self, sampling_params, row):
            raise FailureError(Failure(kind="loop", stage="x", message="none", is_retryable=False))

    async def run(kind):
        runner = AgentRunner(lambda _: kind(FakeGenerator(), FakeTokenizer()))
        return [result async for result in runner.run([PROMPT], {})]

    with pytest.raises(OutputError, match="give one, or raise FailureError to fail the rollout"):
        asyncio.run(run(Empty))
    (result,) = asyncio.run(run(Failing))
    assert result.outputs.message == "none"


@pytest.mark.parametrize("folder", ["agent", "engine", "rollout", "ckpt", "tq", "trainer"])
def test_extras_in_pip_lines_exist(folder):
    packages = PACKAGE.parents[2]
    if packages.name != "packages":
        pytest.skip("the sources are not here")
    for file in (packages / folder / "src").rglob("*.py"):
        for name, extra in re.findall(r"pip install '(rl-[a-z-]+)\[([\w,-]+)\]'", file.read_text()):
            home = {"rl-post-trainer": "trainer"}.get(name, name.removeprefix("rl-"))
            known = tomllib.loads((packages / home / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert {*extra.split(",")} <= known.keys(), (file, name, extra)
