"""Where the sessions of weights and samples are, by `weights_transport` and `queue_storage`."""

from __future__ import annotations

from rl_trainer.errors import ConfigError

IN_ONE_PROCESS = "inproc"
"""The transport, and the storage, whose ends have to be in one process."""
_ON_ONE_MACHINE = {
    "weights_transport": (IN_ONE_PROCESS, "shm", "uds", "cuda-ipc"),
    "queue_storage": (IN_ONE_PROCESS, "shm", "file"),
}
LISTENING = ("tcp", "gloo", "nccl", "nixl", "zmq")
"""Those whose addresses are HOST:PORT."""


def scheme_of(backend: str) -> str:
    """The installed name in `weights_transport` or `queue_storage`, which may be a whole address."""
    return backend.partition("://")[0]


def address_of(backend: str, name: str, place: tuple[str, int]) -> str:
    """The address of a session: the backend's own, or else one of `name`, or at `place` where the backend listens."""
    if "://" in backend:
        return backend
    host, port = place
    return f"{backend}://{host}:{port}" if backend in LISTENING else f"{backend}://{name}"


def check_reach(key: str, backend: str, num_machines: int) -> None:
    """Refuse what cannot leave its machine where processes are on several.

    Raises:
        ConfigError: names the key.
    """
    if num_machines > 1 and scheme_of(backend) in _ON_ONE_MACHINE[key]:
        raise ConfigError(
            f"{key}={backend} does not leave its machine, and Ray has placed this run on {num_machines}; choose tcp"
        )
