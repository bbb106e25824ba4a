"""Sandboxes without processes: folders and checks are those of the real kinds, and commands are a function."""

from contextlib import asynccontextmanager

from rl_agent.sandbox.base import MountedSandbox, SandboxKind
from rl_agent.types import CodeResult, SandboxLimits

LIMITS = SandboxLimits(timeout_s=20, memory_bytes=256 << 20)


def result(output="", kind="ok", error=""):
    return CodeResult(kind=kind, output=output, error=error, num_output_bytes=len(output), wall_s=0.5)


class FakeSandboxes(SandboxKind):
    """Kind whose commands are calls of `play(sandbox, command, timeout_s, variables)`, a coroutine function."""

    name = "fake"

    def __init__(self, play=None, *, limits=LIMITS, max_running=2, **common):
        super().__init__(limits=limits, max_running=max_running, **common)
        self.play = play

    async def check(self):
        return "with no isolation at all"

    @asynccontextmanager
    async def _opened(self, spec):
        async with FakeSandbox.opened(self, spec) as sandbox:
            yield sandbox


class FakeSandbox(MountedSandbox):
    """One of them: `spec` is what it was opened with, `path` its working folder on this machine."""

    def __init__(self, kind, spec, scratch):
        super().__init__(kind, spec, scratch)
        self.kind, self.spec, self.path = kind, spec, self.folders[spec.workdir]

    async def run(self, command, *, timeout_s=None, variables=None):
        async with self.kind.turns:
            return await self.kind.play(self, command, timeout_s, variables)
