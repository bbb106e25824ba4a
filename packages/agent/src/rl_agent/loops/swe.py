"""Coding agent loop: shell commands in a sandboxed working copy, and tests that decide the reward."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rl_agent.chat_template import messages_of
from rl_agent.errors import ToolError
from rl_agent.loops.tool import ToolLoop
from rl_agent.loops.workspace import Shell, exit_status, tests_of, working_copy, write_files
from rl_agent.sandbox import Grader
from rl_agent.tools.base import Tool
from rl_agent.types import SandboxLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from rl_agent.base import Generator
    from rl_agent.types import AgentLoopOutput, ParsedTurn, Tokenizer


class SweLoop(ToolLoop):
    """Coding agent loop: the model works on a copy of a repository with `bash` until it answers without a call.

    A row holds `prompt` (what is to be done), `repository` (a folder, which is copied) or `files` (texts by path), and
    `tests`: `{"command": ..., "files": {path: text}}`. These files are written over the working copy before the tests
    run, so a model that edits them gains nothing. The reward is 1 where the command exits with 0, else 0; a test run
    past its deadline is a 0 as well, for it is the model's code that runs. What could not be tested is a failure.
    `extra_fields` holds `end` as of `ToolLoop`, and `tests`: exit status (None past the deadline) and output.

    Args:
        server: Generator of tokens, such as a rollout server.
        tokenizer: Tokenizer of the served model.
        parser: See `ToolLoop`.
        max_turns: Generations at most; the tests run after the last.
        max_completion_tokens: Tokens after the prompt at most; None leaves it to the server.
        command_timeout_s: Deadline of one command, seconds.
        test_timeout_s: Deadline of the tests, seconds.
        max_tool_tokens: Tokens that one command may answer.
        max_commands: Commands and tests running at the same time in this process; more wait.
        memory_bytes: Address space of each process.
        venv: A virtual environment whose programs come first.
        needs: Isolation that is required; see `Grader`.
        template_kwargs: Further variables of the chat template.

    Raises:
        TemplateError: the chat template cannot show tools or their answers.
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        server: Generator,
        tokenizer: Tokenizer,
        *,
        parser: str | Callable[[str], ParsedTurn] = "hermes",
        max_turns: int = 32,
        max_completion_tokens: int | None = None,
        command_timeout_s: float = 30.0,
        test_timeout_s: float = 300.0,
        max_tool_tokens: int = 2048,
        max_commands: int = 8,
        memory_bytes: int = 1 << 32,
        venv: str | None = None,
        needs: Collection[str] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if test_timeout_s <= 0:
            raise ValueError(f"test_timeout_s is {test_timeout_s}; it must be positive")
        limits = SandboxLimits(timeout_s=command_timeout_s, memory_bytes=memory_bytes, file_bytes=1 << 26)
        grader = Grader(num_workers=max_commands, limits=limits, needs=needs)
        self._shell = ShellTool(Shell(grader, None if venv is None else Path(venv).resolve()))
        self._test_timeout_s = test_timeout_s
        super().__init__(
            server,
            tokenizer,
            tools=[self._shell],
            parser=parser,
            max_turns=max_turns,
            max_completion_tokens=max_completion_tokens,
            tool_timeout_s=command_timeout_s + 600.0,  # commands wait for one another; each has its own deadline
            max_tool_tokens=max_tool_tokens,
            template_kwargs=template_kwargs,
        )

    async def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids of the prompt, the schema of the shell included."""
        return self._template_of((self._shell.name,)).prompt(messages_of(row)), ()

    async def run(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        """Run one row.

        Raises:
            RowError: a field is missing, or is not what it has to be.
            FailureError: the tests could not be run, or a generation was aborted before its first token.
        """
        messages, session_id = messages_of(row), uuid4().hex
        command, test_files = tests_of(row)
        async with working_copy(row) as copy:
            self._shell.open(session_id, copy)
            names = (self._shell.name,)
            session, metrics, fields = await self._converse(messages, names, sampling_params, session_id)
            await asyncio.to_thread(write_files, copy, test_files)
            status, output = await self._shell.shell.test(command, copy, self._test_timeout_s)
        tests = {"exit_status": status, "output": output[-2000:]}
        return session.finish(reward=float(status == 0), metrics=metrics, extra_fields={**fields, "tests": tests})


class ShellTool(Tool):
    """Tool `bash`: runs a command in the trajectory's working copy. Files stay, processes do not.

    Args:
        shell: Runs the commands.
    """

    def __init__(self, shell: Shell) -> None:
        super().__init__(
            "bash",
            "Run a shell command in the working copy. Every command starts there anew; files last, variables do not.",
            {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        )
        self.shell = shell
        """Shell that runs the commands."""
        self._folders: dict[str, Path] = {}

    def open(self, session_id: str, folder: Path) -> None:
        """Assign a working folder to a trajectory, until its session ends."""
        self._folders[session_id] = folder

    async def call(self, arguments: Mapping[str, Any], session_id: str) -> str:
        """Run `arguments["command"]`; returns its output, and its exit status if that is not 0."""
        command = arguments.get("command")
        if not isinstance(command, str) or set(arguments) != {"command"}:
            raise ToolError(f"the arguments are {', '.join(arguments) or 'none'}; one is needed: command, a string")
        result = await self.shell.run(command, self._folders[session_id])
        if result.kind not in ("ok", "error"):
            raise ToolError(f"{result.output}\n{result.error}".strip())
        status = exit_status(result)
        if result.kind == "error" and status is None:  # the command was not started, for example for a NUL in it
            raise ToolError(f"the command could not be run: {result.error.strip().rpartition(chr(10))[2]}")
        return (result.output.rstrip("\n") + (f"\n[exit status {status}]" if status else "")).lstrip("\n")

    async def end_session(self, session_id: str) -> None:
        """Forget the trajectory's folder."""
        self._folders.pop(session_id, None)

    async def close(self) -> None:
        """Kill all processes."""
        await self.shell.close()
