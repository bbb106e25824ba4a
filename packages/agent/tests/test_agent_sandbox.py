"""The grader and the Python tool, with real processes."""

import asyncio
import json
import os
import socket

import pytest

from rl_agent import FailureError, Grader, SandboxError, SandboxLimits, _sandbox
from rl_agent.loops.tool import ToolLoop
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_agent.tools.python import PythonTool

LIMITS = SandboxLimits(timeout_s=30, memory_bytes=1 << 28, output_bytes=1000, file_bytes=100_000)


def grade(*codes, stdin="", timeout_s=None, **settings):
    async def main():
        grader = Grader(**{"num_workers": 1, "limits": LIMITS, **settings})
        try:
            return [await grader.run(code, stdin, timeout_s=timeout_s) for code in codes], grader
        finally:
            await grader.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "kind", "output", "error"),
    [
        ("print(input()[::-1])\n1 + 2", "ok", "olleh\n3\n", ""),
        ("import sys; print('no', file=sys.stderr); sys.exit(3)", "error", "no\n", "SystemExit: 3"),
        ("def f():\n    1 / 0\nf()", "error", "", "line 3, in <module>\nline 2, in f\nZeroDivisionError"),
        ("1 +", "error", "", "SyntaxError: invalid syntax"),
        ("x = bytearray(1 << 30)", "memory", "", "MemoryError: the memory limit was reached"),
        ("import os; os._exit(0)", "died", "", "the process ended by itself"),
        ("import os; os.kill(os.getpid(), 11)", "died", "", "the process was killed by signal 11"),
        ("import os; os.system('echo from a child')\nNone", "ok", "from a child\n", ""),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "error", "", "not allowed to raise maximum limit"),
        ("import os; sorted(os.environ)", "ok", "['LANG', 'PATH']\n", ""),
    ],
)  # fmt: skip
def test_a_run_ends_as_what_it_is(code, kind, output, error):
    ((result,), _) = grade(code, stdin="hello")
    assert (result.kind, result.output) == (kind, output)
    assert error in result.error


def test_a_flood_is_bounded():
    ((result,), _) = grade("while True: print('x' * 100)")
    assert (result.kind, len(result.output), result.num_output_bytes) == ("output", 1000, 100_000)


def test_runs_do_not_see_one_another_and_the_process_stays_warm():
    (results, _) = grade("import os; x = 1; os.getppid()", "import os; print('x' in globals()); os.getppid()")
    assert results[1].output.splitlines() == ["False", results[0].output.strip()]


def test_a_run_past_its_deadline_is_killed_with_its_children():
    code = "import os, time\nprint(os.getpid(), flush=True)\nos.fork()\ntime.sleep(3600)"

    async def main():
        grader = Grader(num_workers=1, limits=LIMITS)
        late = await grader.run(code, timeout_s=0.5)
        again = await grader.run("2 + 2")
        await grader.close()
        return late, again

    late, again = asyncio.run(main())
    assert (late.kind, late.error) == ("timeout", "no end within 0.5 s")
    assert (again.kind, again.output) == ("ok", "4\n")


def test_results_are_kept_by_code_and_input_and_timeouts_are_not():
    results, grader = grade("1", "1", "2")
    assert grader.num_cache_hits == 1
    assert results[0] is results[1]
    results, grader = grade(*["while 1: pass"] * 2, timeout_s=0.2)
    assert [result.kind for result in results] == ["timeout", "timeout"]
    assert grader.num_cache_hits == 0


def test_runs_wait_for_a_process_and_too_many_fail_at_once():
    async def main():
        grader = Grader(num_workers=1, limits=LIMITS, max_waiting=2)
        runs = [asyncio.create_task(grader.run(f"import time; time.sleep(0.2); {i}")) for i in range(4)]
        results = await asyncio.gather(*runs, return_exceptions=True)
        await grader.close()
        return results

    results = asyncio.run(main())
    failed = [result for result in results if isinstance(result, FailureError)]
    assert [result.failure.kind for result in failed] == ["grader"]
    assert failed[0].failure.is_retryable
    assert sum(getattr(result, "kind", "") == "ok" for result in results) == 3


def test_there_is_no_network_where_the_kernel_permits():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ((result,), grader) = grade(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); 'in'")
    assert grader.is_offline in (True, False)
    assert result.output == ("" if grader.is_offline else "'in'\n")


def test_where_network_cannot_be_denied_and_has_to_be_nothing_runs(monkeypatch):
    start = _sandbox.Worker.start
    monkeypatch.setattr(_sandbox.Worker, "start", lambda limits, deny_network: start(limits, deny_network=False))
    with pytest.raises(SandboxError, match="network cannot be denied"):
        grade("1", needs_offline=True)


def test_too_little_memory_for_python_is_told():
    with pytest.raises(ValueError, match="memory_bytes=1000 must be at least 67108864"):
        grade("1", limits=SandboxLimits(memory_bytes=1000))


def call(code):
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def answers_of(turns, *, num_rollouts, timeout_s):
    """What the Python tool says to each of the turns' code, per rollout; the rollouts run at the same time."""
    tokenizer = FakeTokenizer()

    def reply(request):
        step = tokenizer.decode(request.prompt_token_ids).count("<|im_start|>tool")
        return [*tokenizer.encode(call(turns[step]) if step < len(turns) else "done"), 1]

    async def main():
        tool = PythonTool(limits=SandboxLimits(timeout_s=timeout_s), max_sessions=2)
        loop = ToolLoop(FakeGenerator(reply), tokenizer, tools=[tool], tool_timeout_s=120)
        row = {"prompt": [{"role": "user", "content": "go"}]}
        outputs = await asyncio.gather(*(loop.run({"max_new_tokens": 4096}, **row) for _ in range(num_rollouts)))
        assert not tool._sessions
        await loop.close()
        return outputs

    for output in asyncio.run(main()):
        pairs = zip(output.completion_token_ids, output.loss_mask, strict=True)
        context = tokenizer.decode([i for i, m in pairs if not m])
        yield [part.partition("<|im_end|>")[0] for part in context.split("<|im_start|>tool\n")[1:]]


def test_the_python_tool_keeps_variables_within_a_trajectory_only():
    turns = ["'x' in globals()", "x = 6", "x * 7", "1 / 0", "__import__('os')._exit(0)", "x"]
    for answers in answers_of(turns, num_rollouts=3, timeout_s=60.0):
        assert answers == [
            "False",
            "",
            "42",
            "error: line 1, in <module>\nZeroDivisionError: division by zero",
            "error: the process ended by itself; the variables are lost",
            "error: line 1, in <module>\nNameError: name 'x' is not defined",
        ]


def test_calls_of_one_turn_run_one_after_the_other_in_one_process():
    async def main():
        tool = PythonTool(limits=SandboxLimits(timeout_s=60.0), max_sessions=1)
        codes = ["x = 1", "x += 1; x", "x += 1; x"]
        answers = await asyncio.gather(*(tool.call({"code": code}, "one") for code in codes))
        await tool.end_session("one")
        assert not tool._locks
        await tool.close()
        return answers

    assert asyncio.run(main()) == ["", "2", "3"]


def test_code_that_hangs_is_killed_and_the_model_told():
    ((answer,),) = answers_of(["while True: pass"], num_rollouts=1, timeout_s=0.5)
    assert answer == "error: no end within 0.5 s; the variables are lost"


def test_no_process_is_left():
    async def main():
        grader = Grader(num_workers=2, limits=LIMITS)
        result = await grader.run("import os; os.getppid()")
        await grader.close()
        return int(result.output)

    pid = asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
