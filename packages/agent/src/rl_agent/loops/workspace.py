"""Working copies: the files of a row, commands that run on them in the sandbox, and its tests."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from rl_agent.errors import FailureError, RowError
from rl_agent.types import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from rl_agent.sandbox import Grader
    from rl_agent.sandbox.worker import Service
    from rl_agent.types import CodeResult

_NOT_RUN = (126, 127)
"""Exit statuses of a shell that could not run a command at all."""
_RUN = (
    "import subprocess, sys\nsys.exit(subprocess.run(['bash', '-c', {command!r}], stdin=subprocess.DEVNULL).returncode)"
)


class Shell:
    """Shell that runs commands in working copies, each in a sandbox of its own. Files stay, processes do not.

    Args:
        grader: Gives the processes.
        venv: A virtual environment whose programs come first; code may read it.
    """

    def __init__(self, grader: Grader, venv: Path | None = None) -> None:
        self._grader, self._venv = grader, venv

    async def run(
        self,
        command: str,
        folder: Path,
        *,
        timeout_s: float | None = None,
        variables: Mapping[str, str] | None = None,
        readable: Sequence[Path] = (),
        service: Service | None = None,
    ) -> CodeResult:
        """Run a command in `folder`; `exit_status` reads how it ended.

        Args:
            command: For bash.
            folder: Folder that it works in and may change.
            timeout_s: Deadline, seconds; None: the grader's.
            variables: Environment variables.
            readable: Further files and folders that it may read.
            service: A service of ours that it may connect to.

        Raises:
            FailureError, SandboxError: see `Grader.run`.
        """
        programs = ":".join(str(place / "bin") for place in (self._venv, Path(sys.base_prefix)) if place is not None)
        own = {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", **(variables or {})}
        exports = "".join(f" {name}={shlex.quote(value)}" for name, value in own.items())
        exports = f'export PATH={shlex.quote(programs)}:"$PATH"{exports}'
        given = [*readable, *([] if self._venv is None else [self._venv])]
        async with self._grader.worker(workspace=folder, readable=given, service=service) as worker:
            limit = timeout_s or self._grader.limits.timeout_s
            return await worker.run(_RUN.format(command=f"{exports}\n{command}"), "", limit, is_fresh=True)

    async def test(self, command: str, folder: Path, timeout_s: float) -> tuple[int | None, str]:
        """Run the tests of a row; returns their exit status, None past the deadline, and their output.

        Raises:
            FailureError: they could not be run.
        """
        result = await self.run(command, folder, timeout_s=timeout_s)
        status = exit_status(result)
        if status in _NOT_RUN or (status is None and result.kind != "timeout"):
            message = f"the tests could not be run: {command!r} ended with {result.error!r} and said {result.output!r}"
            failure = Failure(kind=FailureKind.GRADER, stage="tests", message=message, is_retryable=status is None)
            raise FailureError(failure)
        return status, result.output

    async def close(self) -> None:
        """Kill all processes."""
        await self._grader.close()


@asynccontextmanager
async def working_copy(row: Mapping[str, Any]) -> AsyncGenerator[Path, None]:
    """Working copy of a row's `repository`, a folder, or of its `files`, texts by path; deleted at the end.

    Raises:
        RowError: the row has neither or both, or they are something else.
    """
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rl-agent-"))
    try:
        copy = folder / "copy"
        await asyncio.to_thread(_fill, copy, row)
        yield copy
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)  # a model may have locked a folder


def exit_status(result: CodeResult) -> int | None:
    """Exit status of a command; None where it did not end."""
    if result.kind == "ok":
        return 0
    _, mark, status = result.error.rpartition("SystemExit: ")
    return int(status) if mark else None


def tests_of(row: Mapping[str, Any]) -> tuple[str, Mapping[str, str]]:
    """Command of a row's `tests`, and the files that are written over the working copy before it runs.

    Raises:
        RowError: there is no command, or the files are no texts by path.
    """
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
        write_files(copy, _texts(files, "files"))
        return
    if not isinstance(repository, str) or not Path(repository).is_dir():
        raise RowError(f"field 'repository' of the row is {repository!r}; it needs a folder")
    shutil.copytree(repository, copy, symlinks=True)


def _texts(files: Any, field: str) -> Mapping[str, str]:
    if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
        raise RowError(f"field {field!r} of the row is {files!r:.80}; it needs texts by path")
    return cast("Mapping[str, str]", files)


def write_files(copy: Path, files: Mapping[str, str]) -> None:
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
