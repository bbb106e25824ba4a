"""Storages by name: the scheme of an address names the entry point (group `rl_tq.storage`) that serves it."""

from __future__ import annotations

import inspect
import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from rl_tq.errors import AddressError, StorageError
from rl_tq.metadata.checks import check_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_tq.base import Storage, TransferQueue

GROUP = "rl_tq.storage"


def serve(
    address: str = "shm://",
    *,
    timeout_s: float = 60.0,
    snapshot: str | Path | None = None,
    token: str | None = None,
) -> TransferQueue:
    """Serve a queue from this process, and return a client of it. Closing that client ends the queue.

    Args:
        address: `shm://NAME` (processes of one host and user) or `inproc://NAME` (threads of this process). An empty
            NAME is replaced by a fresh one: pass the client's `address` to the others.
        timeout_s: Deadline of calls that are not given their own, seconds.
        snapshot: A directory that `TransferQueue.snapshot` wrote, to begin with; it is copied. None: an empty queue.
        token: Secret that clients must prove to have (`tcp`, `zmq`, `nixl`). None: that of the variable RL_TQ_TOKEN;
            on loopback, where there is none either, a new one is made and the variable set for child processes.

    `address` may end in options, `tcp://127.0.0.1:0?max_put_bytes=1000000000`; a storage's module lists them.

    Raises:
        AddressError: the address has no scheme, or is served already; there is no snapshot, or no empty directory; an
            option is not known; the queue could be reached from other hosts, and there is no token.
        StorageError: its scheme is no installed storage.
        ValueError: the deadline is not positive and finite.
    """
    check_seconds("timeout_s", timeout_s)
    scheme, name, options = _split(address, token)
    path = None if snapshot is None else Path(snapshot)
    storage = load_storage(scheme)
    _check_options(scheme, storage.serve, options)
    return _traced(storage.serve(name, timeout_s=timeout_s, snapshot=path, **options))


def connect(address: str, *, timeout_s: float = 60.0, token: str | None = None) -> TransferQueue:
    """A client of the queue that is served at `address`; any number per process, each good for any number of threads.

    `token`: the server's (`tcp`, `zmq`, `nixl`), which may stand in the address, too (`?token=`); None: that of the
    variable RL_TQ_TOKEN.

    Raises:
        AddressError: the address has no scheme or no name; an option is not known; there is no token, or another.
        StorageError: its scheme is no installed storage.
        ServerLostError: nobody serves there.
        ValueError: the deadline is not positive and finite.
    """
    check_seconds("timeout_s", timeout_s)
    scheme, name, options = _split(address, token)
    if not name:
        raise AddressError(f"{address!r} names no queue: pass the address of the client that serve() returned")
    storage = load_storage(scheme)
    _check_options(scheme, storage.connect, options)
    return _traced(storage.connect(name, timeout_s=timeout_s, **options))


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


def _check_options(scheme: str, function: Callable[..., Any], options: dict[str, str]) -> None:
    """Raise AddressError for options that a storage does not take."""
    known = inspect.signature(function).parameters
    taken = sorted(set(known) - {"name", "timeout_s", "snapshot"})
    if unknown := sorted(set(options) - set(taken)):
        raise AddressError(
            f"{scheme}:// does not take {unknown[0]!r}; its options are {taken}"
            + ("" if taken else ": the kernel says who is at the other end" if unknown == ["token"] else "")
        )


def _split(address: str, token: str | None) -> tuple[str, str, dict[str, str]]:
    scheme, separator, rest = address.partition("://")
    if not separator or not scheme:
        raise AddressError(f"{address!r} is not an address of a queue: write SCHEME://NAME, for example shm://my-run")
    name, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if token is not None:
        options["token"] = token
    return scheme, name, options
