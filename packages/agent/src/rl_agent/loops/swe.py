"""Coding agent loop: shell commands in a sandboxed working copy, and tests that decide the reward."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from rl_agent.chat_template import messages_of
from rl_agent.errors import FailureError, RowError, ToolError
from rl_agent.loops.tool import ToolLoop
from rl_agent.sandbox import Grader
from rl_agent.tools.base import Tool
from rl_agent.types import Failure, FailureKind, SandboxLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from rl_agent.base import Generator
    from rl_agent.types import AgentLoopOutput, CodeResult, ParsedTurn, Tokenizer


_NOT_RUN = (126, 127)
"""Exit statuses of a shell that could not run a command at all."""


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
        self._grader = Grader(num_workers=max_commands, limits=limits, needs=needs)
        self._shell = ShellTool(self._grader, None if venv is None else Path(venv).resolve())
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
        command, test_files = _tests_of(row)
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rl-agent-swe-"))
        try:
            copy = folder / "copy"
            await asyncio.to_thread(_fill, copy, row)
            self._shell.open(session_id, copy)
            names = (self._shell.name,)
            session, metrics, fields = await self._converse(messages, names, sampling_params, session_id)
            await asyncio.to_thread(_write, copy, test_files)
            status, output = await self._test(command, copy)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)  # a model may have locked a folder
        tests = {"exit_status": status, "output": output[-2000:]}
        return session.finish(reward=float(status == 0), metrics=metrics, extra_fields={**fields, "tests": tests})

    async def _test(self, command: str, folder: Path) -> tuple[int | None, str]:
        result = await self._shell.run(command, folder, timeout_s=self._test_timeout_s)
        status = exit_status(result)
        if status in _NOT_RUN or (status is None and result.kind != "timeout"):
            message = f"the tests could not be run: {command!r} ended with {result.error!r} and said {result.output!r}"
            failure = Failure(kind=FailureKind.GRADER, stage="tests", message=message, is_retryable=status is None)
            raise FailureError(failure)
        return status, result.output


def _tests_of(row: Mapping[str, Any]) -> tuple[str, Mapping[str, str]]:
    tests = row.get("tests")
    if not isinstance(tests, Mapping) or not isinstance(tests.get("command"), str):
        raise RowError(
            f"field 'tests' of the row is {tests!r}; it needs a 'command' for the shell, and perhaps 'files'"
        )
    given = cast("Mapping[str, Any]", tests)
    return given["command"], _texts(given.get("files") or {}, "tests.files")


def _fill(copy: Path, row: Mapping[str, Any]) -> None:
    """Create the working copy."""
    repository, files = row.get("repository"), row.get("files")
    if (repository is None) == (files is None):
        raise RowError("the row needs one of 'repository', a folder, and 'files', texts by path")
    if files is not None:
        copy.mkdir()
        _write(copy, _texts(files, "files"))
        return
    if not isinstance(repository, str) or not Path(repository).is_dir():
        raise RowError(f"field 'repository' of the row is {repository!r}; it needs a folder")
    shutil.copytree(repository, copy, symlinks=True)


def _texts(files: Any, field: str) -> Mapping[str, str]:
    if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
        raise RowError(f"field {field!r} of the row is {files!r:.80}; it needs texts by path")
    return cast("Mapping[str, str]", files)


def _write(copy: Path, files: Mapping[str, str]) -> None:
    """Write files into the working copy and nowhere else, replacing what the model put at their paths."""
    for name, text in files.items():
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/"):
            raise RowError(f"file {name!r} of the row is outside of the working copy")
        path = copy
        for part in parts[:-1]:
            path /= part
            if path.is_symlink() or path.is_file():
                path.unlink()
            path.mkdir(exist_ok=True)
        path /= parts[-1]
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.write_text(text)


_RUN = (
    "import subprocess, sys\nsys.exit(subprocess.run(['bash', '-c', {command!r}], stdin=subprocess.DEVNULL).returncode)"
)


class ShellTool(Tool):
    """Tool `bash`: runs a command in the trajectory's working copy. Files stay, processes do not.

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
        """Assign a working folder to a trajectory, until its session ends."""
        self._folders[session_id] = folder

    async def call(self, arguments: Mapping[str, Any], session_id: str) -> str:
        """Run `arguments["command"]`; returns its output, and its exit status if that is not 0."""
        command = arguments.get("command")
        if not isinstance(command, str) or set(arguments) != {"command"}:
            raise ToolError(f"the arguments are {', '.join(arguments) or 'none'}; one is needed: command, a string")
        result = await self.run(command, self._folders[session_id])
        if result.kind not in ("ok", "error"):
            raise ToolError(f"{result.output}\n{result.error}".strip())
        status = exit_status(result)
        if result.kind == "error" and status is None:  # the command was not started, for example for a NUL in it
            raise ToolError(f"the command could not be run: {result.error.strip().rpartition(chr(10))[2]}")
        return (result.output.rstrip("\n") + (f"\n[exit status {status}]" if status else "")).lstrip("\n")

    async def run(self, command: str, folder: Path, *, timeout_s: float | None = None) -> CodeResult:
        """Run a command in `folder`, in its own process; `exit_status` reads how it ended.

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
    """Exit status of a command; None where it did not end."""
    if result.kind == "ok":
        return 0
    _, mark, status = result.error.rpartition("SystemExit: ")
    return int(status) if mark else None
