"""Harness loop: an agent of anybody's, a command or a Python function, runs in a sandbox and is trained unchanged.

It speaks to a recording proxy, whose address and key are in its environment, and edits a working copy of the row's
files. When it has ended, a verifier scores what it left.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
import shlex
import shutil
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rl_agent.base import AgentLoop
from rl_agent.chat_template import messages_of
from rl_agent.environments.python import load_callable
from rl_agent.errors import FailureError, LoopError, RowError, SandboxError, described
from rl_agent.loops.workspace import Workspace, check_row, tests_of, workspace
from rl_agent.proxy import RecordingProxy
from rl_agent.registry import create_sandboxes
from rl_agent.sandbox.base import exit_status
from rl_agent.sandbox.worker import Service
from rl_agent.tools.base import DeadlineError, in_thread, with_deadline
from rl_agent.types import LARGEST_REWARD, Failure, FailureKind, SandboxLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from rl_agent.base import Generator
    from rl_agent.sandbox.base import SandboxKind
    from rl_agent.types import AgentLoopOutput, CodeResult, ParsedTurn, Tokenizer

Credit = Literal["rollout", "trajectory", "last"]

_ENTRY = """
import asyncio, importlib, inspect, json, sys
sys.path.insert(0, {folder!r})
with open({row!r}) as file:
    row = json.load(file)
found = getattr(importlib.import_module({module!r}), {name!r})(row)
if inspect.isawaitable(found):
    async def wait():
        await found
    asyncio.run(wait())
"""
_SHOWN_CHARS = 2000


class HarnessLoop(AgentLoop):
    """Harness loop: runs an agent in a sandbox, and trains on what its model said through the recording proxy.

    A row holds `prompt`, whose last message is the task, and may hold files to work on and tests, or the folder of a
    Harbor task, as of `SweLoop`, and `command` in place of the option. The harness finds in its environment
    `OPENAI_BASE_URL` and `ANTHROPIC_BASE_URL`, a key in `OPENAI_API_KEY` and `ANTHROPIC_API_KEY`, the task in
    `RL_TASK`, and in `RL_ROW` the path of the row as JSON. The key opens the model and no reward, and there is no
    network but the proxy where the kernel has namespaces. What it samples is drawn by the run's sampling parameters,
    whatever it asks for.

    A context that the harness rewrites (compaction, subagents, retries) makes several trajectories of one rollout.
    Where several policies act, the `model` of a request names the one that answers and learns from the answer.
    `extra_fields["harness"]` has the exit status, None past the deadline, and the end of the output; a harness that
    fails after it has used the model is scored, one that never did is a failure.

    Args:
        server: Generator of tokens, such as a rollout server.
        tokenizer: Tokenizer of the served model.
        command: Command for bash, run in the working copy.
        entry: Python function of the harness in place of a command, `FILE.py:NAME` or `MODULE:NAME`, called with the
            row.
        verifier: Function that scores, `FILE.py:NAME`, `MODULE:NAME` or itself: called with the row, the folder of the
            working copy and the trajectories, it returns a reward, rewards by name that are added up, or one reward per
            trajectory. None: the row's `tests`, 1 where they exit with 0 and else 0.
        credit: Trajectories that the reward goes to: `rollout`, all of one rollout; `trajectory`, each has the one that
            the verifier returns for it; `last`, the last one (of each policy) alone, and the others are left out.
        parser: Tool-call parser; see `ToolLoop`.
        harness_timeout_s: Deadline of the harness, seconds.
        verifier_timeout_s: Deadline of the verifier, seconds.
        max_harnesses: Harnesses running at the same time in this process; more wait.
        memory_bytes: Memory of one harness, and address space of each of its processes.
        venv: A virtual environment whose programs come first; harnesses may read it.
        needs: Isolation that is required of sandboxes of kind `process`; see `Grader`.
        sandbox: Kind of the sandboxes, or a mapping with `kind` and its options; see `create_sandboxes`.
        environment: Tasks that the rows are of, such as `harbor:FOLDER`.
        template_kwargs: Further variables of the chat template.

    Raises:
        LoopError: there is neither a command nor an entry, or both.
        SandboxError: there is no such sandbox, or it cannot do what is asked for.
        PluginError: the entry or the verifier cannot be loaded.
        TemplateError: the chat template cannot continue a conversation.
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        server: Generator,
        tokenizer: Tokenizer,
        *,
        command: str | None = None,
        entry: str | None = None,
        verifier: str | Callable[..., Any] | None = None,
        credit: Credit = "rollout",
        parser: str | Callable[[str], ParsedTurn] = "hermes",
        harness_timeout_s: float = 600.0,
        verifier_timeout_s: float = 300.0,
        max_harnesses: int = 8,
        memory_bytes: int = 1 << 32,
        venv: str | None = None,
        needs: Collection[str] = (),
        sandbox: str | Mapping[str, Any] = "process",
        environment: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        del environment  # it has given the rows
        super().__init__(server, tokenizer)
        if command is not None and entry is not None:
            raise LoopError(f"the harness has a command, {command!r}, and an entry, {entry!r}; leave one of them out")
        if credit not in ("rollout", "trajectory", "last"):
            raise LoopError(f"credit is {credit!r}; it is one of rollout, trajectory and last")
        if harness_timeout_s <= 0 or verifier_timeout_s <= 0:
            raise ValueError(
                f"harness_timeout_s={harness_timeout_s} and verifier_timeout_s={verifier_timeout_s} must be positive"
            )
        self._command, self._entry = command, None if entry is None else _Entry(entry)
        self._verify = load_callable(verifier, "verifier") if isinstance(verifier, str) else verifier
        self._credit: Credit = credit
        self._verifier_timeout_s = verifier_timeout_s
        self._sandboxes = self.sandboxes_of(
            {
                "harness_timeout_s": harness_timeout_s,
                "max_harnesses": max_harnesses,
                "memory_bytes": memory_bytes,
                "venv": venv,
                "needs": needs,
                "sandbox": sandbox,
            }
        )
        self._timeout_s = harness_timeout_s
        host = self._sandboxes.proxy_host
        self._proxy = RecordingProxy(
            server,
            tokenizer,
            parser=parser,
            template_kwargs=template_kwargs,
            host=host,
            api_token=None if host == "127.0.0.1" else secrets.token_hex(16),
        )
        self._socket: Path | None = None
        self._starting = asyncio.Lock()

    async def run(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> list[AgentLoopOutput]:
        """Run the harness on one row.

        Raises:
            RowError: a field is missing, or is not what it has to be.
            FailureError: the harness never used the model, or nothing could be scored.
            Exception: the error of the server that the harness's last request ended with.
        """
        task, command = _task_of(row), row.get("command", self._command)
        if not isinstance(command, str) and (command is not None or self._entry is None):
            raise RowError(f"field 'command' of the row is {command!r}, and the loop has no command; it needs text")
        needs_tests = self._verify is None
        tests_of(row, is_needed=needs_tests)
        service = await self._serve()
        given = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rl-agent-row-"))
        try:
            await asyncio.to_thread(_write_row, given, row)
            readable = (given, *(self._entry.readable if command is None and self._entry is not None else ()))
            opening = workspace(
                *(row, self._sandboxes), needs_tests=needs_tests, needs_files=False, readable=readable, service=service
            )
            async with opening as work:
                session, key = self._proxy.create_session(sampling_params=sampling_params)
                try:
                    result = await self._harness(command, work, task, given, key, service)
                    failure = self._proxy.failure(session)
                finally:
                    outputs = self._proxy.finish(session)
                if failure is not None:
                    raise failure
                if not outputs:
                    said = f"{result.error.strip()[-_SHOWN_CHARS:]}\n{result.output[-_SHOWN_CHARS:]}".strip()
                    message = f"the harness never asked the model; it said: {said}"
                    raise _failure(FailureKind.ENVIRONMENT, "harness", message)
                ended = {"exit_status": exit_status(result), "output": result.output[-_SHOWN_CHARS:]}
                outputs = [replace(each, extra_fields={**each.extra_fields, "harness": ended}) for each in outputs]
                return await self._scored(row, work, outputs)
        finally:
            await asyncio.to_thread(shutil.rmtree, given, ignore_errors=True)

    async def prompt(self, row: Mapping[str, Any]) -> None:
        """None: the harness writes its prompts itself. The row's files and image are checked."""
        await check_row(row, self._sandboxes, needs_tests=self._verify is None)

    @classmethod
    def sandboxes_of(cls, options: Mapping[str, Any]) -> SandboxKind:
        """Kind of sandboxes of a loop with these options.

        Raises:
            SandboxError: there is no such kind, or its network does not reach the proxy.
        """
        options = {name: p.default for name, p in inspect.signature(cls).parameters.items()} | {**options}
        limits = SandboxLimits(
            timeout_s=options["harness_timeout_s"],
            memory_bytes=options["memory_bytes"],
            file_bytes=1 << 28,
            num_processes=512,
        )
        given = {name: options[name] for name in ("needs", "venv")}
        kind = create_sandboxes(options["sandbox"], limits=limits, max_running=options["max_harnesses"], **given)
        if kind.network == "none":
            raise SandboxError("a harness asks its model through the proxy, which network=none shuts off; leave it out")
        return kind

    async def close(self) -> None:
        """End the harnesses and the proxy."""
        await self._sandboxes.close()
        await self._proxy.stop()
        if self._socket is not None:
            await asyncio.to_thread(shutil.rmtree, self._socket.parent, ignore_errors=True)

    async def _serve(self) -> Service:
        """Start the proxy, once: on loopback, and at a UNIX socket for sandboxes that have a network of their own."""
        async with self._starting:
            if self._socket is None:
                for name, policy in self.policies.items():
                    self._proxy.add_policy(name, policy.server, policy.tokenizer)
                await self._proxy.start()
                folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rl-agent-proxy-"))
                await self._proxy.listen(folder / "proxy")
                self._socket = folder / "proxy"
        return Service(port=self._proxy.port, socket=self._socket)

    async def _harness(
        self, command: str | None, work: Workspace, task: str, given: Path, key: str, service: Service
    ) -> CodeResult:
        """Run the command, or the entry, until it ends or its deadline passes."""
        row = f"{work.sandbox.path_of(given)}/row.json"
        if command is None:
            assert self._entry is not None, "the row was checked"
            folders = [work.sandbox.path_of(folder) for folder in self._entry.readable]
            command = f"exec python -c {shlex.quote(self._entry.code(row, folders))}"
        url = work.sandbox.url_of(service)
        variables = {
            **work.variables,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            "RL_TASK": task,
            "RL_ROW": row,
        }
        timeout_s = self._timeout_s
        if work.task is not None:
            timeout_s = min(timeout_s, float(work.task.section("agent").get("timeout_sec", timeout_s)))
        return await work.sandbox.run(command, timeout_s=timeout_s, variables=variables)

    async def _scored(
        self, row: Mapping[str, Any], work: Workspace, outputs: list[AgentLoopOutput]
    ) -> list[AgentLoopOutput]:
        if self._verify is None:
            rewards, shown = await work.graded(self._verifier_timeout_s)
            reward, terms = rewards.pop("reward"), {f"reward/{name}": value for name, value in rewards.items()}
            outputs = [
                replace(each, extra_fields={**each.extra_fields, "tests": shown}, metrics={**each.metrics, **terms})
                for each in outputs
            ]
            return credited(outputs, reward, self._credit)
        await work.sandbox.sync()
        copy = work.folder
        try:
            found = await with_deadline(self._verified(row, copy, outputs), self._verifier_timeout_s)
        except DeadlineError as error:
            message = f"the verifier did not end within {self._verifier_timeout_s:g} s"
            raise _failure(FailureKind.GRADER, "verifier", message) from error
        except FailureError:
            raise
        except Exception as error:
            raise _failure(FailureKind.GRADER, "verifier", f"the verifier raised {described(error)}") from error
        return credited(outputs, found, self._credit)

    async def _verified(self, row: Mapping[str, Any], copy: Path, outputs: list[AgentLoopOutput]) -> Any:
        verify = self._verify
        assert verify is not None, "it is called where there is one"
        found = await in_thread(lambda: verify(row, copy, outputs))
        return await found if inspect.isawaitable(found) else found


class _Entry:
    """Python function of a harness, `FILE.py:NAME` or `MODULE:NAME`, which is imported in the sandbox alone."""

    def __init__(self, name: str) -> None:
        where, mark, self._name = name.rpartition(":")
        if not mark or not where or not self._name.isidentifier():
            raise LoopError(f"entry {name!r} is neither FILE.py:NAME nor MODULE:NAME")
        self.readable: list[Path] = []
        """Folders that the sandbox has to show."""
        self._module = where
        if where.endswith(".py"):
            file = Path(where).resolve()
            if not file.is_file():
                raise LoopError(f"entry {name!r}: there is no file {where}")
            self.readable, self._module = [file.parent], file.stem

    def code(self, row: str, folders: Sequence[str]) -> str:
        """Program that calls it with a row, by their paths in the sandbox."""
        folder = folders[0] if folders else ""
        return textwrap.dedent(_ENTRY).format(folder=folder, row=row, module=self._module, name=self._name)


def credited(outputs: list[AgentLoopOutput], reward: Any, credit: Credit) -> list[AgentLoopOutput]:
    """Trajectories of one rollout with the reward of its verifier.

    Args:
        outputs: Trajectories in the order in which they ended.
        reward: Number, numbers by name that are added up, or one number per trajectory.
        credit: See `HarnessLoop`.

    Raises:
        FailureError: it is none of these, or does not go with the policy of credit.
    """
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        given = [_checked(each) for each in cast("Sequence[Any]", reward)]
        if credit != "trajectory" or len(given) != len(outputs):
            raise _failure(
                *(FailureKind.GRADER, "verifier"),
                f"the verifier returned {len(given)} rewards for {len(outputs)} trajectories, with credit={credit}; "
                "one per trajectory goes with credit=trajectory",
            )
        return [replace(each, reward=value) for each, value in zip(outputs, given, strict=True)]
    if credit == "trajectory":
        raise _failure(
            *(FailureKind.GRADER, "verifier"),
            f"the verifier returned {reward!r:.80}; credit=trajectory needs a list of {len(outputs)} rewards",
        )
    terms: dict[str, float] = {}
    if isinstance(reward, Mapping):
        by_name = cast("Mapping[Any, Any]", reward)
        terms = {f"reward/{name}": _checked(value) for name, value in by_name.items()}
    total = sum(terms.values()) if terms else _checked(reward)
    chosen = [*{each.policy: each for each in outputs}.values()] if credit == "last" else outputs
    counts = {"num_left_out": float(len(outputs) - len(chosen))}
    return [replace(each, reward=total, metrics={**each.metrics, **terms, **counts}) for each in chosen]


def _checked(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        value = getattr(value, "item", lambda: value)()  # a scalar of numpy or torch
    if not isinstance(value, (int, float)) or not abs(value) <= LARGEST_REWARD:
        raise _failure(
            *(FailureKind.GRADER, "verifier"),
            f"the verifier returned {value!r:.80}; a number of at most {LARGEST_REWARD:g} is needed",
        )
    return float(value)


def _task_of(row: Mapping[str, Any]) -> str:
    content: Any = messages_of(row)[-1]["content"]
    if not isinstance(content, str):
        raise RowError(f"the last message of field 'prompt' is {content!r:.80}; a harness takes its task as text")
    if "\x00" in content:
        raise RowError("the last message of field 'prompt' holds a NUL character; a harness takes its task as text")
    return content


def _write_row(folder: Path, row: Mapping[str, Any]) -> None:
    (folder / "row.json").write_text(json.dumps({**row}, default=str))


def _failure(kind: FailureKind, stage: str, message: str) -> FailureError:
    is_retryable = kind is not FailureKind.GRADER
    return FailureError(Failure(kind=kind, stage=stage, message=message, is_retryable=is_retryable))
