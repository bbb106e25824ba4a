"""Questions to an engine's backend that a child process answers: in another environment, or in parallel."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
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

    from rl_trainer.config import Config
    from rl_trainer.config.schema import EngineSection

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
_CHILDREN: list[tuple[Config, subprocess.Popen[str]]] = []
"""The child that was asked last, for what is asked later of the same configuration."""


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
    found = _run([python, "-c", _VERSIONS, *_SAME], key)
    for name, here in wanted.items():
        there = found[name]
        if there is None:
            raise ConfigError(
                f"{key} has no {name}; install that of the run there: uv pip install --python {python} {name}=={here}"
            )
        if there != here:
            raise ConfigError(f"{key} has {name} {there}, and the run has {here}; both need the same")


@contextmanager
def asked_in_background(config: Config, model_path: Path, *, is_made: bool) -> Generator[None]:
    """Have a child process answer what the policy's backend is asked, while this one reads the data.

    For a run on Ray, whose controller then needs none of the backend's packages: they take five seconds to import. A
    process that has imported them already asks faster itself.
    """
    _CHILDREN.clear()
    is_alone = config.runtime == "ray" and config.engine.environment is None and ":" not in config.engine.backend
    if not is_alone or "transformers" in sys.modules:
        yield
        return
    engine = actor_config(config, model_path)
    asked = _question(config.engine, engine if is_made else replace(engine, init=ModelInit.RANDOM))
    command = [sys.executable, "-c", _PROGRAM, asked]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        _CHILDREN.append((config, child))
        try:
            yield
        finally:
            child.kill()
            _answer_of(child)


@cache
def _answer_of(child: subprocess.Popen[str]) -> dict[str, Any] | None:
    """Answers of a child process; None if it failed, or was ended before."""
    said, _ = child.communicate(timeout=_TIMEOUT_S)
    return json.loads(said.splitlines()[-1]) if child.returncode == 0 else None


def check_engine(config: Config, role: str, section: EngineSection, engine: EngineConfig) -> dict[str, str]:
    """See `rl_engine.check`, which is asked in the environment that the role's processes have.

    Raises:
        EngineError: the backend refuses.
    """
    reply = _reply(config, role, section, engine)
    if reply is None:
        return rl_engine.registry.check(section.backend, engine, section.world_size)
    if reply["refused"] is not None:
        raise EngineError(reply["refused"])
    return reply["found"]


def gives_shards(config: Config, engine: EngineConfig) -> bool:
    """Whether the engine's backend has `get_local_shards`."""
    reply = _reply(config, "policy", config.engine, engine)
    return _gives_shards(config.engine.backend, engine) if reply is None else reply["gives_shards"]


def _gives_shards(backend: str, engine: EngineConfig) -> bool:
    return type(rl_engine.registry.create_engine(backend, engine)).get_local_shards is not Engine.get_local_shards


def _question(section: EngineSection, engine: EngineConfig) -> str:
    return json.dumps({"backend": section.backend, "engine": asdict(engine), "world_size": section.world_size})


def _reply(config: Config, role: str, section: EngineSection, engine: EngineConfig) -> dict[str, Any] | None:
    """Answers of another process about a role's backend; None if this one has to ask."""
    replies = (_answer_of(child) for known, child in _CHILDREN if role == "policy" and known == config)
    if (reply := next(replies, None)) is not None or (python := role_python(config, role)) is None:
        return reply
    key = f"engine.environment={config.engine.environment}"
    return _run([python, "-c", _PROGRAM, _question(section, engine)], key)


def answer() -> None:
    """In the child process: answer the question of its argument on the last line of stdout."""
    question = json.loads(sys.argv[1])
    engine = TypeAdapter(EngineConfig).validate_python(question["engine"])
    reply: dict[str, Any] = {"refused": None, "found": {}, "gives_shards": False}
    try:
        reply["gives_shards"] = _gives_shards(question["backend"], engine)
        reply["found"] = rl_engine.registry.check(question["backend"], engine, question["world_size"])
    except EngineError as error:
        reply["refused"] = str(error)
    sys.stdout.write(f"\n{json.dumps(reply)}\n")


def _run(command: list[str], key: str) -> dict[str, Any]:
    """Run a child process and return the JSON object on the last line that it prints.

    Raises:
        ConfigError: it failed, or printed something else last; with that line.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{key}: its Python does not run ({error})") from error
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [""]
    if done.returncode:
        raise ConfigError(f"{key}: its Python ended with {done.returncode}: {lines[-1]}")
    try:
        return json.loads(lines[-1])
    except ValueError as error:
        raise ConfigError(f"{key}: its Python printed {lines[-1]!r} where an answer was asked for") from error
