"""Turns a URL into one end of a session, over the entry points `rl_ckpt.backends`."""

from __future__ import annotations

import math
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Literal, Protocol, cast
from urllib.parse import parse_qsl

from rl_ckpt.errors import AddressError, BackendError
from rl_ckpt.types import Role, SessionConfig

if TYPE_CHECKING:
    from rl_ckpt.base import CheckpointEngine

GROUP = "rl_ckpt.backends"
BUCKET_UNIT_BYTES = 256


class Backend(Protocol):
    """What an entry point of the group loads: a module (or object) with this one function."""

    def open_session(self, config: SessionConfig) -> CheckpointEngine:
        """Return the end that `config.role` asks for. Touch no peer yet: `prepare` and `connect` do."""
        ...


def connect(
    url: str,
    *,
    role: Role | Literal["send", "receive"],
    timeout_s: float = 60.0,
    bucket_bytes: int | None = None,
    delta: bool = False,
    zstd: bool = False,
    debug: bool = False,
    token: str | None = None,
) -> CheckpointEngine:
    """Open one end of a weight-transfer session. Nothing is allocated and no peer is called before `prepare`.

    Args:
        url: `scheme://name`, the same for both ends. The scheme names an installed backend: `shm` and `uds` move
            between processes of one Linux machine, `tcp` between machines, `inproc` inside one process. Options of a
            backend follow a `?`.
        role: `send` for the trainer (one per session), `receive` for every server.
        timeout_s: Longest wait for a peer, seconds; every single wait has this much.
        bucket_bytes: Size of one transfer bucket, a multiple of 256; the backend's own size if it is not given. The
            sender's counts. A larger tensor is split, at the price of one more copy for a receiver that iterates.
        delta: Let a sender keep a copy of the weights on the CPU, and send bit-exact differences to receivers that use
            `receive_into` and hold the version before. Whoever does not is sent everything.
        zstd: Compress the differences, for links that are slower than about 100 MB/s. Both ends need `rl-ckpt[zstd]`.
        debug: Let a receiver that iterates hand out copies, all of whose bytes become 0xFF (NaN) when the iterator
            advances, so that who keeps a view too long sees it at once. Costs a copy.
        token: Secret that both ends must know, for `tcp`; the variable RL_CKPT_TOKEN if it is not given.

    Raises:
        AddressError: the URL or an option is not understood.
        BackendError: no backend of that scheme is installed, or it cannot be imported here.
    """
    scheme, separator, rest = url.partition("://")
    name, _, query = rest.partition("?")
    if not (separator and scheme and name):
        raise AddressError(f"the URL is {url!r}; write scheme://name, for example shm://policy")
    if role not in tuple(Role):
        raise AddressError(f"role is {role!r}; allowed are 'send' and 'receive'")
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise AddressError(f"timeout_s is {timeout_s}; give a positive number of seconds")
    if bucket_bytes is not None and (bucket_bytes <= 0 or bucket_bytes % BUCKET_UNIT_BYTES):
        raise AddressError(f"bucket_bytes is {bucket_bytes}; give a positive multiple of {BUCKET_UNIT_BYTES}")
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if scheme not in installed:
        raise BackendError(f"no backend {scheme!r} is installed for {url!r}; there are: {', '.join(sorted(installed))}")
    if delta and role != Role.SEND:
        raise AddressError("delta=True is for the sender; a receiver takes differences whenever it uses receive_into")
    if debug and role != Role.RECEIVE:
        raise AddressError("debug=True is for a receiver: it poisons tensors that its consumer must not look at")
    if zstd and not delta:
        raise AddressError("zstd=True compresses differences, and there are none without delta=True")
    try:
        options = tuple(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError as error:
        raise AddressError(f"the URL is {url!r}; write options as ?name=value&name=value") from error
    config = SessionConfig(
        address=url,
        name=name,
        role=Role(role),
        timeout_s=timeout_s,
        bucket_bytes=bucket_bytes,
        delta=delta,
        zstd=zstd,
        debug=debug,
        token=token,
        options=options,
    )
    return _load(installed[scheme]).open_session(config)


def _load(entry: EntryPoint) -> Backend:
    try:
        loaded = entry.load()
    except ImportError as error:
        raise BackendError(
            f"backend {entry.name!r} cannot be imported ({error}); install what it needs: {_pip_line(entry)}"
        ) from error
    if not callable(getattr(loaded, "open_session", None)):
        raise BackendError(f"entry point {GROUP}:{entry.name} is {entry.value}, which has no open_session(config)")
    return cast("Backend", loaded)


def _pip_line(entry: EntryPoint) -> str:
    """The command that installs the backend's distribution, with the extra of the backend's name where it has one."""
    if entry.dist is None:
        return f"pip install the distribution that provides {entry.module}"
    extras = entry.dist.metadata.get_all("Provides-Extra") or []
    return (
        f"pip install '{entry.dist.name}[{entry.name}]'" if entry.name in extras else f"pip install {entry.dist.name}"
    )
