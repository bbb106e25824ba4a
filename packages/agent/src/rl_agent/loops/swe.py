"""Coding agent loop: shell commands in a sandboxed working copy, and tests that decide the reward."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rl_agent.chat_template import messages_of
from rl_agent.errors import ToolError
from rl_agent.loops.tool import ToolLoop
from rl_agent.loops.workspace import check_row, workspace
from rl_agent.registry import create_sandboxes
from rl_agent.sandbox.base import exit_status
from rl_agent.tools.base import Tool
from rl_agent.types import SandboxLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from rl_agent.base import Generator
    from rl_agent.sandbox.base import Sandbox, SandboxKind
    from rl_agent.types import AgentLoopOutput, ParsedTurn, Tokenizer


class SweLoop(ToolLoop):
    """Coding agent loop: the model works on a copy of a repository with `bash` until it answers without a call.

    A row holds `prompt` (what is to be done), its files and its tests. The files are a `repository` (a folder or an
    archive, which is copied) at its `base_commit`, or `files` (texts by path), or what the row's `image` has. The tests
    are `{"command": ..., "files": {path: text}}` in `tests`, or SWE-bench's columns `FAIL_TO_PASS`, `PASS_TO_PASS` and
    `test_patch`, with `test_command`. Their files are written over the working copy before they run, so a model that
    edits them gains nothing. The reward is 1 where the command exits with 0 (and every named test passes), else 0; a
    test run past its deadline is a 0 as well, for it is the model's code that runs. What could not be tested is a
    failure. A row with `harbor`, the folder of a Harbor task, has its files, tests and reward.
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
        memory_bytes: Memory of one sandbox.
        venv: A virtual environment whose programs come first.
        needs: Isolation that is required of sandboxes of kind `process`; see `Grader`.
        sandbox: Kind of the sandboxes, or a mapping with `kind` and its options; see `create_sandboxes`.
        environment: Tasks that the rows are of, such as `harbor:FOLDER`.
        template_kwargs: Further variables of the chat template.

    Raises:
        TemplateError: the chat template cannot show tools or their answers.
        SandboxError: there is no such sandbox, or it cannot do what is asked for.
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
        sandbox: str | Mapping[str, Any] = "process",
        environment: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        del environment  # it has given the rows
        if test_timeout_s <= 0:
            raise ValueError(f"test_timeout_s is {test_timeout_s}; it must be positive")
        self._sandboxes = self.sandboxes_of(
            {
                "command_timeout_s": command_timeout_s,
                "max_commands": max_commands,
                "memory_bytes": memory_bytes,
                "venv": venv,
                "needs": needs,
                "sandbox": sandbox,
            }
        )
        self._shell = ShellTool()
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

    @classmethod
    def sandboxes_of(cls, options: Mapping[str, Any]) -> SandboxKind:
        """Kind of sandboxes of a loop with these options."""
        options = {name: p.default for name, p in inspect.signature(cls).parameters.items()} | {**options}
        limits = SandboxLimits(
            timeout_s=options["command_timeout_s"], memory_bytes=options["memory_bytes"], file_bytes=1 << 26
        )
        given = {name: options[name] for name in ("needs", "venv")}
        return create_sandboxes(options["sandbox"], limits=limits, max_running=options["max_commands"], **given)

    async def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids of the prompt, the schema of the shell included; the row's files and image are checked."""
        await check_row(row, self._sandboxes)
        return self._template_of((self._shell.name,)).prompt(messages_of(row)), ()

    async def run(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        """Run one row.

        Raises:
            RowError: a field is missing, or is not what it has to be.
            FailureError: the tests could not be run, or a generation was aborted before its first token.
        """
        messages, session_id = messages_of(row), uuid4().hex
        async with workspace(row, self._sandboxes) as work:
            self._shell.open(session_id, work.sandbox, work.variables)
            names = (self._shell.name,)
            session, metrics, fields = await self._converse(messages, names, sampling_params, session_id)
            rewards, tests = await work.graded(self._test_timeout_s)
        reward = rewards.pop("reward")
        metrics |= {f"reward/{name}": value for name, value in rewards.items()}
        return session.finish(reward=reward, metrics=metrics, extra_fields={**fields, "tests": tests})

    async def close(self) -> None:
        """Kill all processes."""
        await super().close()
        await self._sandboxes.close()


class ShellTool(Tool):
    """Tool `bash`: runs a command in the trajectory's sandbox. Files stay, processes do not."""

    def __init__(self) -> None:
        super().__init__(
            "bash",
            "Run a shell command in the working copy. Every command starts there anew; files last, variables do not.",
            {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        )
        self._sandboxes: dict[str, tuple[Sandbox, Mapping[str, str]]] = {}

    def open(self, session_id: str, sandbox: Sandbox, variables: Mapping[str, str]) -> None:
        """Assign a sandbox, and variables of its commands, to a trajectory, until its session ends."""
        self._sandboxes[session_id] = (sandbox, variables)

    async def call(self, arguments: Mapping[str, Any], session_id: str) -> str:
        """Run `arguments["command"]`; returns its output, and its exit status if that is not 0."""
        command = arguments.get("command")
        if not isinstance(command, str) or set(arguments) != {"command"}:
            raise ToolError(f"the arguments are {', '.join(arguments) or 'none'}; one is needed: command, a string")
        sandbox, variables = self._sandboxes[session_id]
        result = await sandbox.run(command, variables=variables)
        if result.kind not in ("ok", "error"):
            raise ToolError(f"{result.output}\n{result.error}".strip())
        status = exit_status(result)
        if result.kind == "error" and status is None:  # the command was not started, for example for a NUL in it
            raise ToolError(f"the command could not be run: {result.error.strip().rpartition(chr(10))[2]}")
        return (result.output.rstrip("\n") + (f"\n[exit status {status}]" if status else "")).lstrip("\n")

    async def end_session(self, session_id: str) -> None:
        """Forget the trajectory's sandbox."""
        self._sandboxes.pop(session_id, None)
