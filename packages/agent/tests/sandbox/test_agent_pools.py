"""Pools of workers and of sandboxes for Python, whose processes are played by functions on the same wire."""

import ast
import asyncio
import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from packages.agent.tests.support.sandboxes import LIMITS, FakeSandboxes, result

from rl_agent.errors import FailureError, SandboxError, ToolError
from rl_agent.sandbox import Grader
from rl_agent.sandbox import worker as workers
from rl_agent.sandbox.grading import SandboxGrader
from rl_agent.sandbox.process.execution import REPORT
from rl_agent.sandbox.worker import Files
from rl_agent.tools.python import PythonTool
from rl_agent.types import SandboxReport


def reported(output, kind="ok", error="", **more):
    """What a run leaves in its output: the report is at its end."""
    report = json.dumps({"kind": kind, "error": error, "num_output_bytes": len(output), **more}).encode()
    return output.encode() + report + REPORT.pack(len(report))


@pytest.mark.parametrize(
    ("written", "kind", "output"),
    [
        (reported("x" * 20), "ok", "x" * 8),
        (reported("", "error", "Traceback"), "error", ""),
        (reported("a", "timeout"), "died", None),
        (reported("a", error=3), "died", None),
        (reported("a", num_output_bytes=True), "died", None),
        (reported("a", num_output_bytes=99), "died", None),
        (b"[]" + REPORT.pack(2), "died", None),
        (b"{" + REPORT.pack(1), "died", None),
        (b"abc" + REPORT.pack(1 << 20), "died", None),
        (b"abc", "died", "abc"),
    ],
)
def test_a_report_that_code_has_forged_is_a_death(written, kind, output):
    with Files("code", "in\udcffput") as files:
        assert os.read(files.descriptors[1], 99) == "in\udcffput".encode(errors="surrogatepass")
        os.write(files.descriptors[2], written)
        found = files.result(None, "", 8, 1.5)
        assert files.result("timeout", "late", 8, 1.5).kind == "timeout"
    assert (found.kind, found.wall_s, found.error == "the process ended by itself") == (kind, 1.5, kind == "died")
    assert output is None or found.output == output


class PlayedWorker:
    """Worker whose code is a word: what happens to it."""

    report = SandboxReport(
        isolation=frozenset(["files"]), memory="cgroup2", processes="rlimit", has_filter=1, landlock=5
    )
    isolation = report.isolation

    def __init__(self, given):
        self.given, self.runs, self.is_alive, self.gate = given, [], True, asyncio.Event()

    async def run(self, code, stdin, timeout_s, *, is_fresh):
        self.runs.append((code, stdin, timeout_s, is_fresh))
        if code == "wait":
            await self.gate.wait()
        self.is_alive = code != "die"
        return result(stdin, {"late": "timeout", "die": "died"}.get(code, "ok"))

    async def end_of(self, mode, files, channel):
        """A judge: asks the solution, and is content with its own question."""
        assert mode == "judge"
        with channel.dup() as own:
            own.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(own, b"2 + 2")
            said = await loop.sock_recv(own, 99)
        os.write(files.descriptors[2], reported("", "ok" if said == b"2 + 2 = 4" else "error", said.decode()))
        return None, ""

    def late(self, timeout_s):
        return "timeout", f"no end within {timeout_s:g} s"

    async def stop(self):
        await self.kill()

    async def kill(self):
        self.is_alive = False


@pytest.fixture
def started(monkeypatch):
    """Workers that pools have started."""
    found = []

    async def start(limits, **given):
        found.append(PlayedWorker(given))
        return found[-1]

    monkeypatch.setattr(workers.Worker, "start", start)
    return found


def pooled(use, **settings):
    async def main():
        grader = Grader(limits=LIMITS, **{"num_workers": 1, **settings})
        try:
            return await use(grader)
        finally:
            await grader.close()

    return asyncio.run(main())


def test_results_are_kept_by_code_and_input_and_timeouts_are_not(started):
    async def use(grader):
        runs = [("a", "1"), ("a", "2"), ("a", "1"), ("late", ""), ("late", ""), ("b", ""), ("a", "1")]
        found = [await grader.run(*run) for run in runs]
        assert found[0] is found[2] is found[6]
        assert str(await grader.check()) == str(PlayedWorker.report)

    pooled(use)
    (worker,) = started
    assert [code for code, *_ in worker.runs] == ["a", "a", "late", "late", "b"]
    assert {run[2:] for run in worker.runs} == {(20, True)}
    assert not worker.is_alive, "it is closed with its pool"


def test_runs_wait_for_a_worker_and_too_many_fail_at_once(started):
    async def use(grader):
        runs = [asyncio.create_task(grader.run("wait", str(i))) for i in range(4)]
        await asyncio.sleep(0)
        started[0].gate.set()
        return await asyncio.gather(*runs, return_exceptions=True)

    *found, failed = pooled(use, max_waiting=2)
    assert [each.output for each in found] == ["0", "1", "2"]
    assert isinstance(failed, FailureError)
    assert (failed.failure.kind, failed.failure.is_retryable) == ("grader", True)
    assert "2 runs wait for 1 subprocesses" in failed.failure.message
    assert len(started) == 1


def test_a_worker_that_has_died_or_has_folders_is_not_used_again(started):
    async def use(grader):
        await grader.run("die")
        async with grader.worker(folders={"/workspace": Path("/there")}) as worker:
            assert worker.given["folders"] == {"/workspace": Path("/there")}
        await grader.run("a")
        async with grader.worker() as worker:
            return worker

    assert pooled(use) is started[2]
    assert [len(worker.runs) for worker in started] == [1, 0, 1]


def test_where_isolation_is_missing_nothing_runs(started):
    with pytest.raises(SandboxError, match="code cannot be shut off from network, processes here"):
        pooled(lambda grader: grader.run("a"), needs=("network", "files", "processes"))
    assert (started[0].runs, started[0].is_alive) == ([], False)


def test_a_worker_that_does_not_start_is_one_error(monkeypatch):
    async def start(*_, **__):
        raise EOFError("no such file")

    monkeypatch.setattr(workers.Worker, "start", start)
    with pytest.raises(SandboxError, match="did not start: EOFError: no such file"):
        pooled(lambda grader: grader.run("a"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_workers": 0}, "num_workers=0 must be positive"),
        ({"limits": replace(LIMITS, timeout_s=0)}, "timeout_s=0 positive"),
        ({"limits": replace(LIMITS, num_processes=0)}, "num_processes=0 must be at least 1"),
        ({"needs": ("net",)}, "needs names 'net'; there are: network, processes, files"),
    ],
)
def test_a_pool_that_cannot_be_is_one_error(settings, words):
    with pytest.raises(ValueError, match=words):
        Grader(**settings)


async def program(sandbox, command, *_):
    """What `process/elsewhere.py` says over its connection; code is a word here too."""
    (arguments,) = re.findall(r"main\(\*(\[.*\])\)", shlex.split(command)[-1])
    host, port, token, mode = ast.literal_eval(arguments)
    strange, stranger = await asyncio.open_connection(host, int(port))
    stranger.write(b"guessed\n")
    assert await strange.read() == b"", "the connection of a stranger is closed"
    stranger.close()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{token}\n".encode())

    async def received():
        return await reader.readexactly(*REPORT.unpack(await reader.readexactly(4)))

    count = 0
    try:
        if mode == "solution":
            assert await received() == b"solution"
            writer.write(await reader.readexactly(5) + b" = 4")
            await reader.read()
        while not reader.at_eof():
            request = json.loads(await received())
            count += 1
            match request["code"]:
                case "late":
                    await reader.read()
                case "leave":
                    return result("bye")
                case "grow":
                    return result("", "memory", "the memory limit was reached")
                case "flood":
                    writer.write(REPORT.pack(1 << 31))
                    return result("", "output", "too much output")
                case code:
                    said = reported(f"{count} {code} {request['stdin']} {request['is_last']}")
                    said = reported("42\n") if code == "print(6 * 7)" else said
                    writer.write(REPORT.pack(len(said)) + said)
    except asyncio.IncompleteReadError:
        pass
    finally:
        writer.close()
    return result()


def graded(use, play=program, **options):
    async def main():
        grader = SandboxGrader(FakeSandboxes(play, **options))
        try:
            return await use(grader)
        finally:
            await grader.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "kind", "output", "error"),
    [
        ("word", "ok", "1 word in True", ""),
        ("late", "timeout", "", "no end within 0.05 s"),
        ("leave", "died", "bye", "the process ended by itself"),
        ("grow", "memory", "", "the memory limit was reached"),
        ("flood", "output", "", "too much output"),
    ],
)
def test_a_run_in_a_sandbox_ends_as_what_it_is(code, kind, output, error):
    found = graded(lambda grader: grader.run(code, "in", timeout_s=0.05 if code == "late" else None))
    assert (found.kind, found.output, found.error) == (kind, output, error)


def test_a_test_asks_the_solution_in_its_sandbox(started):
    found = graded(lambda grader: grader.judge("solution", "test", timeout_s=20))
    assert (found.kind, found.error) == ("ok", "2 + 2 = 4")


def test_a_sandbox_without_python_is_one_error():
    async def silent(*_):
        return result("python3: command not found", "error", " (127)")

    assert graded(lambda grader: grader.check()) == "with no isolation at all"
    with pytest.raises(SandboxError, match=r"in a sandbox fake does not start: python3: command not found \(127\)"):
        graded(lambda grader: grader.run("word"), silent)
    with pytest.raises(SandboxError, match="gets its code from this process, which network=none shuts off"):
        SandboxGrader(FakeSandboxes(network="none"))


def test_calls_of_a_trajectory_share_a_sandbox_until_it_is_lost():
    async def use(grader):
        tool = PythonTool(pool=grader)
        found = [await tool.call({"code": code}, session) for code, session in (("a", "s"), ("b", "s"), ("c", "t"))]
        with pytest.raises(ToolError, match="^the process ended by itself; the variables are lost"):
            await tool.call({"code": "leave"}, "s")
        found.append(await tool.call({"code": "d"}, "s"))
        for arguments, said in (({}, "are none"), ({"code": 1}, "are code"), ({"code": "", "x": 1}, "are code, x")):
            with pytest.raises(ToolError, match=f"the arguments {said}; one is needed: code, a string"):
                await tool.call(arguments, "s")
        await tool.end_session("t")
        await tool.close()
        return found

    assert graded(use) == ["1 a  False", "2 b  False", "1 c  False", "1 d  False"]
