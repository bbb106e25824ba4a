"""Working copies: the files of a row in a sandbox, and the tests that decide its reward.

A row's files are its `repository`, a folder or an archive, at its `base_commit`; or its `files`, texts by path; or
what its `image` has in its working folder. Its tests are `tests`, or SWE-bench's columns, or those of its Harbor task.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rl_agent.environments.harbor import LOGS, REWARD, TESTS, HarborTask, read_reward
from rl_agent.errors import FailureError, RowError, SandboxError
from rl_agent.sandbox.base import Sandbox, SandboxKind, SandboxSpec, exit_status
from rl_agent.sandbox.folders import write_below
from rl_agent.types import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from rl_agent.sandbox.worker import Service

_NOT_RUN = (126, 127)
"""Exit statuses of a shell that could not run a command at all."""
_SHOWN_CHARS = 2000
_BATCH_CHARS = 100_000
"""Characters of test names in one command: Linux takes 128 KiB in one argument."""
_NOT_PASSED = re.compile(r"\b\d+ (?:skipped|xfailed|deselected)\b|\b(?:skipped|expected failures)=\d+")
_DIALECT = re.compile(r"(\w+) \(([\w.]+)\)")
"""Name of a test as unittest prints it."""
_GIT = ("git", "-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tests:
    """Tests of a row."""

    command: str
    """Command for bash."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Files by path, which are written over what the agent left before the command runs."""
    names: tuple[str, ...] = ()
    """Tests that have to pass, which the command is given; empty: its exit status alone decides."""
    patch: str = ""
    """Patch with files of the tests, in Git's format."""


@dataclass(slots=True, kw_only=True)
class Workspace:
    """Sandbox with the files of a row."""

    sandbox: Sandbox
    """Sandbox."""
    folder: Path
    """Folder of this machine with the working folder's files, once `Sandbox.sync` has run."""
    variables: Mapping[str, str]
    """Environment variables of the row's own image."""
    tests: Tests | None
    """Tests of the row; None where it has none."""
    task: HarborTask | None
    """Harbor task of the row, if it is one."""

    async def graded(self, timeout_s: float) -> tuple[dict[str, float], dict[str, Any]]:
        """Run the tests; returns the rewards by name, `reward` among them, and what to show of the run.

        A run past its deadline gives 0: it is the agent's code that runs.

        Raises:
            FailureError: they could not be run.
        """
        assert self.tests is not None, "the row was checked"
        for path, data in self.tests.files.items():
            await self.sandbox.write(path, data)
        variables = dict(self.variables)
        if self.task is not None:
            timeout_s = float(self.task.section("verifier").get("timeout_sec", timeout_s))
            variables |= self.task.verifier_variables
        status: int | None = 0
        output = ""
        for command in _commands(self.tests):
            result = await self.sandbox.run(command, timeout_s=timeout_s, variables=variables)
            status, output = exit_status(result), output + result.output
            if status in _NOT_RUN or (status is None and result.kind not in ("timeout", "memory", "output")):
                said = f"{command[:500]!r} ended with {result.error!r} and said {result.output[-_SHOWN_CHARS:]!r}"
                raise _failure(f"the tests could not be run: {said}", is_retryable=status is None)
            if status != 0:
                break
        shown = {"exit_status": status, "output": output[-_SHOWN_CHARS:]}
        if self.task is not None:
            return await self._harbor_reward(status, output), shown
        is_passed = status == 0 and not (self.tests.names and _NOT_PASSED.search(output))
        return {"reward": float(is_passed)}, shown

    async def _harbor_reward(self, status: int | None, output: str) -> dict[str, float]:
        if status is None:
            return {"reward": 0.0}
        texts = dict[str, str]()
        for ending in ("json", "txt"):
            try:
                texts[ending] = (await self.sandbox.read(f"{REWARD}.{ending}")).decode(errors="replace")
            except FileNotFoundError:
                continue
        try:
            return read_reward(texts)
        except (ValueError, TypeError) as error:
            said = output[-_SHOWN_CHARS:]
            message = f"the tests gave no reward: {error}; their exit status is {status}, and they said {said!r}"
            raise _failure(message, is_retryable=False) from error


@asynccontextmanager
async def workspace(
    row: Mapping[str, Any],
    kind: SandboxKind,
    *,
    needs_tests: bool = True,
    needs_files: bool = True,
    readable: tuple[Path, ...] = (),
    service: Service | None = None,
) -> AsyncGenerator[Workspace]:
    """Sandbox with the files of a row; it ends, and its files are deleted, with the context.

    Args:
        row: Dataset row.
        kind: Kind of the sandbox.
        needs_tests: Whether a row without tests is an error.
        needs_files: Whether a row without files is an error; else it has an empty working folder.
        readable: See `SandboxSpec`.
        service: See `SandboxSpec`.

    Raises:
        RowError: a field of the row is missing, or is not what it has to be.
        SandboxError: no sandbox can be started.
    """
    tests, task = tests_of(row, is_needed=needs_tests), harbor_of(row)
    scratch = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rl-agent-"))
    try:
        copy, variables = scratch / "copy", dict[str, str]()
        spec = SandboxSpec(readable=readable, service=service, image=image_of(row))
        has_files = row.get("repository") is not None or row.get("files") is not None
        if task is not None:
            spec, variables = await _harbor_spec(task, kind, spec, copy)
        elif has_files or spec.image is None:
            await asyncio.to_thread(_fill, copy, row if has_files or needs_files else {"files": {}})
            spec = replace(spec, folder=copy)
        async with kind.open(spec) as sandbox:
            if tests is not None and tests.patch:
                files = await _patched(sandbox, tests.patch)
                tests = Tests(command=tests.command, names=tests.names, files={**tests.files, **files})
            yield Workspace(sandbox=sandbox, folder=copy, variables=variables, tests=tests, task=task)
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)  # a model may have locked a folder


async def check_row(row: Mapping[str, Any], kind: SandboxKind, *, needs_tests: bool = True) -> None:
    """Check the fields of a row and its image, without a sandbox for it.

    Raises:
        RowError: one is missing, or is not what it has to be; or the image is not here.
    """
    tests_of(row, is_needed=needs_tests)
    task, image = harbor_of(row), image_of(row)
    try:
        if task is not None:
            await _harbor_spec(task, kind, SandboxSpec(), None)
        elif image is not None:
            await kind.check_image(image)
    except SandboxError as error:
        raise RowError(f"field 'image' of the row: {error}" if task is None else str(error)) from error
    if row.get("repository") is not None:
        _repository_of(row)


def image_of(row: Mapping[str, Any]) -> str | None:
    """Image of a row; None where it names none.

    Raises:
        RowError: it is no text.
    """
    image = row.get("image")
    if image is not None and (not isinstance(image, str) or not image or image.startswith("-")):
        raise RowError(f"field 'image' of the row is {image!r}; it needs the name of an image")
    return image


def harbor_of(row: Mapping[str, Any]) -> HarborTask | None:
    """Harbor task of a row; None where it is none.

    Raises:
        RowError: there is no such task.
    """
    folder = row.get("harbor")
    if folder is None:
        return None
    if not isinstance(folder, str):
        raise RowError(f"field 'harbor' of the row is {folder!r}; it needs the folder of a task")
    return HarborTask.read(Path(folder))


def tests_of(row: Mapping[str, Any], *, is_needed: bool) -> Tests | None:
    """Tests of a row: `tests`, a command and files; SWE-bench's `FAIL_TO_PASS` and `PASS_TO_PASS`; a Harbor task's.

    Raises:
        RowError: there are none and they are needed, or a field is not what it has to be.
    """
    if (task := harbor_of(row)) is not None:
        run = f"mkdir -p {LOGS}/verifier && bash {TESTS}/test.sh"
        return Tests(command=run, files=task.test_files())
    if row.get("FAIL_TO_PASS") is not None:
        return _swe_bench_tests(row)
    if row.get("tests") is None and not is_needed:
        return None
    given = row.get("tests")
    if not isinstance(given, Mapping) or not isinstance(given.get("command"), str):
        raise RowError(
            f"field 'tests' of the row is {given!r:.80}; it needs a 'command' for the shell, and perhaps 'files'"
        )
    tests = cast("Mapping[str, Any]", given)
    files = _texts(tests.get("files") or {}, "tests.files")
    return Tests(command=tests["command"], files=_encoded(files))


def _swe_bench_tests(row: Mapping[str, Any]) -> Tests:
    names = list[str]()
    for column in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        found: Any = row.get(column)
        try:
            found = json.loads(found) if isinstance(found, str) else found
        except ValueError as error:
            raise RowError(f"field {column!r} of the row is no JSON: {error}") from error
        if found is None and column == "PASS_TO_PASS":
            continue
        if not isinstance(found, Sequence) or not all(isinstance(name, str) for name in cast("list[Any]", found)):
            raise RowError(f"field {column!r} of the row is {found!r:.80}; it needs a list of names of tests")
        names += cast("list[str]", found)
    if not names:
        raise RowError("fields 'FAIL_TO_PASS' and 'PASS_TO_PASS' of the row name no test")
    command, patch = row.get("test_command") or "python -m pytest -q", row.get("test_patch") or ""
    for name, value in (("test_command", command), ("test_patch", patch)):
        if not isinstance(value, str):
            raise RowError(f"field {name!r} of the row is {value!r:.80}; it needs text")
    return Tests(command=command, names=tuple(names), patch=patch)


def _commands(tests: Tests) -> list[str]:
    """Commands that run the tests, with as many names in each as a command line takes."""
    if not tests.names:
        return [tests.command]
    commands, batch = list[str](), list[str]()
    for number, name in enumerate(tests.names, start=1):
        match = _DIALECT.fullmatch(name)
        batch.append(shlex.quote(name if match is None else _dotted(match[1], match[2])))
        if sum(map(len, batch)) > _BATCH_CHARS or number == len(tests.names):
            words = " ".join(batch)
            has_mark = "{tests}" in tests.command
            commands.append(tests.command.replace("{tests}", words) if has_mark else f"{tests.command} {words}")
            batch = []
    return commands


def _dotted(test: str, owner: str) -> str:
    """Name of a test as unittest takes it, of what it prints: `test (module.Class)`, or the whole name there."""
    return owner if owner.endswith(f".{test}") else f"{owner}.{test}"


async def _patched(sandbox: Sandbox, patch: str) -> dict[str, bytes]:
    """Files that a patch leaves, by path; found before the agent begins, and taken back.

    Raises:
        RowError: the patch does not apply.
    """
    name = ".rl-agent.patch"
    git = shlex.join(_GIT)
    await sandbox.write(name, patch.encode())
    applied = await sandbox.run(f"{git} apply {name}")
    if applied.kind != "ok":
        raise RowError(
            f"field 'test_patch' of the row does not apply: {(applied.output or applied.error).strip()[-500:]}"
        )
    paths = re.findall(r"(?m)^\+\+\+ b/(.+?)\t?$", patch)
    files = {path: await sandbox.read(path) for path in paths}
    undone = await sandbox.run(f"{git} apply -R {name} && rm {name}")
    if undone.kind != "ok":
        raise RowError(f"field 'test_patch' of the row cannot be taken back: {undone.output.strip()[-500:]}")
    return files


async def _harbor_spec(
    task: HarborTask, kind: SandboxKind, spec: SandboxSpec, copy: Path | None
) -> tuple[SandboxSpec, dict[str, str]]:
    """Contents of a Harbor task's sandbox, and variables of its image.

    Raises:
        RowError: its image cannot be made, or it wants more memory, processors or room than a sandbox has.
        SandboxError: the image is not here, or cannot be built.
    """
    wanted = int(task.number("memory_mb"))
    if wanted << 20 > kind.limits.memory_bytes:
        raise RowError(
            f"task {task.folder.name} wants memory_mb={wanted}, and a sandbox has {kind.limits.memory_bytes >> 20}: "
            f"give agent.options={{memory_bytes: {wanted << 20}}}"
        )
    spec = replace(
        spec, extra=(TESTS, LOGS), num_cpus=task.number("cpus"), storage_bytes=int(task.number("storage_mb")) << 20
    )
    try:
        await kind.check_room(spec)
    except SandboxError as error:
        raise RowError(f"task {task.folder.name}: {error}") from error
    if task.image is not None:
        await kind.check_image(task.image)
        return replace(spec, image=task.image), {}
    if kind.builds_images:
        await kind.build(task.folder / "environment", task.build_name)
        return replace(spec, image=task.build_name), {}
    workdir, variables = await asyncio.to_thread(task.unbuilt, copy)
    return replace(spec, workdir=workdir, folder=copy), variables


def _fill(copy: Path, row: Mapping[str, Any]) -> None:
    """Create the working copy."""
    repository, files = row.get("repository"), row.get("files")
    if (repository is None) == (files is None):
        raise RowError("the row needs one of 'repository', a folder, and 'files', texts by path")
    if files is not None:
        copy.mkdir()
        for name, data in _encoded(_texts(files, "files")).items():
            write_below(copy, name, data)
        return
    source = _repository_of(row)
    if source.is_file():
        source = _unpacked(source, copy.parent / "archive")
    if row.get("base_commit") is None:
        shutil.copytree(source, copy, symlinks=True)
    else:
        _check_out(source, str(row["base_commit"]), copy)


def _repository_of(row: Mapping[str, Any]) -> Path:
    repository = row.get("repository")
    if not isinstance(repository, str) or "\0" in repository or not Path(repository).exists():
        raise RowError(f"field 'repository' of the row is {repository!r}; it needs a folder or an archive")
    return Path(repository).resolve()


def _unpacked(archive: Path, folder: Path) -> Path:
    """Folder of an archive's files: of its only folder, if it has one only."""
    try:
        if tarfile.is_tarfile(archive):
            shutil.unpack_archive(archive, folder, filter="data")
        else:
            shutil.unpack_archive(archive, folder)
    except (shutil.ReadError, tarfile.TarError, ValueError, OSError) as error:
        raise RowError(f"field 'repository' of the row, {archive}, cannot be unpacked: {error}") from error
    inside = [*folder.iterdir()]
    return inside[0] if len(inside) == 1 and inside[0].is_dir() and inside[0].name != ".git" else folder


def _check_out(repository: Path, commit: str, copy: Path) -> None:
    """Write a commit's files, as a repository of one commit: later ones may hold the solution."""
    copy.mkdir()
    if not re.fullmatch(r"\w[\w./-]*", commit):
        raise RowError(f"field 'base_commit' of the row is {commit!r}; it needs a commit")
    try:
        packed = subprocess.run(
            [*_GIT, "-C", str(repository), "archive", "--format=tar", commit], check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", str(copy)], input=packed, check=True, capture_output=True)
        own = [*_GIT, "-C", str(copy), "-c", "user.name=rl-agent", "-c", "user.email=rl-agent@localhost"]
        for words in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-q", "--allow-empty", "-m", f"base {commit}"]):
            subprocess.run([*own, *words], check=True, capture_output=True)
    except FileNotFoundError as error:
        raise RowError(f"field 'base_commit' of the row needs {error.filename}, which is not installed") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()[-500:]
        raise RowError(f"{repository} has no commit {commit!r} that can be checked out: {said}") from error


def _texts(files: Any, name: str) -> Mapping[str, str]:
    if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
        raise RowError(f"field {name!r} of the row is {files!r:.80}; it needs texts by path")
    return cast("Mapping[str, str]", files)


def _encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {name: text.encode(errors="replace") for name, text in files.items()}


def _failure(message: str, *, is_retryable: bool) -> FailureError:
    failure = Failure(kind=FailureKind.GRADER, stage="tests", message=message, is_retryable=is_retryable)
    return FailureError(failure)
