"""Rewards and the tool `python` in a sandbox of every kind."""

import asyncio
import json

import pytest

from rl_agent.errors import SandboxError, ToolError
from rl_agent.loops.tool import ToolLoop
from rl_agent.registry import check_sandboxes, create_grader
from rl_agent.sandbox.base import run_program
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_agent.tools.python import PythonTool
from rl_agent.types import SandboxLimits

pytestmark = pytest.mark.process

TOKENIZER = FakeTokenizer()
LIMITS = SandboxLimits(timeout_s=20, memory_bytes=1 << 29, output_bytes=1000, file_bytes=1 << 22)


@pytest.fixture
def graded(with_kind):
    """Call a coroutine function with a grader in sandboxes of the kind, and return what it returns."""

    def call(use):
        async def made(given):
            grader = create_grader(num_workers=2, limits=LIMITS, sandbox=given)
            try:
                async with asyncio.timeout(200):
                    return await use(grader)
            finally:
                await grader.close()

        return with_kind(made, is_made=False)

    return call


def test_a_run_has_its_input_and_says_how_it_ended(graded):
    codes = {
        "print(input()[::-1])\n1 + 2": ("ok", "olleh\n3\n", ""),
        "import sys; print('no', file=sys.stderr); sys.exit(3)": ("error", "no\n", "SystemExit: 3"),
        "def f():\n    1 / 0\nf()": ("error", "", "line 3, in <module>\nline 2, in f\nZeroDivisionError"),
        "import os; os._exit(0)": ("died", "", "the process ended by itself"),
        "print('x' * 5000)": ("ok", "x" * 1000, ""),
    }

    async def use(grader):
        return [await grader.run(code, "hello") for code in codes]

    for result, (kind, output, error) in zip(graded(use), codes.values(), strict=True):
        assert (result.kind, result.output) == (kind, output)
        assert error in result.error


def test_what_hangs_and_what_floods_is_ended(graded):
    async def use(grader):
        hung = await grader.run("import threading; threading.Event().wait()", timeout_s=2)
        return hung, await grader.run("while True: print('x' * 100)")

    hung, flood = graded(use)
    assert (hung.kind, hung.error) == ("timeout", "no end within 2 s")
    assert flood.kind in ("output", "died", "memory")
    assert len(flood.output) <= 1000


@pytest.mark.promise("Rewards and the tool python run code in a sandbox of every kind")
def test_a_run_without_its_connection_ends_in_time(graded):
    """Code that closes every file and runs on has its own deadline, and not that of a start."""
    code = "import os, threading\nos.closerange(3, 64)\nthreading.Event().wait()"

    async def use(grader):
        return await grader.run(code, timeout_s=2)

    result = graded(use)
    assert result.kind in ("died", "timeout")
    assert result.wall_s < 30


def test_tests_decide_and_are_not_seen(graded):
    """The test runs here; the solution's process has its own code alone."""
    test = "from solution import twice\nassert twice(4) == 8 and twice('ab') == 'abab'"
    codes = {
        "def twice(x): return 2 * x": "ok",
        "def twice(x): return x": "error",
        "import os\ndef twice(x): os._exit(0)": "error",
        "import gc\ndef twice(x): return next(o for o in gc.get_objects() if 'abab' in str(o))": "error",
        "def twice(x): raise SystemExit(0)": "error",
        "def twice(x):\n    while True: pass": "timeout",
    }

    async def use(grader):
        return [await grader.judge(code, test, timeout_s=3) for code in codes]

    found = graded(use)
    assert [each.kind for each in found] == [*codes.values()], found


def test_the_variables_of_a_session_last(graded):
    async def use(grader):
        tool = PythonTool(pool=grader)
        said = [await tool.call({"code": code}, "a") for code in ("x = 6", "x * 7", "import os; print(os.getcwd())")]
        with pytest.raises(ToolError, match="name 'x' is not defined"):
            await tool.call({"code": "x"}, "b")
        with pytest.raises(ToolError, match="the process ended by itself; the variables are lost"):
            await tool.call({"code": "os._exit(1)"}, "a")
        with pytest.raises(ToolError, match="name 'x' is not defined"):
            await tool.call({"code": "x"}, "a")
        await tool.end_session("a")
        await tool.end_session("b")
        return said

    said = graded(use)
    assert said[:2] == ["", "42"]


def test_the_loop_gives_its_tool_the_sandbox(with_kind):
    call = json.dumps({"name": "python", "arguments": {"code": "6 * 7"}})
    turns = iter((f"<tool_call>{call}</tool_call>", "done"))

    async def use(sandbox):
        assert str(await asyncio.to_thread(check_sandboxes, "tool", {"tools": ["python"], "sandbox": sandbox}))
        server = FakeGenerator(lambda _: [*TOKENIZER.encode(next(turns)), 1])
        loop = ToolLoop(server, TOKENIZER, tools=["python"], sandbox=sandbox, tool_timeout_s=60)
        try:
            return await loop.run({"max_new_tokens": 500}, {"prompt": [{"role": "user", "content": "6 * 7?"}]})
        finally:
            await loop.close()

    output = with_kind(use, is_made=False)
    assert "\n42<" in TOKENIZER.decode(output.completion_token_ids)
    assert output.metrics["num_tool_error"] == 0


@pytest.mark.parametrize(
    ("sandbox", "said"),
    [
        ({"kind": "bubblewrap", "network": "none"}, "gets its code from this process, which network=none shuts off"),
        ({"kind": "podman", "network": "none"}, "gets its code from this process, which network=none shuts off"),
        ("docker", "no sandbox 'docker' is installed"),
        ({"kind": "process", "image": "x"}, "sandbox process has no image 'x'"),
        ({"kind": "http"}, "needs the URL of its server"),
    ],
)
def test_a_sandbox_without_a_way_for_code_is_refused(sandbox, said):
    with pytest.raises(SandboxError, match=said):
        create_grader(sandbox=sandbox)
    with pytest.raises(SandboxError, match=said):
        check_sandboxes("tool", {"sandbox": sandbox})


def test_needs_are_those_of_kind_process():
    with pytest.raises(SandboxError, match="sandbox bubblewrap has no 'needs'"):
        create_grader(sandbox="bubblewrap", needs=["network"])


def test_a_program_that_floods_its_pipe_is_waited_for():
    """Killed with output that nobody has read, which a pipe that is paused never says."""

    async def main():
        async with asyncio.timeout(60):
            return [
                await run_program(["yes"], limits=SandboxLimits(timeout_s=30, output_bytes=10, file_bytes=1))
                for _ in range(5)
            ]

    assert {(each.kind, each.output) for each in asyncio.run(main())} == {("output", "y\n" * 5)}
