"""Shell commands in a sandboxed working copy: the tool of the `swe` loop."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_agent.errors import ToolError
from rl_agent.tools.base import Tool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_agent.sandbox import CodeResult, Grader

_RUN = (
    "import subprocess, sys\nsys.exit(subprocess.run(['bash', '-c', {command!r}], stdin=subprocess.DEVNULL).returncode)"
)


class ShellTool(Tool):
    """Runs a command by bash in the working copy of its trajectory. What a command leaves is files, not processes.

    Args:
        grader: Gives the processes.
        venv: A virtual environment whose programs come first; code may read it.
    """

    def __init__(self, grader: Grader, venv: Path | None = None) -> None:
        super().__init__(
            "bash",
            "Run a shell command in the working copy. Every command starts there anew; files last, variables do not.",
            {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        )
        self._grader = grader
        self._venv = venv
        self._folders: dict[str, Path] = {}

    def open(self, session_id: str, folder: Path) -> None:
        """Have a trajectory work in `folder` until its session ends."""
        self._folders[session_id] = folder

    async def call(self, arguments: Mapping[str, Any], session_id: str) -> str:
        """Run `arguments["command"]`; its output, and its exit status where that is not 0."""
        command = arguments.get("command")
        if not isinstance(command, str) or set(arguments) != {"command"}:
            raise ToolError(f"the arguments are {', '.join(arguments) or 'none'}; one is needed: command, a string")
        result = await self.run(command, self._folders[session_id])
        if result.kind not in ("ok", "error"):
            raise ToolError(f"{result.output}\n{result.error}".strip())
        status = exit_status(result)
        return (result.output.rstrip("\n") + (f"\n[exit status {status}]" if status else "")).lstrip("\n")

    async def run(self, command: str, folder: Path, *, timeout_s: float | None = None) -> CodeResult:
        """Run a command in `folder`, in a process of its own; `exit_status` reads how it ended.

        Raises:
            FailureError, SandboxError: see `Grader.run`.
        """
        programs = ":".join(str(place / "bin") for place in (self._venv, Path(sys.base_prefix)) if place is not None)
        exports = f'export PATH={shlex.quote(programs)}:"$PATH" HOME=/tmp PYTHONDONTWRITEBYTECODE=1'
        readable = [] if self._venv is None else [self._venv]
        async with self._grader.worker(workspace=folder, readable=readable) as worker:
            limit = timeout_s or self._grader.limits.timeout_s
            return await worker.run(_RUN.format(command=f"{exports}\n{command}"), "", limit, is_fresh=True)

    async def end_session(self, session_id: str) -> None:
        """Forget the trajectory's folder."""
        self._folders.pop(session_id, None)

    async def close(self) -> None:
        """Kill all processes."""
        await self._grader.close()


def exit_status(result: CodeResult) -> int | None:
    """Of a command; None where it did not come to its end."""
    if result.kind == "ok":
        return 0
    _, mark, status = result.error.rpartition("SystemExit: ")
    return int(status) if mark else None
