"""`connect`: opens one end of a session from a URL, whose scheme is an entry point of group `rl_ckpt.backends`."""

from __future__ import annotations

import math
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal, overload
from urllib.parse import parse_qsl

from rl_ckpt.errors import AddressError, BackendError
from rl_ckpt.types import Capability, Role, SessionConfig

if TYPE_CHECKING:
    from rl_ckpt.base import WeightReceiver, WeightSender

GROUP = "rl_ckpt.backends"
BUCKET_UNIT_BYTES = 256
_FLAGS = {"delta": Role.SEND, "zstd": Role.SEND, "debug": Role.RECEIVE}
"""Flags of `connect`, and the role that each is for."""
_NEEDS = {"delta": Capability.DELTA, "zstd": Capability.DELTA, "debug": Capability.VIEWS}
"""Capability of a backend that a flag needs."""
_NOUNS = {Role.SEND: "sender", Role.RECEIVE: "receiver"}
_WORDS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@overload
def connect(
    url: str,
    *,
    role: Literal["send", Role.SEND],
    timeout_s: float | None = None,
    bucket_bytes: int | None = None,
    delta: bool | None = None,
    zstd: bool | None = None,
    token: str | None = None,
) -> WeightSender: ...


@overload
def connect(
    url: str,
    *,
    role: Literal["receive", Role.RECEIVE],
    timeout_s: float | None = None,
    bucket_bytes: int | None = None,
    debug: bool | None = None,
    token: str | None = None,
) -> WeightReceiver: ...


@overload
def connect(
    url: str,
    *,
    role: Role | str,
    timeout_s: float | None = None,
    bucket_bytes: int | None = None,
    delta: bool | None = None,
    zstd: bool | None = None,
    debug: bool | None = None,
    token: str | None = None,
) -> Any: ...


def connect(
    url: str,
    *,
    role: Role | str,
    timeout_s: float | None = None,
    bucket_bytes: int | None = None,
    delta: bool | None = None,
    zstd: bool | None = None,
    debug: bool | None = None,
    token: str | None = None,
) -> WeightSender | WeightReceiver:
    """Open one end of a weight-transfer session. Nothing is allocated and no peer is called before `prepare`.

    All arguments but `role` and `token` can also be given in the URL, `?delta=1&bucket_bytes=8388608`. Flags of the
    other role are ignored there, so that both ends can have one URL. An argument that contradicts the URL is an error.

    Args:
        url: `scheme://name`, the same for both ends. The scheme names an installed backend: `shm` and `uds` move
            between processes of one Linux host, `tcp` between machines, `inproc` inside one process. Options follow a
            `?`; `Transport.options` of a backend lists its own.
        role: `send` for the trainer (one per session) gives a `WeightSender`, `receive` for servers a `WeightReceiver`.
        timeout_s: Longest wait for a peer, seconds; every single wait has this much. 60 if not given.
        bucket_bytes: Size of one transfer bucket, a multiple of 256; the backend's own size if it is not given. The
            sender's counts. A larger tensor is split, at the price of one more copy for a receiver that iterates.
        delta: Let a sender keep a copy of the weights on the CPU, and send bit-exact differences to receivers that use
            `receive_into` and hold the version before. Others are sent everything.
        zstd: Compress the differences, for links that are slower than about 100 MB/s. Both ends need `rl-ckpt[zstd]`.
        debug: Let a receiver that iterates hand out copies, all of whose bytes become 0xFF (NaN) when the iterator
            advances, so that a view kept too long is seen at once. Costs a copy.
        token: Secret that both ends must know, for backends over TCP; the variable RL_CKPT_TOKEN if it is not given.

    Raises:
        AddressError: the URL or an option is not understood.
        BackendError: no backend of that scheme is installed, or it cannot be imported here.
    """
    scheme, name, query = _parts_of(url)
    if role not in tuple(Role):
        raise AddressError(f"role is {role!r}; allowed are 'send' and 'receive'")
    given = {"timeout_s": timeout_s, "bucket_bytes": bucket_bytes, "delta": delta, "zstd": zstd, "debug": debug}
    common, options = _options_of(url, query, given, Role(role))
    backend = _backend(url, scheme)
    for option, _ in options:
        if option not in backend.options:
            known = ", ".join(backend.options) or "none"
            raise AddressError(
                f"{url!r} has an option {option!r}; options of this backend: {known}; of every one: {', '.join(given)}"
            )
    for flag, capability in _NEEDS.items():
        if common[flag] and capability not in backend.capabilities:
            raise AddressError(f"{scheme}:// promises no {capability.value}, which {flag}=True of {url!r} needs")
    return _open(
        backend, SessionConfig(address=url, name=name, role=Role(role), token=token, options=options, **common)
    )


def capabilities(url: str) -> frozenset[Capability]:
    """Capabilities of the backend of a URL; opens nothing.

    Raises:
        AddressError, BackendError: as `connect`.
    """
    return _backend(url, _parts_of(url)[0]).capabilities


def _parts_of(url: str) -> tuple[str, str, str]:
    """Scheme, name and query."""
    scheme, separator, rest = url.partition("://")
    name, _, query = rest.partition("?")
    if not (separator and scheme and name):
        raise AddressError(f"the URL is {url!r}; write scheme://name, for example shm://policy")
    return scheme, name, query


def _options_of(
    url: str, query: str, given: dict[str, Any], role: Role
) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Common options from arguments and URL, checked; and the remaining options, which are the backend's."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise AddressError(f"the URL is {url!r}; write options as ?name=value&name=value") from error
    written = dict(pairs)
    if len(written) < len(pairs):
        raise AddressError(f"{url!r} gives an option twice")
    if "token" in written:
        raise AddressError("a token in a URL ends up in logs; pass token=... to connect, or set RL_CKPT_TOKEN")
    for flag, end in _FLAGS.items():
        if given[flag] and role != end:
            raise AddressError(f"{flag}=True is for the {_NOUNS[end]}; this end has role={role.value!r}")
    common: dict[str, Any] = {}
    for name, value in given.items():
        read = _value_of(name, written.pop(name), url) if name in written else None
        if name in _FLAGS and role != _FLAGS[name]:
            read = None
        if None not in (read, value) and read != value:
            raise AddressError(f"{name} is {read} in {url!r} and {value} as an argument; give it once")
        common[name] = value if read is None else read
    common |= {flag: bool(common[flag]) for flag in _FLAGS}
    timeout_s = common["timeout_s"] = 60.0 if common["timeout_s"] is None else common["timeout_s"]
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise AddressError(f"timeout_s is {timeout_s}; give a positive number of seconds")
    bucket_bytes = common["bucket_bytes"]
    if bucket_bytes is not None and (bucket_bytes <= 0 or bucket_bytes % BUCKET_UNIT_BYTES):
        raise AddressError(f"bucket_bytes is {bucket_bytes}; give a positive multiple of {BUCKET_UNIT_BYTES}")
    if common["zstd"] and not common["delta"]:
        raise AddressError("zstd=True compresses differences, and there are none without delta=True")
    return common, tuple(written.items())


def _value_of(name: str, text: str, url: str) -> object:
    if name in _FLAGS:
        if text.lower() not in _WORDS:
            raise AddressError(f"{name} is {text!r} in {url!r}; allowed are {', '.join(_WORDS)}")
        return _WORDS[text.lower()]
    try:
        return float(text) if name == "timeout_s" else int(text)
    except ValueError as error:
        raise AddressError(f"{name} is {text!r} in {url!r}; give a number") from error


def _open(backend: Any, config: SessionConfig) -> WeightSender | WeightReceiver:
    from rl_ckpt.receiver.receiver import Receiver
    from rl_ckpt.sender.sender import Sender
    from rl_ckpt.transports.base import Transport

    if not isinstance(backend, Transport):  # a backend with its own ends, without the transaction
        return backend.open_session(config)
    if config.role is Role.SEND:
        return Sender(config, backend.sender(config))
    return Receiver(config, backend.receiver(config))


def _backend(url: str, scheme: str) -> Any:
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    name, _, filesystem = scheme.partition("+")
    backend = _load(installed[name]) if name in installed else None
    if backend is None or (filesystem and not getattr(backend, "has_filesystems", False)):
        raise BackendError(f"no backend {scheme!r} is installed for {url!r}; there are: {', '.join(sorted(installed))}")
    return backend


def _load(entry: EntryPoint) -> Any:
    try:
        loaded = entry.load()
    except ImportError as error:
        raise BackendError(
            f"backend {entry.name!r} cannot be imported ({error}); install what it needs: {_pip_line(entry)}"
        ) from error
    if not hasattr(loaded, "Backend"):
        raise BackendError(
            f"entry point {GROUP}:{entry.name} is {entry.value}, which has no class Backend (rl_ckpt.transports)"
        )
    return loaded.Backend()


def _pip_line(entry: EntryPoint) -> str:
    """The command that installs the backend's distribution, with the extra of the backend's name where it has one."""
    if entry.dist is None:
        return f"pip install the distribution that provides {entry.module}"
    extras = entry.dist.metadata.get_all("Provides-Extra") or []
    return (
        f"pip install '{entry.dist.name}[{entry.name}]'" if entry.name in extras else f"pip install {entry.dist.name}"
    )
