"""Python tool: an interpreter in a sandboxed subprocess, whose variables last as long as the trajectory."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from rl_agent.errors import ToolError
from rl_agent.sandbox import Grader
from rl_agent.tools.base import Tool

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rl_agent.sandbox import Worker
    from rl_agent.sandbox.grading import SandboxGrader, SandboxWorker
    from rl_agent.types import SandboxLimits


class PythonTool(Tool):
    """Python tool. A trajectory has its own process from its first call on, so later calls see earlier variables.

    Args:
        max_sessions: Processes at the same time; further trajectories wait for one, within their call's time.
        limits: Limits of each call. A call past its deadline loses the session's variables, and says so.
        needs: Isolation that is required; see `Grader`.
        pool: Pool of the processes in place of all these, such as one in sandboxes of another kind: `create_grader`.
    """

    def __init__(
        self,
        *,
        max_sessions: int = 64,
        limits: SandboxLimits | None = None,
        needs: Collection[str] = (),
        pool: Grader | SandboxGrader | None = None,
    ) -> None:
        super().__init__(
            "python",
            "Run Python code. Variables last; the output and the value of the last line are shown.",
            {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        )
        self._pool = pool or Grader(num_workers=max_sessions, limits=limits, needs=needs)
        self._limits = self._pool.limits
        self._locks: dict[str, asyncio.Lock] = {}
        self._sessions: dict[str, tuple[AsyncExitStack, Worker | SandboxWorker]] = {}

    async def call(self, arguments: Mapping[str, Any], session_id: str) -> str:
        """Run `arguments["code"]`."""
        code = arguments.get("code")
        if not isinstance(code, str) or set(arguments) != {"code"}:
            raise ToolError(f"the arguments are {', '.join(arguments) or 'none'}; one is needed: code, a string")
        async with self._locks.setdefault(session_id, asyncio.Lock()):  # calls of one turn run one after the other
            return await self._run(code, session_id)

    async def _run(self, code: str, session_id: str) -> str:
        if session_id not in self._sessions:
            async with AsyncExitStack() as stack:
                worker = await stack.enter_async_context(self._pool.worker(is_kept=False))
                self._sessions[session_id] = (stack.pop_all(), worker)
        worker = self._sessions[session_id][1]
        result = await worker.run(code, "", self._limits.timeout_s, is_fresh=False)
        if not worker.is_alive:
            await self._leave(session_id)
            raise ToolError(f"{result.error}; the variables are lost")
        left_out = result.num_output_bytes - self._limits.output_bytes
        cut = f"\n[cut: {result.num_output_bytes} bytes are too many]" if left_out > 0 else ""
        if result.kind != "ok":
            raise ToolError(f"{result.output}{cut}\n{result.error}".strip())
        return (result.output + cut).rstrip("\n")

    async def end_session(self, session_id: str) -> None:
        """Kill the trajectory's process."""
        self._locks.pop(session_id, None)
        await self._leave(session_id)

    async def _leave(self, session_id: str) -> None:
        if session_id in self._sessions:
            stack, _ = self._sessions.pop(session_id)
            await stack.aclose()

    async def close(self) -> None:
        """Kill all processes."""
        for session_id in tuple(self._sessions):
            await self.end_session(session_id)
        await self._pool.close()
