"""What a sandbox is given from outside: folders below `/tmp`, and one service of ours."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from rl_agent import Grader
from rl_agent.sandbox import worker as workers
from rl_agent.sandbox.worker import Service

pytestmark = pytest.mark.process

READ = """
import os
print(open({path!r}).read())
try:
    open({path!r}, "a")
except OSError as error:
    print(type(error).__name__)
print(sorted(os.listdir("/tmp")) == [{first!r}])
"""
CONNECT = """
import socket
for port in ({port}, {other}):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as near:
            near.sendall(b"hi")
            print(near.recv(10).decode())
    except OSError as error:
        print("refused")
"""


def outputs_of(*codes, may_isolate=True, monkeypatch=None, **settings):
    if monkeypatch is not None:
        start = workers.Worker.start
        monkeypatch.setattr(
            workers.Worker, "start", lambda *args, **kwargs: start(*args, **kwargs, may_isolate=may_isolate)
        )

    async def main():
        grader = Grader(num_workers=1)
        async with grader.worker(**settings) as worker:
            found = [(await worker.run(code, "", 30, is_fresh=True)).output for code in codes]
            report = worker.report
        await grader.close()
        return found, report

    return main


@pytest.mark.process
def test_a_readable_folder_below_tmp_keeps_files_isolated():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        file = Path(folder) / "given.txt"
        file.write_text("given")
        code = READ.format(path=str(file), first=Path(folder).name)
        found, report = asyncio.run(outputs_of(code, code, readable=[Path(folder)])())
    if "processes" not in report.isolation:
        pytest.skip("this kernel gives this user no namespaces")
    assert "files" in report.isolation
    for output in found:
        said, refused, is_alone = output.split()
        assert (said, is_alone) == ("given", "True")
        assert refused in ("OSError", "PermissionError")


@pytest.mark.process
@pytest.mark.parametrize("may_isolate", [True, False], ids=["namespace", "loopback"])
def test_code_connects_to_its_service_and_to_no_other(may_isolate, monkeypatch, tmp_path):
    async def echo(reader, writer):
        writer.write(b"echo " + await reader.read(10))
        await writer.drain()
        writer.close()

    async def main():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "service"
            service = await asyncio.start_server(echo, "127.0.0.1", 0)
            inside = await asyncio.start_unix_server(echo, path)
            other = await asyncio.start_server(echo, "127.0.0.1", 0)
            port, another = (each.sockets[0].getsockname()[1] for each in (service, other))
            code = CONNECT.format(port=port, other=another)
            given = {"folders": {"/workspace": tmp_path}, "service": Service(port=port, socket=path)}
            found, report = await outputs_of(code, code, may_isolate=may_isolate, monkeypatch=monkeypatch, **given)()
            for each in (service, inside, other):
                each.close()
        return found, report

    found, report = asyncio.run(main())
    assert ("network" in report.isolation) == may_isolate or not may_isolate
    is_shut = "network" in report.isolation or report.landlock >= 4
    assert found == ["echo hi\n" + ("refused" if is_shut else "echo hi") + "\n"] * 2
