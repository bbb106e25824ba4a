"""The sandbox server: its token, its limits, and what it ends."""

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

from rl_agent.errors import SandboxError
from rl_agent.registry import create_sandboxes
from rl_agent.sandbox.base import SandboxSpec
from rl_agent.sandbox.server import SandboxServer
from rl_agent.types import SandboxLimits

pytestmark = pytest.mark.process
MIB = 1 << 20
LIMITS = SandboxLimits(timeout_s=20, memory_bytes=256 * MIB)


def make(*, limits, network):
    return create_sandboxes({"kind": "process", "network": network}, limits=limits, max_running=2)


def served(use, *, limits=LIMITS, asked=LIMITS, **options):
    async def main():
        server = SandboxServer(make, limits=limits, token="secret", **options)
        kind = create_sandboxes({"kind": "http", "url": await server.start()}, limits=asked, max_running=2)
        try:
            return await use(kind)
        finally:
            await kind.close()
            await server.stop()

    return asyncio.run(main())


@pytest.mark.promise("The sandbox server runs nothing without its token")
def test_without_the_token_nothing_runs(monkeypatch):
    async def use(kind):
        async with kind.open(SandboxSpec()):
            pass

    for token in ("", "wrong"):
        monkeypatch.setenv("RL_AGENT_SANDBOX_TOKEN", token)
        with pytest.raises(SandboxError, match="answers 401: .*the token is missing or wrong"):
            served(use)
    with pytest.raises(ValueError, match="needs a token"):
        SandboxServer(make, limits=LIMITS, token="")


def test_no_client_gets_more_than_the_servers_limits(monkeypatch):
    monkeypatch.setenv("RL_AGENT_SANDBOX_TOKEN", "secret")

    async def use(kind):
        async with kind.open(SandboxSpec()) as sandbox:
            late = await sandbox.run("sleep 60", timeout_s=50)
            return late, await sandbox.run("python3 -c 'x = bytearray(700 << 20)'")

    more = replace(LIMITS, memory_bytes=1 << 30, timeout_s=100)
    late, large = served(use, limits=replace(LIMITS, timeout_s=2), asked=more)
    assert (late.kind, late.error) == ("timeout", "no end within 2 s")
    assert large.kind in ("memory", "error", "died")


def test_an_idle_sandbox_is_ended(monkeypatch, tmp_path):
    monkeypatch.setenv("RL_AGENT_SANDBOX_TOKEN", "secret")
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

    served(use, expiry_s=0.2)


def test_the_command_serves_until_it_is_ended(monkeypatch, tmp_path):
    monkeypatch.setenv("RL_AGENT_SANDBOX_TOKEN", "secret")
    (tmp_path / "a").write_text("x")

    async def main():
        limits = json.dumps({"memory_bytes": 256 * MIB})
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
