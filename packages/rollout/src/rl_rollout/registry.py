"""Registry of backends: finds a backend by name (entry points), checks its configuration, creates its server."""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from rl_rollout.errors import BackendError, ConfigError
from rl_rollout.validation import find_plugin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from importlib.metadata import EntryPoint

    from rl_rollout.base import HttpEndpoint, ReceiverSession, RolloutServer, ServerGroup, Subprocess
    from rl_rollout.types import ServerAddress, ServerConfig

GROUP = "rl_rollout.backends"
"""Group of entry points that name backend modules. A module has `create_server(config)`, and `launch_server(config)` if
its server is not launched by `rl-serve`."""

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
"""Hosts that need no API token."""


def load_backend(name: str) -> Any:
    """Import the module of a backend.

    Raises:
        BackendError: there is no such backend, or it cannot be imported here.
    """
    found = find_plugin(GROUP, name, "rollout backend", BackendError)
    try:
        return importlib.import_module(found.module)
    except ImportError as error:
        raise _not_importable(name, error) from error


def _not_importable(name: str, error: ImportError) -> BackendError:
    entry = find_plugin(GROUP, name, "rollout backend", BackendError)
    return BackendError(f"rollout backend {name!r} cannot be imported ({error}); try: {_pip_line(entry)}")


def _pip_line(entry: EntryPoint) -> str:
    """Pip command that installs the plug-in's distribution, with the extra of its name if there is one."""
    if entry.dist is None:
        return f"pip install the distribution that provides {entry.module}"
    extra = f"[{entry.name}]" if entry.name in (entry.dist.metadata.get_all("Provides-Extra") or []) else ""
    return f"pip install '{entry.dist.name}{extra}'"


QUANTIZATIONS = ("none", "int8", "fp8", "fp8_block")
"""Values of `ServerConfig.quantization`."""


def check_config(config: ServerConfig) -> None:
    """Check the settings that all backends share.

    Raises:
        ConfigError: a number is out of range, or an open interface has no token.
    """
    if config.host not in LOOPBACK_HOSTS and not config.api_token:
        raise ConfigError(f"host {config.host!r} is reachable from outside; set api_token, or use 127.0.0.1")
    for name, low in (
        ("max_model_len", 2),
        ("max_num_seqs", 1),
        ("num_threads", 0),
        ("kv_cache_bytes", 0),
        ("port", 0),
        ("max_body_bytes", 1),
        ("max_completions", 1),
        ("max_stops", 0),
        ("max_top_logprobs", 0),
    ):
        if getattr(config, name) < low:
            raise ConfigError(f"{name}={getattr(config, name)} must be at least {low}")
    if config.quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization={config.quantization!r} is unknown; use one of {', '.join(QUANTIZATIONS)}")
    layout = config.parallel
    if min(layout.tp, layout.pp, layout.dp, layout.ep) < 1 or layout.tp * layout.dp % layout.ep:
        raise ConfigError(
            f"parallel tp={layout.tp}, pp={layout.pp}, dp={layout.dp}, ep={layout.ep}: each must be at least 1, and ep "
            "a divisor of tp x dp, whose ranks share out the experts"
        )
    for name in ("timeout_s", "queue_timeout_s"):
        if getattr(config, name) <= 0:
            raise ConfigError(f"{name}={getattr(config, name)} must be above 0")


def check_options(options: Mapping[str, Any], known: Mapping[str, str], backend: str) -> None:
    """Check the names of a backend's options against those that it knows (name to description).

    Raises:
        ConfigError: an option is unknown; names the nearest known one.
    """
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            what = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(known) or 'none'}"
            raise ConfigError(f"backend {backend!r} has no option {name!r}; {what}")


def check_unused(config: ServerConfig, names: Sequence[str], why: str) -> None:
    """Check that settings without an effect on a backend have their defaults.

    Raises:
        ConfigError: one has not; says why it would be ignored.
    """
    default = type(config)(model_path="")
    for name in names:
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(f"{name}={getattr(config, name)!r}: {why}; leave it out")


def check_quantization(config: ServerConfig, backend: str, known: Iterable[str]) -> None:
    """Check that a backend converts weights to the format that is asked for.

    Raises:
        ConfigError: it does not; names the formats that it has.
    """
    if config.quantization not in (there := ("none", *known)):
        raise ConfigError(
            f"quantization={config.quantization!r} is not one of backend {backend!r}, which has {', '.join(there)}; "
            "choose one of these, or another backend (embedded has int8, vllm also fp8 and fp8_block)"
        )


def create_server(backend: str, config: ServerConfig) -> RolloutServer:
    """Create a server in this process. `await server.start()` loads the model and opens its HTTP endpoint.

    Raises:
        BackendError: the backend is unknown, or not importable here; says what to install.
        ConfigError, ModelFolderError: the backend cannot serve this configuration.
    """
    check_config(config)
    module = load_backend(backend)
    try:
        return module.create_server(config)
    except ImportError as error:
        raise _not_importable(backend, error) from error


def launch_server(backend: str, config: ServerConfig) -> RolloutServer:
    """Create a server in a subprocess, which ends with this process. `start()` launches it and waits until it answers.

    Raises:
        BackendError: the backend is unknown here.
        ConfigError, ModelFolderError: the backend cannot serve this configuration.
    """
    check_config(config)
    launch = getattr(load_backend(backend), "launch_server", None)
    if launch is not None:
        return launch(config)
    from rl_rollout.http.http_server import LaunchedServer  # imported here: only launched servers need the HTTP client

    return LaunchedServer(backend, config)


def launch_scorer(config: ServerConfig) -> RolloutServer:
    """Create the server of a reward model in a subprocess: it starts, sleeps, wakes and stops alone."""
    from rl_rollout.http.http_server import LaunchedServer

    return LaunchedServer("embedded", config, "score")


def connect_server(
    address: str | ServerAddress, *, api_token: str | None = None, timeout_s: float = 120.0
) -> RolloutServer:
    """Connect to a running server: pass its address between processes, and connect in each.

    `stop()` of the client leaves the server running.

    Args:
        address: Base URL of the server, or what its `start` returned.
        api_token: Bearer token, if the server asks for one.
        timeout_s: Deadline of requests that bring none, seconds.
    """
    from rl_rollout.http.http_server import HttpServer  # imported here: only remote servers need the HTTP client

    return HttpServer(address if isinstance(address, str) else address.url, api_token=api_token, timeout_s=timeout_s)


def create_router(servers: Sequence[RolloutServer]) -> ServerGroup:
    """Create a router over replicas: by session, then by cached prefix, then by load.

    Raises:
        ConfigError: there are none.
    """
    from rl_rollout.router import Router

    return Router(servers)


def create_endpoint(server: RolloutServer, config: ServerConfig, *, model_name: str) -> HttpEndpoint:
    """Create the HTTP endpoint of a server in this process, which `connect_server` and OpenAI clients talk to.

    Args:
        server: Its methods are called on the event loop that starts the endpoint.
        config: Interface, port, token and limits.
        model_name: Name of the model in answers.
    """
    from rl_rollout.http.endpoint import Endpoint

    return Endpoint(server, config, model_name=model_name)


def create_receiver(address: str, *, timeout_s: float = 60.0) -> ReceiverSession:
    """Create the receiver of an rl-ckpt session for `update_weights`; the session is opened when it is first needed.

    Args:
        address: URL of the session, or the JSON of `rl_ckpt.types.Addresses` of one per rank of the trainer.
        timeout_s: Longest wait for a peer, seconds.
    """
    from rl_rollout.receiver import CkptReceiver

    return CkptReceiver(address, timeout_s=timeout_s)


def create_process(command: Sequence[str], *, name: str, on_line: Callable[[str], bool]) -> Subprocess:
    """Create a child process under supervision; nothing is started before `start`.

    Args:
        command: Command to run, in a session of its own: a Ctrl-C in this terminal goes to this process alone.
        name: Name of the process in errors.
        on_line: Called in the reading thread with every line of output; True leaves the line out of the last lines.
    """
    from rl_rollout.process import ChildProcess

    return ChildProcess(command, {}, name=name, on_line=on_line)
