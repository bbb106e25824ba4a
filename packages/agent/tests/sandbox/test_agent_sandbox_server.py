"""The sandbox server and its client: the token, limits, files, what is ended, and what a command line serves."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from packages.agent.tests.support.sandboxes import LIMITS, FakeSandboxes, result

from rl_agent.errors import RowError, SandboxError
from rl_agent.registry import create_sandboxes
from rl_agent.sandbox.base import SandboxSpec
from rl_agent.sandbox.server import SandboxServer
from rl_agent.sandbox.worker import Service


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("RL_AGENT_SANDBOX_TOKEN", "secret")


async def shown(sandbox, command, timeout_s, variables):
    """A command whose output is what it was called with."""
    limits = sandbox.kind.limits
    return result(json.dumps([command, timeout_s, variables, limits.memory_bytes, sandbox.spec.num_cpus]))


def served(use, play=shown, *, limits=LIMITS, asked=LIMITS, network="none", **options):
    """Result of `use(kind)`, with sandboxes of a server on this machine."""

    async def main():
        server = SandboxServer(lambda **given: FakeSandboxes(play, **given), limits=limits, token="secret", **options)
        given = {"kind": "http", "url": await server.start(), "network": network}
        kind = create_sandboxes(given, limits=asked, max_running=2)
        try:
            return await use(kind)
        finally:
            await kind.close()
            await server.stop()

    return asyncio.run(main())


async def opened(kind):
    async with kind.open(SandboxSpec()):
        pass


@pytest.mark.promise("The sandbox server runs nothing without its token")
def test_without_the_token_nothing_runs(monkeypatch):
    for token in ("", "wrong"):
        monkeypatch.setenv("RL_AGENT_SANDBOX_TOKEN", token)
        with pytest.raises(SandboxError, match="answers 401: .*the token is missing or wrong"):
            served(opened)
    with pytest.raises(ValueError, match="needs a token"):
        SandboxServer(FakeSandboxes, limits=LIMITS, token="")


def test_no_client_gets_more_than_the_servers_limits():
    async def use(kind):
        async with kind.open(SandboxSpec(num_cpus=0.5)) as sandbox:
            return json.loads((await sandbox.run("true", timeout_s=50, variables={"A": "b"})).output)

    more = replace(LIMITS, memory_bytes=1 << 30, timeout_s=100)
    assert served(use, limits=replace(LIMITS, timeout_s=2), asked=more) == ["true", 2, {"A": "b"}, 256 << 20, 0.5]
    less = replace(LIMITS, memory_bytes=100 << 20)
    assert served(use, asked=less) == ["true", 20, {"A": "b"}, 100 << 20, 0.5]


def test_an_idle_sandbox_is_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended, remove = asyncio.Event(), shutil.rmtree

    def removed(*given, **options):
        remove(*given, **options)
        ended.set()

    monkeypatch.setattr(shutil, "rmtree", removed)

    async def use(kind):
        async with kind.open(SandboxSpec()) as sandbox:
            async with asyncio.timeout(20):
                await ended.wait()
            assert not [*tmp_path.glob("rl-agent-*/work")]
            with pytest.raises(SandboxError, match="there is no sandbox .*; it may have expired"):
                await sandbox.run("true")

    served(use, expiry_s=0.02)


def test_files_travel_to_the_server_and_back(tmp_path):
    """Also those that may be read alone; a link out of the folder that a command made stays where it is."""
    (tmp_path / "work/sub").mkdir(parents=True)
    (tmp_path / "work/sub/a").write_text("given")
    (tmp_path / "tool.py").write_text("tool")

    async def play(sandbox, *_):
        read = (sandbox.path / "sub/a").read_text() + (await sandbox.read("/given/0/tool.py")).decode()
        (sandbox.path / "new").write_text("new")
        (sandbox.path / "link").symlink_to("/etc/passwd")
        return result(read)

    async def use(kind):
        spec = SandboxSpec(folder=tmp_path / "work", readable=(tmp_path / "tool.py",))
        async with kind.open(spec) as sandbox:
            inside = sandbox.path_of(tmp_path / "tool.py")
            assert await sandbox.read(inside) == b"tool"
            assert (await sandbox.run("any")).output == "giventool"
            await sandbox.write("sub/b", b"written")
            await sandbox.sync()
            with pytest.raises(FileNotFoundError, match="there is no file link"):
                await sandbox.read("link")
            with pytest.raises(RowError, match="'/etc/x' is outside of the working copy, which is in /workspace"):
                await sandbox.write("/etc/x", b"")
            with pytest.raises(RowError, match="outside"):
                await sandbox.write("../x", b"")

    served(use, play)
    files = {str(path.relative_to(tmp_path / "work")) for path in (tmp_path / "work").rglob("*")}
    assert files == {"sub", "sub/a", "sub/b", "new"}
    assert (tmp_path / "work/sub/b").read_text() == "written"


def test_too_much_to_read_is_not_copied(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(65 << 20)

    async def use(kind):
        async with kind.open(SandboxSpec(readable=(tmp_path,))):
            pass

    with pytest.raises(SandboxError, match="which has 65 MiB; give what a harness needs a folder of its own"):
        served(use)


def test_a_command_ends_with_its_sandbox():
    async def main():
        begun, ended = asyncio.Event(), asyncio.Event()

        async def play(*_):
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        server = SandboxServer(lambda **given: FakeSandboxes(play, **given), limits=LIMITS, token="secret")
        kind = create_sandboxes({"kind": "http", "url": await server.start()}, limits=LIMITS, max_running=2)
        async with kind.open(SandboxSpec()) as sandbox:
            running = asyncio.create_task(sandbox.run("for ever"))
            await begun.wait()
        with pytest.raises(SandboxError, match="the sandbox was ended while the command ran"):
            await running
        await kind.close()
        await server.stop()
        return ended.is_set()

    assert asyncio.run(main())


def test_the_proxy_of_a_client_is_reached_through_the_server():
    async def echo(reader, writer):
        writer.write(b"echo " + await reader.readline())
        writer.close()

    async def play(sandbox, command, *_):
        service = sandbox.spec.service
        reader, writer = await asyncio.open_unix_connection(service.socket)
        writer.write(f"{command}\n".encode())
        said = await reader.read()
        writer.close()
        return result(f"{service.port} {said.decode()}")

    async def use(kind):
        listener = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        service = Service(port=port, socket=Path("/not/here"))
        async with kind.open(SandboxSpec(service=service)) as sandbox:
            assert sandbox.url_of(service) == f"http://127.0.0.1:{port}"
            said = await sandbox.run("hello")
            listener.close()
            return said.output, port

    said, port = served(use, play, network="proxy")
    assert said == f"{port} echo hello\n"


def test_the_plan_names_the_server_and_its_own_line():
    async def use(kind):
        await kind.check_room(SandboxSpec(num_cpus=10_000))  # the server's to check
        return await kind.check()

    assert served(use).endswith(": with no isolation at all; network: none")
    with pytest.raises(RowError, match="'/usr/x' of a sandbox is none that commands can have"):
        served(lambda kind: kind.open(SandboxSpec(extra=("/usr/x",))).__aenter__())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs the URL of its server, and url is ''"),
        ({"url": "http://far:1"}, "on another machine, which has to reach the proxy: give proxy_host"),
        ({"url": "http://127.0.0.1:9"}, r"at http://127.0.0.1:9 does not answer \(ClientConnectorError"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_error(options, words):
    async def main():
        kind = create_sandboxes({"kind": "http", **options}, limits=LIMITS, max_running=1)
        try:
            await kind.check()
        finally:
            await kind.close()

    with pytest.raises(SandboxError, match=words):
        asyncio.run(main())


@pytest.mark.process
def test_the_command_serves_until_it_is_ended(tmp_path):
    (tmp_path / "a").write_text("x")

    async def main():
        limits = json.dumps({"memory_bytes": LIMITS.memory_bytes})
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rl_agent.cli", "sandbox", "--limits", limits),
            env={**os.environ},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(60):
                url = (await process.stdout.readline()).decode().split()[-1]
                kind = create_sandboxes({"kind": "http", "url": url}, limits=LIMITS, max_running=1)
                async with kind.open(SandboxSpec(folder=Path(tmp_path))) as sandbox:
                    result = await sandbox.run("cat a && echo y > b")
                    await sandbox.sync()
                await kind.close()
                process.send_signal(signal.SIGTERM)
                return result.output, await process.wait()
        finally:
            if process.returncode is None:
                process.kill()

    assert asyncio.run(main()) == ("x", 0)
    assert (tmp_path / "b").read_text() == "y\n"
