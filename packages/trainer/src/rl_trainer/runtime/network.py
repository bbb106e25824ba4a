"""Addresses, free ports and tokens of a run's weight sessions, queue and servers."""

from __future__ import annotations

import os
import random
import secrets
import socket
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import rl_ckpt.registry
from rl_ckpt.types import Capability
from rl_trainer.errors import ConfigError, InputError, PlacementError

if TYPE_CHECKING:
    from collections.abc import Generator

SHARED_MEMORY = "shm"
"""The transport of weights, and the storage on one machine, where nothing else is asked for."""
IN_ONE_PROCESS = "inproc"
"""The transport, and the storage, whose ends have to be in one process."""
ON_EVERY_NODE = "ray"
"""The storage that keeps values in Ray's object store, on the node that put them; its server keeps the books only."""
_ON_ONE_MACHINE = {
    "weights_transport": (IN_ONE_PROCESS, "shm", "uds", "cuda-ipc"),
    "queue_storage": (IN_ONE_PROCESS, "shm", "file"),
}
LISTENING = ("tcp", "gloo", "nccl", "nixl", "zmq")
"""Backends whose addresses are HOST:PORT."""


_CONNECT_S = 5.0
_LAUNCHER = frozenset(
    [
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    ]
)
_FIRST, _LAST = 20_000, 65_535
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ATTEMPTS = 200


def check_ray_address() -> None:
    """Check that something listens where `RAY_ADDRESS` says, as Ray itself would wait for minutes.

    Raises:
        PlacementError: nothing does, within 5 s.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    host, mark, port = address.removeprefix("ray://").rpartition(":")
    if not (mark and port.isdecimal()):
        return  # "auto", "local", or nonsense that Ray refuses at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise PlacementError(
            f"RAY_ADDRESS={address}: no Ray answers there ({error}); start the cluster, correct the address, or unset "
            "RAY_ADDRESS to start Ray on this machine"
        ) from error


@contextmanager
def without_launcher() -> Generator[None]:
    """Hide what torchrun left in the environment: the run gives its own workers their ranks.

    Raises:
        InputError: torchrun has started this very process, as one of several.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError(
            f"torchrun has started {os.environ['WORLD_SIZE']} of this command, which starts its workers itself; run it "
            "once, without torchrun, and set engine.world_size"
        )
    found = {name: value for name, value in os.environ.items() if name in _LAUNCHER or name.startswith("TORCHELASTIC_")}
    for name in found:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(found)


def scheme_of(backend: str | None) -> str:
    """Backend name in `weights_transport` or `queue_storage`, which may be a whole address."""
    return (backend or SHARED_MEMORY).partition("://")[0]


def address_of(backend: str | None, name: str, place: tuple[str, int]) -> str:
    """Address of a session: a whole one as it is, else made of `name`, or of `place` (host, port) for a listener."""
    backend = backend or SHARED_MEMORY
    if "://" in backend:
        return backend
    host, port = place
    return f"{backend}://{host}:{port}" if backend in LISTENING else f"{backend}://{name}"


def storage_of(backend: str | None, num_machines: int) -> str:
    """`queue_storage`; where it is left open, the storage that the nodes of a run allow."""
    return backend or (SHARED_MEMORY if num_machines == 1 else ON_EVERY_NODE)


def has_votes(address: str) -> bool:
    """Whether the ends of a weight session know each other; the readers of a folder or object store are unknown.

    Raises:
        rl_ckpt.CkptError: there is no such transport.
    """
    return Capability.VOTES in rl_ckpt.registry.capabilities(address)


def check_reach(key: str, backend: str | None, num_machines: int) -> None:
    """Refuse an address that stays inside one node where the run is on several.

    Raises:
        ConfigError: names the key.
    """
    if num_machines > 1 and scheme_of(backend) in _ON_ONE_MACHINE[key]:
        raise ConfigError(
            f"{key}={backend} does not leave its machine, and Ray has placed this run on {num_machines}; choose tcp"
        )


_SERVER = "RL_ROLLOUT_API_TOKEN"
_VARIABLES = ("RL_CKPT_TOKEN", "RL_TQ_TOKEN", _SERVER)
"""Environment variables of the tokens of rl-ckpt, rl-tq and rl-rollout."""


def make_tokens() -> dict[str, str]:
    """Tokens by environment variable: those that are set, and new ones for the others, which are set too."""
    return {name: os.environ.setdefault(name, secrets.token_hex(32)) for name in _VARIABLES}


def server_token() -> str | None:
    """Token of the run's own rollout servers; None outside a run."""
    return os.environ.get(_SERVER)


def free_address(host: str) -> tuple[str, int]:
    """Free address: `host`, which is this machine's, and an unused port.

    Seconds may pass until it is used, in which the other processes of a run connect and listen: the port is one that
    the kernel does not give to those who ask for any.
    """
    draw, ports = random.SystemRandom(), _ports_of_ones_own()
    for port in draw.sample(ports, min(len(ports), _ATTEMPTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return host, port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


def _ports_of_ones_own() -> list[int]:
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return []
    return [*range(_FIRST, low), *range(max(high + 1, _FIRST), _LAST)]
