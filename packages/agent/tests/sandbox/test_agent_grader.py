"""The grader and the Python tool, with real processes."""

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest

from rl_agent import Grader, SandboxError, SandboxLimits
from rl_agent.loops.tool import ToolLoop
from rl_agent.sandbox import worker as workers
from rl_agent.sandbox.process import filters
from rl_agent.sandbox.process.isolation import descendants
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_agent.tools.python import PythonTool
from rl_bench.waiting import until_async

LIMITS = SandboxLimits(timeout_s=30, memory_bytes=1 << 28, output_bytes=1000, file_bytes=100_000)


def grade(*codes, stdin="", timeout_s=None, **settings):
    async def main():
        grader = Grader(**{"num_workers": 1, "limits": LIMITS, **settings})
        try:
            return [await grader.run(code, stdin, timeout_s=timeout_s) for code in codes], grader
        finally:
            await grader.close()

    return asyncio.run(main())


@pytest.mark.process
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


@pytest.mark.process
def test_a_flood_is_bounded():
    ((result,), _) = grade("while True: print('x' * 100)")
    assert (result.kind, len(result.output), result.num_output_bytes) == ("output", 1000, 100_000)


@pytest.mark.process
def test_runs_do_not_see_one_another_and_the_process_stays_warm():
    async def main():
        grader = Grader(num_workers=1, limits=LIMITS)
        await grader.run("x = 1")
        (worker,) = grader.idle
        result = await grader.run("'x' in globals()")
        assert grader.idle == [worker]
        await grader.close()
        return result.output

    assert asyncio.run(main()) == "False\n"


@pytest.mark.promise("A run past its deadline ends with all that it started")
@pytest.mark.process
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


@pytest.mark.process
def test_a_verdict_is_not_taken_for_a_run_of_the_same_texts():
    async def main():
        grader = Grader(num_workers=1)
        try:
            return await grader.run("x = 1", "assert x == 2"), await grader.judge("x = 1", "assert x == 2")
        finally:
            await grader.close()

    run, verdict = asyncio.run(main())
    assert (run.kind, verdict.kind) == ("ok", "error")
    assert "AssertionError" in verdict.error


@pytest.fixture(params=[True, False], ids=["isolated", "not"])
def has_isolation(request, monkeypatch):
    """Where the kernel permits namespaces, and where it does not."""
    if not request.param:
        start = workers.Worker.start
        monkeypatch.setattr(workers.Worker, "start", lambda *args, **kwargs: start(*args, **kwargs, may_isolate=False))
    return request.param


@pytest.mark.process
def test_there_is_no_network_where_the_kernel_permits(has_isolation):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ((result,), grader) = grade(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); 'in'")
    is_refused = "network" in grader.isolation or filters.landlock_version() >= 4
    assert result.output == ("" if is_refused else "'in'\n")
    assert has_isolation or not grader.isolation


def size_of(path):
    return Path(path).stat().st_size if Path(path).exists() else 0


ESCAPE = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:  # not in our group, not our child: nothing but a namespace or a reaper finds it
        while True:
            print("I live", file=open({path!r}, "a"), flush=True)
            time.sleep(0.01)
    os._exit(0)
while not os.path.exists({path!r}):
    time.sleep(0.01)
{end}
"""


@pytest.mark.process
@pytest.mark.parametrize("end", ["'done'", "time.sleep(3600)", "os._exit(1)"])
def test_a_grandchild_outside_the_session_ends_with_the_run(has_isolation, tmp_path, end):
    path = str(tmp_path / "lives")

    async def main():
        worker = await workers.Worker.start(LIMITS, **({"folders": {"/workspace": tmp_path}} if has_isolation else {}))
        where = "/workspace/lives" if "files" in worker.isolation else path
        result = await worker.run(
            ESCAPE.format(path=where, end=end), "", 1.0 if "sleep(3600)" in end else 60.0, is_fresh=True
        )
        size = size_of(path)
        await asyncio.sleep(0.2)
        grew = size_of(path) - size
        await worker.kill()
        return result, grew

    result, grew = asyncio.run(main())
    assert result.kind == {"'done'": "ok", "time.sleep(3600)": "timeout", "os._exit(1)": "died"}[end]
    assert grew == 0, "it still writes"


@pytest.mark.process
def test_a_kept_process_takes_all_that_it_started_along(has_isolation, tmp_path):
    path = str(tmp_path / "lives")

    async def main():
        worker = await workers.Worker.start(LIMITS, **({"folders": {"/workspace": tmp_path}} if has_isolation else {}))
        where = "/workspace/lives" if "files" in worker.isolation else path
        await worker.run(ESCAPE.format(path=where, end=""), "", 20.0, is_fresh=False)
        before = size_of(path)
        async with asyncio.timeout(30):
            await until_async(lambda: size_of(path) != before)
        await worker.kill()
        size = size_of(path)
        await asyncio.sleep(0.2)
        return size_of(path) - size

    assert asyncio.run(main()) == 0


@pytest.mark.process
def test_files_are_those_of_the_system_and_a_scratch_folder(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    codes = [
        f"import os; os.path.exists({str(secret)!r}), os.path.exists('/etc/shadow')",
        "open('/usr/x', 'w')",
        "import os; os.system('mount -o remount,rw /usr; unshare -Urm mount -o remount,rw,bind /usr /usr')\n"
        "open('/usr/x', 'w')",
        "import os; open('/tmp/mine', 'w').write('x'); os.getcwd(), os.listdir()",
        "import os; os.listdir('/tmp')",
        "f = open('/tmp/big', 'w')\nfor _ in range(99): f.write('x' * 90_000); f.flush()",
    ]
    results, grader = grade(*codes, limits=SandboxLimits(memory_bytes=1 << 28, scratch_bytes=1 << 20))
    if "files" not in grader.isolation:
        pytest.skip("the kernel does not let this user make namespaces; nothing is claimed then")
    assert [result.output for result in results[:2]] == ["(False, False)\n", ""]
    assert all("Read-only file system" in results[i].error for i in (1, 2))
    assert [result.output for result in results[3:5]] == ["('/tmp', ['mine'])\n", "[]\n"]
    assert "No space left on device" in results[5].error


@pytest.mark.process
def test_code_sees_no_process_but_its_own():
    ((result,), grader) = grade(f"import os; os.path.exists('/proc/{os.getpid()}/environ'), os.getpid() < 100")
    if not {"processes", "files"} <= grader.isolation:
        pytest.skip("the kernel does not let this user make namespaces; nothing is claimed then")
    assert result.output == "(False, True)\n"


@pytest.mark.promise("`grader.check()` says what holds; `needs` refuses to run without")
@pytest.mark.process
def test_where_code_cannot_be_shut_off_as_asked_nothing_runs(monkeypatch):
    start = workers.Worker.start
    monkeypatch.setattr(workers.Worker, "start", lambda *args, **kwargs: start(*args, **kwargs, may_isolate=False))
    with pytest.raises(SandboxError, match="shut off from files, network here"):
        grade("1", needs=("network", "files"))


@pytest.mark.process
def test_a_subprocess_that_does_not_start_says_why(monkeypatch):
    monkeypatch.setattr(workers, "PROGRAM", Path("/nowhere"))
    with pytest.raises(SandboxError, match="/nowhere, did not start: EOFError: .*can't open file '/nowhere'"):
        grade("1")


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
        outputs = await asyncio.gather(*(loop.run({"max_new_tokens": 4096}, row) for _ in range(num_rollouts)))
        assert not tool._sessions
        await loop.close()
        return outputs

    for output in asyncio.run(main()):
        pairs = zip(output.completion_token_ids, output.loss_mask, strict=True)
        context = tokenizer.decode([i for i, m in pairs if not m])
        yield [part.partition("<|im_end|>")[0] for part in context.split("<|im_start|>tool\n")[1:]]


@pytest.mark.process
def test_the_python_tool_keeps_variables_within_a_trajectory():
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


@pytest.mark.process
def test_calls_of_one_turn_run_in_order_in_one_process():
    async def main():
        tool = PythonTool(limits=SandboxLimits(timeout_s=60.0), max_sessions=1)
        codes = ["x = 1", "x += 1; x", "x += 1; x"]
        answers = await asyncio.gather(*(tool.call({"code": code}, "one") for code in codes))
        await tool.end_session("one")
        assert not tool._locks
        await tool.close()
        return answers

    assert asyncio.run(main()) == ["", "2", "3"]


@pytest.mark.process
def test_code_that_hangs_is_killed_and_the_model_told():
    ((answer,),) = answers_of(["while True: pass"], num_rollouts=1, timeout_s=0.5)
    assert answer == "error: no end within 0.5 s; the variables are lost"


@pytest.mark.process
def test_no_process_is_left():
    async def main():
        grader = Grader(num_workers=2, limits=LIMITS)
        await grader.run("1")
        pids = [worker._process.pid for worker in grader.idle]
        below = [pid for worker in pids for pid in descendants(worker)]
        await grader.close()
        return [*pids, *below]

    for pid in asyncio.run(main()):
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or ") Z " in stat.read_text()
