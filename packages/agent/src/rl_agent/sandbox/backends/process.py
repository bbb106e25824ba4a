"""Sandboxes of kind `process`: a subprocess of this machine, shut off by namespaces, seccomp and Landlock."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_agent.errors import SandboxError
from rl_agent.sandbox.base import MountedSandbox, SandboxKind, SandboxSpec, script_of
from rl_agent.sandbox.pool import Grader

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from contextlib import AbstractAsyncContextManager

    from rl_agent.types import CodeResult

_RUN = (
    "import subprocess, sys\nsys.exit(subprocess.run(['bash', '-c', {script!r}], stdin=subprocess.DEVNULL).returncode)"
)


class ProcessSandboxes(SandboxKind):
    """Sandboxes of this machine's programs, read-only. A command's processes end with it.

    Args:
        venv: A virtual environment whose programs come first; commands may read it.
        needs: Isolation that is required; see `Grader`.
        **common: Arguments of every kind; see `SandboxKind`.
    """

    name = "process"
    networks = ("none", "proxy")
    image_needs = "its commands run this machine's programs; sandbox=podman has images"

    def __init__(self, *, venv: Path | None = None, needs: Collection[str] = (), **common: Any) -> None:
        super().__init__(**common)
        self.grader = Grader(num_workers=self.max_running, limits=self.limits, needs=needs)
        """Grader whose subprocesses run the commands."""
        self.venv = venv

    async def check(self) -> str:
        """See `SandboxKind`."""
        if self.limits.folder_bytes is not None:
            async with self._opened(SandboxSpec()):
                pass
        return f"on this machine, {await self.grader.check()}"

    def _opened(self, spec: SandboxSpec) -> AbstractAsyncContextManager[_ProcessSandbox]:
        return _ProcessSandbox.opened(self, spec)

    async def close(self) -> None:
        """Kill all processes."""
        await self.grader.close()


class _ProcessSandbox(MountedSandbox):
    def __init__(self, kind: ProcessSandboxes, spec: SandboxSpec, scratch: Path) -> None:
        super().__init__(kind, spec, scratch)
        self._kind = kind

    async def run(
        self, command: str, *, timeout_s: float | None = None, variables: Mapping[str, str] | None = None
    ) -> CodeResult:
        """See `Sandbox`."""
        kind, spec = self._kind, self._spec
        programs, readable = local_programs(kind.venv), [*spec.readable, *([] if kind.venv is None else [kind.venv])]
        script = script_of(command, {**LOCAL_VARIABLES, **(variables or {})}, programs)
        service = spec.service if kind.network == "proxy" else None
        async with kind.grader.worker(
            folders=self.folders, readable=readable, service=service, namespace=self.namespace
        ) as worker:
            if "files" not in worker.isolation:
                if spec.extra:
                    raise SandboxError(
                        f"the folders {', '.join(spec.extra)} of a sandbox need namespaces, which this user cannot "
                        "make; take sandbox=podman"
                    )
                self.workdir = str(self.folders[spec.workdir])
            limit = timeout_s or kind.limits.timeout_s
            return await worker.run(_RUN.format(script=script), "", limit, is_fresh=True)


LOCAL_VARIABLES = {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
"""Variables of commands that run this machine's programs."""


def local_programs(venv: Path | None) -> list[Path]:
    """Folders of programs that come before those of the system."""
    return [place / "bin" for place in (venv, Path(sys.base_prefix)) if place is not None]
