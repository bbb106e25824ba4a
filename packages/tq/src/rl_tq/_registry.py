"""Storages by name: the scheme of an address names the entry point (group `rl_tq.storage`) that serves it."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from rl_tq._checks import check_seconds
from rl_tq.errors import AddressError, StorageError

if TYPE_CHECKING:
    from rl_tq.base import Storage, TransferQueue

GROUP = "rl_tq.storage"


def serve(address: str = "shm://", *, timeout_s: float = 60.0, snapshot: str | Path | None = None) -> TransferQueue:
    """Serve a queue from this process, and return a client of it. Closing that client ends the queue.

    Args:
        address: `shm://NAME` (processes of one host and user) or `inproc://NAME` (threads of this process). An empty
            NAME is replaced by a fresh one: pass the client's `address` to the others.
        timeout_s: Deadline of calls that are not given their own, seconds.
        snapshot: A directory that `TransferQueue.snapshot` wrote, to begin with; it is copied. None: an empty queue.

    Raises:
        AddressError: the address has no scheme, or is served already; there is no snapshot, or no empty directory.
        StorageError: its scheme is no installed storage.
        ValueError: the deadline is not positive and finite.
    """
    check_seconds("timeout_s", timeout_s)
    scheme, name = _split(address)
    path = None if snapshot is None else Path(snapshot)
    return _traced(load_storage(scheme).serve(name, timeout_s=timeout_s, snapshot=path))


def connect(address: str, *, timeout_s: float = 60.0) -> TransferQueue:
    """A client of the queue that is served at `address`; any number per process, each good for any number of threads.

    Raises:
        AddressError: the address has no scheme or no name.
        StorageError: its scheme is no installed storage.
        ServerLostError: nobody serves there.
        ValueError: the deadline is not positive and finite.
    """
    check_seconds("timeout_s", timeout_s)
    scheme, name = _split(address)
    if not name:
        raise AddressError(f"{address!r} names no queue: pass the address of the client that serve() returned")
    return _traced(load_storage(scheme).connect(name, timeout_s=timeout_s))


def load_storage(name: str) -> Storage:
    """The storage of that name.

    Raises:
        StorageError: it is not installed, or cannot be imported here.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise StorageError(f"there is no storage {name!r}; installed are {sorted(found)}")
    try:
        return found[name].load()
    except ImportError as error:
        owner = found[name].dist
        package = owner.name if owner else "rl-tq"
        raise StorageError(
            f"storage {name!r} cannot be imported: {error}; try: pip install '{package}[{name}]'"
        ) from error


def _traced(queue: TransferQueue) -> TransferQueue:
    directory = os.environ.get("RL_TQ_TRACE")
    if not directory:
        return queue
    from rl_tq.tracing import trace

    return trace(queue, directory)


def _split(address: str) -> tuple[str, str]:
    scheme, separator, name = address.partition("://")
    if not separator or not scheme:
        raise AddressError(f"{address!r} is not an address of a queue: write SCHEME://NAME, for example shm://my-run")
    return scheme, name
