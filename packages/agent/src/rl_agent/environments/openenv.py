"""Environments of OpenEnv (https://github.com/meta-pytorch/OpenEnv): a server by its URL, or an installed package."""

# OpenEnv is there where its tests run, and not where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rl_agent.environments.base import EnvironmentSource, observation_text
from rl_agent.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Mapping

_START_S = 60.0
_FULL_WAIT_S = 0.02
_SERVE = """
import os, socket, sys, threading
import uvicorn
from {package}.server.app import app
def ends_with_its_starter():
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=ends_with_its_starter, daemon=True).start()
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[socket.socket(fileno={fd})])
"""


class OpenEnvEnvironments(EnvironmentSource):
    """Environments of one server: `http://HOST:PORT`, or the name of an installed package whose server is started.

    Raises:
        PluginError: no such package is installed, or the URL does not answer.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, arguments)
        if importlib.util.find_spec("openenv") is None:
            raise PluginError(f"environment openenv:{name} needs OpenEnv's client: pip install openenv")
        self._process: subprocess.Popen[bytes] | None = None
        self._starting, self.turn = asyncio.Lock(), asyncio.Lock()
        """`turn`: where the server is full, one session after the other asks for a place."""
        self.url = name if name.startswith(("http://", "https://")) else ""
        self.fields: dict[str, Any] = {}
        """Schema of the actions, as JSON Schema; empty before `serve`."""
        if not self.url and importlib.util.find_spec(name.replace("-", "_")) is None:
            raise PluginError(f"environment openenv:{name}: no package {name} is installed; install it, or give a URL")

    def make(self, **arguments: Any) -> OpenEnvGame:
        """Create a session; arguments are those of the environment's `reset`."""
        return OpenEnvGame(self, arguments)

    async def serve(self) -> None:
        """Start the package's server, if there is one to start, and read the schema of its actions; once.

        Raises:
            PluginError: the server does not start, or does not answer.
        """
        async with self._starting:
            if not self.url:
                self.url = await asyncio.to_thread(self._start)
            if not self.fields:
                self.fields = await asyncio.to_thread(_action_fields, self.url)

    async def close(self) -> None:
        """End the server that was started."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _start(self) -> str:
        """Start the package's server on a free port; returns its URL once it answers."""
        package = self.name.replace("-", "_")
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with listener, tempfile.TemporaryFile() as said:
            fd = listener.fileno()
            command = [sys.executable, "-c", _SERVE.format(package=package, fd=fd)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[fd], stderr=said)
            listener.close()  # the server's copy is left, so that a dead server refuses
            until = time.monotonic() + _START_S
            while time.monotonic() < until:
                if self._process.poll() is not None:
                    said.seek(0)
                    last = said.read().decode(errors="replace").strip()[-500:]
                    raise PluginError(f"the server of openenv:{self.name} ended as it started: {last}")
                with suppress(OSError):
                    _answer(f"{url}/health", timeout_s=1.0)
                    return url
            self._process.kill()
        raise PluginError(f"the server of openenv:{self.name} did not answer within {_START_S:g} s")


class OpenEnvGame:
    """Session at a server of OpenEnv, whose turns are actions.

    A turn spells an action: a JSON object with its fields, the last one in the turn, or, where one field is required
    and it is a text, a number or a choice, its value. An observation is shown by fields; a turn that is no action is
    answered with what is needed.
    """

    def __init__(self, source: OpenEnvEnvironments, arguments: dict[str, Any]) -> None:
        self._source, self._arguments = source, arguments
        self._client: Any = None

    async def ready(self) -> None:
        """Wait for the server and for a session at it: one that is full is asked again."""
        from openenv.core import GenericEnvClient

        await self._source.serve()
        self._client = GenericEnvClient(base_url=self._source.url)
        async with self._source.turn:
            while True:
                try:
                    await self._client.state()
                except RuntimeError as error:  # one with a session may have no state before its reset
                    if "CAPACITY_REACHED" not in str(error):
                        return
                else:
                    return
                await self._client.disconnect()
                await asyncio.sleep(_FULL_WAIT_S)

    async def reset(self, *, seed: int | None) -> tuple[str, dict[str, Any]]:
        """See `GymLoop`."""
        result = await self._client.reset(**({} if seed is None else {"seed": seed}), **self._arguments)
        return f"{_shown(result.observation)}\n\n{_needed(self._source.fields)}", dict(result.metadata or {})

    async def step(self, turn: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `GymLoop`."""
        action = read_action(turn, self._source.fields)
        if action is None:
            return f"That is no action. {_needed(self._source.fields)}", 0.0, False, False, {"is_invalid": True}
        result = await self._client.step(action)
        info = dict(result.metadata or {})
        return _shown(result.observation), float(result.reward or 0.0), bool(result.done), False, info

    async def close(self) -> None:
        """End the session."""
        if self._client is not None:
            await self._client.close()


def read_action(turn: str, schema: dict[str, Any]) -> dict[str, Any] | None:
    """Action that a turn spells, by the JSON schema of actions; None if there is none."""
    known, required = schema.get("properties", {}), schema.get("required", [])
    for text in reversed(_objects(turn)):
        try:
            fields = json.loads(text)
        except ValueError:
            continue
        if isinstance(fields, dict) and set(required) <= set(fields) <= set(known):
            return fields
    value = _only_value(turn, known[required[0]]) if len(required) == 1 else None
    return None if value is None else {required[0]: value}


def _only_value(turn: str, field: dict[str, Any]) -> Any:
    """The value that a turn spells for the only field that is needed; None if there is none."""
    if "enum" in field:
        found = [(turn.rfind(str(value)), len(str(value)), value) for value in field["enum"] if str(value) in turn]
        return max(found)[2] if found else None
    if field.get("type") in ("integer", "number"):
        numbers = re.findall(_NUMBERS[field["type"]], turn)
        return json.loads(numbers[-1]) if numbers else None
    return turn.strip() if field.get("type") == "string" else None


_NUMBERS = {"integer": r"-?\b(?:0|[1-9]\d*)\b", "number": r"-?\b(?:0|[1-9]\d*)(?:\.\d+)?\b"}


def _objects(turn: str) -> list[str]:
    """Texts in braces, with one level of braces inside."""
    return re.findall(r"\{(?:[^{}]|\{[^{}]*\})*\}", turn)


def _needed(schema: dict[str, Any]) -> str:
    known, required = schema.get("properties", {}), schema.get("required", [])
    if len(required) == 1 and not isinstance(known[required[0]].get("type"), list):
        field = known[required[0]]
        kind = f"one of {', '.join(map(str, field['enum']))}" if "enum" in field else _KINDS.get(field.get("type"))
        if kind is not None:
            about = field.get("description", required[0]).strip().removesuffix(".")
            return f"Answer with {kind}: {about}."
    fields = {name: field.get("description") or field.get("type") for name, field in known.items()}
    return f"Answer with a JSON object: {json.dumps(fields)}; {', '.join(required) or 'nothing'} is required."


_KINDS = {"string": "the text of your action", "integer": "a whole number", "number": "a number"}


def _shown(observation: Any) -> str:
    if isinstance(observation, dict):
        left_out = ("done", "reward", "metadata")
        observation = {name: value for name, value in observation.items() if value is not None and name not in left_out}
    return observation_text(observation)


def _action_fields(url: str) -> dict[str, Any]:
    """Schema of the server's actions, without the fields that every action has."""
    try:
        schema = json.loads(_answer(f"{url}/schema", timeout_s=10.0))["action"]
    except (OSError, ValueError, KeyError) as error:
        raise PluginError(f"the environment at {url} did not give the schema of its actions: {error!r}") from error
    shared = {f"#/$defs/{name}": each for name, each in schema.get("$defs", {}).items()}
    known = {name: shared.get(field.get("$ref"), {}) | field for name, field in schema.get("properties", {}).items()}
    return {**schema, "properties": {name: field for name, field in known.items() if name != "metadata"}}


def _answer(url: str, *, timeout_s: float) -> bytes:
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        return answer.read()
