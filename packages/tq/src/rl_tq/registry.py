"""`serve` and `connect`: the scheme of an address selects the storage, an entry point of group `rl_tq.storage`."""

from __future__ import annotations

import inspect
import os
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from rl_tq.errors import AddressError, StorageError
from rl_tq.metadata.checks import check_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.metadata import EntryPoint

    from rl_tq.base import Storage, TransferQueue
    from rl_tq.types import Policy, StalenessPolicy

GROUP = "rl_tq.storage"
_DEFAULT_TIMEOUT_S = 60.0


def serve(
    address: str = "shm://",
    *,
    timeout_s: float = _DEFAULT_TIMEOUT_S,
    snapshot: str | Path | None = None,
    token: str | None = None,
    also: Sequence[str] = (),
) -> TransferQueue:
    """Serve a queue from this process, and return a client of it. Closing that client ends the queue.

    Args:
        address: `shm://NAME` (processes of one host and user), `inproc://NAME` (threads of this process), or that of
            another storage. An empty NAME is replaced by a fresh one; other processes use the client's `address`. It
            may end in options, `tcp://127.0.0.1:0?max_put_bytes=1000000000`: `timeout_s` and those of the storage.
        timeout_s: Default deadline of calls, seconds.
        snapshot: A directory that `TransferQueue.snapshot` wrote, as initial state; it is copied. None: empty.
        token: Secret that clients must prove to have (`tcp`, `zmq`, `nixl`). None: that of the variable RL_TQ_TOKEN;
            on loopback, where there is none either, a new one is made and the variable set for child processes.
        also: More addresses of the same queue (`tcp`, `zmq`, `inproc`; in addition to `shm`, `file`, `tcp`, `zmq` or
            `inproc`): the client's `addresses` lists all of them.

    Raises:
        AddressError: the address has no scheme, or is served already; there is no snapshot, or no empty directory; an
            option is not known, or the deadline not positive and finite; the queue could be reached from other hosts,
            and there is no token.
        StorageError: its scheme is no installed storage.
    """
    urls = (address, *also)
    storage, name, given = _parse(address, timeout_s, token, urls)
    path = None if snapshot is None else Path(snapshot)
    queue = storage.serve(name, snapshot=path, **given)
    try:
        for url in also:
            other, name, given = _parse(url, timeout_s, token, urls)
            host = getattr(queue, "host", None)
            if host is None or not hasattr(other, "attach"):
                raise AddressError(
                    f"a queue at {address} cannot be served at {url}, too: use tcp://, zmq:// or inproc:// there"
                )
            other.attach(host, name, **given)
    except BaseException:
        queue.close()
        raise
    return _traced(queue)


def connect(address: str, *, timeout_s: float = _DEFAULT_TIMEOUT_S, token: str | None = None) -> TransferQueue:
    """Connect to the queue served at `address`. A process may have several clients; each is thread-safe.

    `token`: the server's (`tcp`, `zmq`, `nixl`); None: that of the variable RL_TQ_TOKEN. The address may end in the
    option `timeout_s`; options of the server are ignored, so that both ends can be given one address.

    Raises:
        AddressError: the address has no scheme or no name; an option is not known, or the deadline not positive and
            finite; the token is missing or wrong.
        StorageError: its scheme is no installed storage.
        ServerLostError: no server answers there.
    """
    storage, name, given = _parse(address, timeout_s, token, ())
    if not name:
        raise AddressError(f"{address!r} names no queue: pass the address of the client that serve() returned")
    for option in getattr(storage, "OPTIONS", {}):
        given.pop(option, None)
    return _traced(storage.connect(name, **given))


def create_policy(name: str, **parameters: Any) -> Policy:
    """Create a policy, shipped or an entry point of the group `rl_tq.policies`, for `get_meta(sampler=...)`.

    Raises:
        ValueError: there is no such policy, or it has no such parameter.
    """
    from rl_tq.policies import policy_named

    kind = policy_named(name)
    try:
        return kind(**parameters)
    except TypeError as error:
        known = sorted(each.name for each in fields(kind))
        raise ValueError(f"policy {name!r} takes {known}, not {sorted(parameters)}") from error


def staleness_policies() -> dict[str, type[StalenessPolicy]]:
    """Staleness policies that this process knows without entry points, by name: for the option `staleness`."""
    from rl_tq.policies import POLICIES
    from rl_tq.types import StalenessPolicy

    return {name: policy for name, policy in POLICIES.items() if issubclass(policy, StalenessPolicy)}


def register_policy(kind: type[Policy]) -> None:
    """Make a policy known to the queues that this process serves, as an entry point of `rl_tq.policies` does.

    Raises:
        ValueError: it is not a named subclass of `Policy`, or has the name of a shipped one.
    """
    from rl_tq.policies import POLICIES
    from rl_tq.types import Policy

    name, bases = getattr(kind, "name", None), kind.__mro__
    if Policy not in bases or not isinstance(name, str):
        raise ValueError(f"{kind.__name__} is not a subclass of Policy with a `name`; make it one")
    if POLICIES.setdefault(name, kind) is not kind:
        if POLICIES[name].__module__.startswith("rl_tq."):
            raise ValueError(f"{kind.__name__} has the name {name!r}, which a shipped policy has; choose another")
        POLICIES[name] = kind


def load_storage(name: str) -> Storage:
    """Storage by name.

    Raises:
        StorageError: it is not installed, or cannot be imported here.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise StorageError(f"there is no storage {name!r}; installed are {sorted(found)}")
    try:
        return found[name].load()
    except ImportError as error:
        raise StorageError(f"storage {name!r} cannot be imported: {error}; try: {_pip_line(found[name])}") from error


def _pip_line(entry: EntryPoint) -> str:
    """Pip command that installs the plug-in's distribution, with the extra of its name if there is one."""
    if entry.dist is None:
        return f"pip install the distribution that provides {entry.module}"
    extra = f"[{entry.name}]" if entry.name in (entry.dist.metadata.get_all("Provides-Extra") or []) else ""
    return f"pip install '{entry.dist.name}{extra}'"


def _traced(queue: TransferQueue) -> TransferQueue:
    directory = os.environ.get("RL_TQ_TRACE")
    if not directory:
        return queue
    from rl_tq.tracing import trace

    return trace(queue, directory)


def _parse(address: str, timeout_s: float, token: str | None, others: Sequence[str]) -> tuple[Any, str, dict[str, Any]]:
    """Storage, name and keyword arguments of an address; the token may be for one of the `others`."""
    scheme, separator, rest = address.partition("://")
    if not separator or not scheme:
        raise AddressError(f"{address!r} is not an address of a queue: write SCHEME://NAME, for example shm://my-run")
    name, _, query = rest.partition("?")
    storage = load_storage(scheme)
    known = {"timeout_s": "deadline of calls that are not given their own, seconds", **getattr(storage, "OPTIONS", {})}
    options: dict[str, Any] = {}
    for option, value in parse_qsl(query, keep_blank_values=True):
        if option == "token":
            raise AddressError(
                f"this address of {scheme}:// has a token in it, where logs show it: pass token=, or set RL_TQ_TOKEN"
            )
        if option not in known:
            raise AddressError(f"{scheme}:// does not take {option!r}; its options are {sorted(known)}")
        if option in options:
            raise AddressError(f"{address!r} gives {option!r} twice: give it once")
        options[option] = value
    options["timeout_s"] = _seconds(address, options.get("timeout_s"), timeout_s)
    if token is not None and _takes_token(address):
        options["token"] = token
    elif token is not None and not any(map(_takes_token, others)):
        raise AddressError(f"{scheme}:// takes no token: the kernel says who is at the other end")
    return storage, name, options


def _takes_token(address: str) -> bool:
    return "token" in inspect.signature(load_storage(address.partition("://")[0]).connect).parameters


def _seconds(address: str, text: str | None, argument: float) -> float:
    """Deadline from the address or the argument; an error if both are given and differ."""
    try:
        seconds = argument if text is None else float(text)
    except ValueError:
        raise AddressError(f"{address!r} gives timeout_s={text!r}: write a number of seconds") from None
    if argument not in (_DEFAULT_TIMEOUT_S, seconds):
        raise AddressError(f"{address!r} gives timeout_s={text}, and the argument is {argument}: give one of them")
    try:
        check_seconds("timeout_s", seconds)
    except ValueError as error:
        raise AddressError(str(error)) from None
    return seconds
