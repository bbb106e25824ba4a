"""Questions to an engine's backend that a child process answers: in another environment, or in parallel."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

import rl_engine.registry
from rl_engine.base import Engine
from rl_engine.errors import EngineError
from rl_engine.types import EngineConfig, ModelInit
from rl_trainer.config.schema import ENGINE_POOL
from rl_trainer.errors import ConfigError
from rl_trainer.pipeline.roles import actor_config, home_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from rl_trainer.config import Config, EngineSection

_TIMEOUT_S = 300.0
"""Deadline of a child process, which imports torch and its backend, seconds."""
_SAME = ("rl-post-trainer", "rl-engine", "ray")
"""Packages of which both environments have one version: their processes send each other objects."""
_PROGRAM = f"from {__name__} import answer; answer()"
_VERSIONS = """
import importlib.metadata, json, platform, sys
found = {"Python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


def engine_python(config: Config) -> str | None:
    """The interpreter of the engine's processes; None: that of this process."""
    folder = config.engine.environment
    return None if folder is None else str(Path(folder).absolute() / "bin" / "python")


def role_python(config: Config, role: str) -> str | None:
    """The interpreter of a role's processes, where they are the engine's; None: that of this process."""
    return engine_python(config) if role == "policy" or home_of(config, role) == ENGINE_POOL else None


def check_environment(config: Config) -> None:
    """Check that `engine.environment` has an interpreter, and the packages that its processes need.

    Raises:
        ConfigError: names what it lacks, and how to install it.
    """
    python = engine_python(config)
    if python is None:
        return
    key = f"engine.environment={config.engine.environment}"
    if config.runtime != "ray":
        raise ConfigError(f"{key} needs its own processes, and runtime={config.runtime} has none; set runtime=ray")
    if not Path(python).is_file():
        raise ConfigError(f"{key} has no bin/python; make an environment there: uv venv {config.engine.environment}")
    wanted = {"Python": platform.python_version()} | {name: version(name) for name in _SAME}
    found = _run([python, "-c", _VERSIONS, *_SAME], "", key)
    for name, here in wanted.items():
        there = found[name]
        if there is None:
            raise ConfigError(
                f"{key} has no {name}; install that of the run there: uv pip install --python {python} {name}=={here}"
            )
        if there != here:
            raise ConfigError(f"{key} has {name} {there}, and the run has {here}; both need the same")


class _Child:
    """A child process that answers what the policy's backend is asked."""

    def __init__(self, config: Config, engine: EngineConfig) -> None:
        self._config = config
        self._reply: dict[str, Any] | None = None
        command = [sys.executable, "-c", _PROGRAM]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(_question(config.engine, engine))
        self._process.stdin.close()
        self._process.stdin = None  # `communicate` has nothing left to write

    def reply(self, config: Config) -> dict[str, Any] | None:
        """Its answers; None to questions of another configuration, or if it failed."""
        if config != self._config:
            return None
        if self._reply is None:
            told, _ = self._process.communicate(timeout=_TIMEOUT_S)
            self._reply = json.loads(told.splitlines()[-1]) if self._process.returncode == 0 else {}
        return self._reply or None

    def end(self) -> None:
        """End it, whether it has answered or not."""
        self._process.kill()
        self._process.communicate()
        self._reply = self._reply or {}


_CHILDREN: list[_Child] = []
"""The child that has been asked last, for what is asked later of the same configuration."""


@contextmanager
def asked_beside(config: Config, model_path: Path, *, is_made: bool) -> Generator[None]:
    """Have a child process answer what the policy's backend is asked, while this one reads the data.

    For a run on Ray, whose controller then needs none of the backend's packages: they take five seconds to import. A
    process that has imported them already asks faster itself.

    Args:
        config: The run's.
        model_path: The policy's folder.
        is_made: Whether it is complete; otherwise it has a `config.json` alone.
    """
    _CHILDREN.clear()
    is_alone = config.runtime == "ray" and config.engine.environment is None and ":" not in config.engine.backend
    if not is_alone or "transformers" in sys.modules:
        yield
        return
    engine = actor_config(config, model_path)
    child = _Child(config, engine if is_made else replace(engine, init=ModelInit.RANDOM))
    _CHILDREN.append(child)
    try:
        yield
    finally:
        child.end()


def check_engine(config: Config, role: str, section: EngineSection, engine: EngineConfig) -> dict[str, str]:
    """See `rl_engine.check`, which is asked in the environment that the role's processes have.

    Raises:
        EngineError: the backend refuses.
    """
    reply = _CHILDREN[0].reply(config) if _CHILDREN and role == "policy" else None
    if reply is None and role_python(config, role) is None:
        return rl_engine.registry.check(section.backend, engine, section.world_size)
    reply = reply or _ask(config, section, engine)
    if reply["refused"] is not None:
        raise EngineError(reply["refused"])
    return reply["found"]


def gives_shards(config: Config, engine: EngineConfig) -> bool:
    """Whether the engine's backend has `get_local_shards`."""
    reply = _CHILDREN[0].reply(config) if _CHILDREN else None
    if reply is None and config.engine.environment is None:
        return _gives_shards(config.engine.backend, engine)
    return (reply or _ask(config, config.engine, engine))["gives_shards"]


def _gives_shards(backend: str, engine: EngineConfig) -> bool:
    return type(rl_engine.registry.create_engine(backend, engine)).get_local_shards is not Engine.get_local_shards


def _question(section: EngineSection, engine: EngineConfig) -> str:
    return json.dumps({"backend": section.backend, "engine": asdict(engine), "world_size": section.world_size})


def _ask(config: Config, section: EngineSection, engine: EngineConfig) -> dict[str, Any]:
    python = engine_python(config)
    assert python is not None, "there is an environment to ask in"
    key = f"engine.environment={config.engine.environment}"
    return _run([python, "-c", _PROGRAM], _question(section, engine), key)


def answer() -> None:
    """In the child process: answer the question on stdin on the last line of stdout."""
    question = json.loads(sys.stdin.read())
    engine = TypeAdapter(EngineConfig).validate_python(question["engine"])
    reply: dict[str, Any] = {"refused": None, "found": {}, "gives_shards": False}
    try:
        reply["gives_shards"] = _gives_shards(question["backend"], engine)
        reply["found"] = rl_engine.registry.check(question["backend"], engine, question["world_size"])
    except EngineError as error:
        reply["refused"] = str(error)
    sys.stdout.write(f"\n{json.dumps(reply)}\n")


def _run(command: list[str], text: str, key: str) -> dict[str, Any]:
    """Run a child process and return the JSON object on the last line that it prints.

    Raises:
        ConfigError: it failed, or printed something else last; with that line.
    """
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{key}: its Python does not run ({error})") from error
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [""]
    if done.returncode:
        raise ConfigError(f"{key}: its Python ended with {done.returncode}: {lines[-1]}")
    try:
        return json.loads(lines[-1])
    except ValueError as error:
        raise ConfigError(f"{key}: its Python printed {lines[-1]!r} where an answer was asked for") from error
