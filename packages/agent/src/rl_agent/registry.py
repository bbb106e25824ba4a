"""Registry of plug-ins: loops, parsers, tools and environments by the name of their entry point."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import asdict, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rl_agent.base import AgentLoop
from rl_agent.errors import LoopError, PluginError, SandboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from rl_agent.base import Generator, Policy, PromptTokenizer, RolloutRunner
    from rl_agent.environments.base import EnvironmentSource
    from rl_agent.sandbox import Grader
    from rl_agent.sandbox.base import SandboxKind
    from rl_agent.sandbox.grading import SandboxGrader
    from rl_agent.sandbox.launches import ScriptReader
    from rl_agent.types import SandboxLimits, Tokenizer

GROUP = "rl_agent.loops"
HUBS = "rl_agent.hubs"
SANDBOXES = "rl_agent.sandboxes"
_ALL_HAVE = {"self", "args", "kwargs", "common", "limits", "max_running"}


def create_loop(
    name: str | type[AgentLoop],
    server: Generator,
    tokenizer: Tokenizer,
    policies: Mapping[str, Policy] | None = None,
    /,
    **options: Any,
) -> AgentLoop:
    """Create the agent loop called `name`, or one of a class of the caller's own.

    Args:
        name: An entry point of the group `rl_agent.loops`, whose value is an `AgentLoop` subclass, or such a class.
            This package ships `single_turn`, `tool`, `gym`, `actions`, `self_play`, `reasoning_gym`, `verifiers`,
            `swe`, `gui` and `harness`.
        server: Generator of tokens: a rollout server, a client of one, or a router.
        tokenizer: The tokenizer of the model that is served.
        policies: Policies by name, where several act, the default one among them.
        **options: Keyword arguments of the loop's own constructor; see its class.

    Raises:
        LoopError: no such loop is installed, it cannot be imported here, or it has no such option.
    """
    loop: Any = _load(GROUP, name, f"agent loop {name!r}", LoopError)[0] if isinstance(name, str) else name
    if not (isinstance(loop, type) and issubclass(loop, AgentLoop)):
        what = f"{getattr(loop, '__module__', '')}:{getattr(loop, '__qualname__', loop)}"
        raise LoopError(f"agent loop {name!r} is {what}, which is not a subclass of rl_agent.AgentLoop")
    known = [p.name for p in inspect.signature(loop).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if unknown := [option for option in options if option not in known]:
        raise LoopError(f"agent loop {name!r} has no option {unknown[0]!r}; it has: {', '.join(known) or 'none'}")
    made: AgentLoop = loop(server, tokenizer, **options)
    made.policies = policies or made.policies
    return made


def load_plugin(kind: Literal["parsers", "tools", "environments"], name: str) -> Any:
    """Load the object behind the entry point `name` of the group `rl_agent.<kind>`.

    Raises:
        PluginError: there is none, or it cannot be imported here.
    """
    return _load(f"rl_agent.{kind}", name, f"{kind.removesuffix('s')} {name!r}", PluginError)[0]


def create_environments(name: str, arguments: Mapping[str, Any] | None = None) -> EnvironmentSource:
    """Create the source of environments that a name leads to.

    Args:
        name: `HUB:NAME` with an entry point of the group `rl_agent.hubs`, `FILE.py:NAME`, or `MODULE:NAME`.
        arguments: Arguments of the environments, for rows that give no others.

    Raises:
        PluginError: it leads nowhere, or what it needs is not installed.
    """
    hub, mark, rest = name.partition(":")
    if not mark or not rest:
        raise PluginError(
            f"environment {name!r} is none of {', '.join(sorted(_hubs()))}:NAME, FILE.py:NAME, MODULE:NAME"
        )
    if hub not in _hubs():
        from rl_agent.environments.python import PythonEnvironments

        return PythonEnvironments(name, arguments)
    return _load(HUBS, hub, f"hub {hub!r}", PluginError)[0](rest, arguments)


def loop_of_environments(name: str) -> str:
    """Name of the agent loop that plays the environments of `create_environments(name)`."""
    hub = name.partition(":")[0]
    if hub not in _hubs():
        return "gym"
    if entry_points(group=GROUP, name=hub):
        return hub
    try:
        return getattr(_load(HUBS, hub, f"hub {hub!r}", PluginError)[0], "loop", "gym")
    except PluginError:  # whoever plays it says what is missing
        return "gym"


def _hubs() -> set[str]:
    return {entry.name for entry in entry_points(group=HUBS)}


def create_tokenizer(model_path: str, *, takes_videos: bool = True) -> PromptTokenizer:
    """Create the tokenizer of a model folder or hub name: see `load_tokenizer`.

    Raises:
        TokenizerError: transformers is not installed, or the folder holds no tokenizer that it can load.
    """
    from rl_agent.chat_template import CachedTokenizer, load_tokenizer

    return cast("PromptTokenizer", CachedTokenizer(load_tokenizer(model_path, takes_videos=takes_videos)))


def create_runner(
    loop_factory: Callable[[str], AgentLoop],
    *,
    default_loop: str,
    max_concurrent: int,
    timeout_s: float,
    max_attempts: int,
) -> RolloutRunner:
    """Create a runner of rollouts. Its arguments are those of `rl_agent.runner.AgentRunner`.

    Raises:
        ValueError: a limit is not positive.
    """
    from rl_agent.runner import AgentRunner

    return AgentRunner(
        loop_factory,
        default_loop=default_loop,
        max_concurrent=max_concurrent,
        timeout_s=timeout_s,
        max_attempts=max_attempts,
    )


def create_grader(
    *,
    num_workers: int = 1,
    limits: SandboxLimits | None = None,
    max_waiting: int = 4096,
    needs: Collection[str] = (),
    sandbox: str | Mapping[str, Any] = "process",
) -> Grader | SandboxGrader:
    """Create a grader of code, in sandboxes of the kind `sandbox`: see `create_sandboxes`, and `Grader` for the rest.

    Raises:
        ValueError: a number is out of its range.
        SandboxError: there is no such kind, or it cannot do what is asked for.
    """
    from rl_agent.sandbox import Grader
    from rl_agent.sandbox.grading import SandboxGrader
    from rl_agent.types import SandboxLimits

    kind = create_sandboxes(sandbox, limits=limits or SandboxLimits(), max_running=num_workers, needs=needs)
    if kind.name != "process":
        return SandboxGrader(kind)
    return Grader(num_workers=num_workers, limits=kind.limits, max_waiting=max_waiting, needs=needs)


def create_sandboxes(
    sandbox: str | Mapping[str, Any],
    *,
    limits: SandboxLimits,
    max_running: int,
    needs: Collection[str] = (),
    venv: str | None = None,
) -> SandboxKind:
    """Create the kind of sandboxes that the option `sandbox` of an agent loop names.

    Args:
        sandbox: An entry point of the group `rl_agent.sandboxes` (`process`, `bubblewrap`, `podman`, `http`), or a
            mapping with it in `kind`, fields of `SandboxLimits`, and arguments of that kind.
        limits: Limits, where the mapping has no others.
        max_running: Commands at the same time.
        needs: Isolation that is required of `process`; see `Grader`.
        venv: A virtual environment of this machine whose programs come first.

    Raises:
        SandboxError: there is no such kind, or it cannot do what is asked for.
    """
    given = {"kind": sandbox} if isinstance(sandbox, str) else dict(sandbox)
    name = given.pop("kind", "process")
    try:
        kind = _load(SANDBOXES, name, f"sandbox {name!r}", PluginError)[0]
    except PluginError as error:
        raise SandboxError(str(error)) from error
    own: dict[str, Any] = {"needs": needs, "venv": None if venv is None else Path(venv).resolve()}
    given |= {key: value for key, value in own.items() if value}
    bounds = {key: given.pop(key) for key in asdict(limits) if key in given}
    if (most := bounds.get("folder_bytes")) is not None and (not isinstance(most, int) or most < 1):
        raise SandboxError(f"sandbox {name} has folder_bytes={most!r}; a whole number is needed, at least 1")
    known = {p for each in kind.__mro__ for p in inspect.signature(each.__init__).parameters} - _ALL_HAVE
    if unknown := sorted(set(given) - known):
        raise SandboxError(
            f"sandbox {name} has no {unknown[0]!r}; it has: {', '.join(sorted({*known, *asdict(limits)}))}"
        )
    try:
        return kind(limits=replace(limits, **bounds), max_running=max_running, **given)
    except (TypeError, ValueError) as error:
        raise SandboxError(f"sandbox {name} cannot be made: {error}") from error


def check_sandboxes(loop: str, options: Mapping[str, Any]) -> str | None:
    """Start a sandbox as an agent loop would; returns a line about it, None for a loop or options without one.

    Raises:
        SandboxError: none can be started; says what to install.
    """
    found = entry_points(group=GROUP, name=loop)
    sandboxes_of = getattr(found[loop].load(), "sandboxes_of", None) if found else None

    async def check() -> str | None:
        made: SandboxKind | SandboxGrader | None = sandboxes_of and sandboxes_of(options)
        if made is None:
            return None
        try:
            return str(await made.check())
        finally:
            await made.close()

    return asyncio.run(check())


def create_script_reader() -> ScriptReader:
    """Create the reader of launch scripts, which lets bash run them in the sandbox with nothing to run."""
    from rl_agent.sandbox.launches import ScriptReader

    return ScriptReader()


def _load(group: str, name: str, what: str, error: type[LoopError | PluginError]) -> tuple[Any, EntryPoint]:
    installed = {entry.name: entry for entry in entry_points(group=group)}
    if name not in installed:
        there = ", ".join(sorted(installed)) or "none"
        raise error(f"no {what} is installed as an entry point of {group}; there are: {there}")
    try:
        return installed[name].load(), installed[name]
    except ImportError as cause:
        pip_line = _pip_line(installed[name])
        raise error(f"{what} of {group} cannot be imported ({cause}); install what it needs: {pip_line}") from cause


def _pip_line(entry: EntryPoint) -> str:
    """Pip command that installs the plug-in's distribution, with the extra of its name if there is one."""
    if entry.dist is None:
        return f"pip install the distribution that provides {entry.module}"
    extras = entry.dist.metadata.get_all("Provides-Extra") or []
    return (
        f"pip install '{entry.dist.name}[{entry.name}]'" if entry.name in extras else f"pip install {entry.dist.name}"
    )
