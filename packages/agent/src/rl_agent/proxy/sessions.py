"""Sessions of the proxy: names, tokens, sampling parameters, expiry."""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rl_agent.errors import RowError
from rl_agent.proxy.recording import Recording
from rl_rollout.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_log = logging.getLogger(__name__)
_STRUCTURES = ("json_schema", "regex", "choice")
_MOST_EXPIRED = 4096
"""Names and keys of expired sessions that are remembered, so that a late request is an error and not a new session."""


@dataclass(slots=True, kw_only=True, eq=False)
class ProxySession:
    """Session of the proxy."""

    name: str
    recording: Recording = field(default_factory=Recording)
    key: str | None = None
    """Its own API key; None: any caller of the proxy that gives the name."""
    params: SamplingParams
    """Sampling parameters for what requests leave open."""
    is_fixed: bool = False
    """Whether requests cannot change how tokens are drawn: they may only ask for fewer."""
    last_used: float = 0.0
    """Time of the last request, seconds of the monotonic clock."""
    num_running: int = 0
    """Number of requests that are being answered."""
    num_drawn: int = 0
    """Number of answers that were asked for, from which seeds are derived."""
    failure: Exception | None = None
    """Error of the server that its last answered request ended with."""
    warned: set[str] = field(default_factory=set[str])
    """What was ignored and has been logged."""

    def sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters of its next answer."""
        if not self.is_fixed:
            return replace(self.params, **given)
        params, self.num_drawn = self.params, self.num_drawn + 1
        if params.seed is not None:  # with one seed, all turns would repeat the draws of the first
            params = replace(params, seed=(params.seed + 0x9E3779B1 * (self.num_drawn - 1)) % 2**31)
        structure = {name: given[name] for name in _STRUCTURES if name in given}
        limit = min(params.max_new_tokens, given.get("max_new_tokens", params.max_new_tokens))
        return replace(params, max_new_tokens=limit, **structure)

    def warn(self, ignored: Iterable[str]) -> None:
        """Log what a request holds and the answer does not depend on, once per session."""
        if new := [name for name in ignored if name not in self.warned]:
            self.warned.update(new)
            _log.warning("session %r: ignored in its requests: %s", self.name, ", ".join(new))


class Sessions:
    """Sessions by name and by key; those that are idle for too long are dropped.

    Args:
        params: Sampling parameters of sessions that bring none.
        expiry_s: Seconds without a request after which a session is dropped; None: never.
    """

    def __init__(self, params: SamplingParams, expiry_s: float | None) -> None:
        self._params, self._expiry_s = params, expiry_s
        self._by_name: OrderedDict[str, ProxySession] = OrderedDict()
        self._by_key: dict[str, ProxySession] = {}
        self._expired: deque[str] = deque(maxlen=_MOST_EXPIRED)

    def __len__(self) -> int:
        return len(self._by_name)

    def create(
        self, name: str | None = None, sampling_params: Mapping[str, Any] | None = None, *, has_key: bool = True
    ) -> ProxySession:
        """Create a session, perhaps with sampling parameters that its requests cannot change.

        Without a key of its own it is open to any caller of the proxy that gives its name.

        Raises:
            RowError: there is a session of this name.
        """
        self.expire()
        name = uuid4().hex if name is None else name
        if not name or name in self._by_name:
            raise RowError(f"session {name!r} exists already; choose another name")
        is_fixed = sampling_params is not None
        params = SamplingParams(**(sampling_params or {})) if is_fixed else self._params
        key = secrets.token_urlsafe(24) if has_key else None
        session = ProxySession(name=name, key=key, params=params, is_fixed=is_fixed)
        if key is not None:
            self._by_key[key] = session
        return self._touched(session)

    def with_key(self, key: str) -> ProxySession | None:
        """The session that was created with this key."""
        self.expire()
        found = self._by_key.get(key)
        return None if found is None else self._touched(found)

    def named(self, name: str, *, may_create: bool = True) -> ProxySession:
        """The session of this name, created if a request is its first.

        Raises:
            RowError: it has expired, or there is none.
        """
        self.expire()
        if (found := self._by_name.get(name)) is not None:
            return self._touched(found)
        if name in self._expired:
            raise RowError(f"session {name!r} was idle for more than expiry_s={self._expiry_s:g} s and is gone")
        if not may_create:
            raise RowError(f"there is no session {name!r}; it was never created, or is finished")
        return self._touched(ProxySession(name=name, params=self._params))

    def has(self, session: ProxySession) -> bool:
        """Whether a session is neither finished nor expired."""
        return self._by_name.get(session.name) is session

    def pop(self, name: str) -> Recording:
        """End a session; returns its recording, an empty one if there is none."""
        session = self._by_name.pop(name, None)
        if session is None:
            return Recording()
        self._by_key.pop(session.key or "", None)
        return session.recording

    def expire(self) -> None:
        """Drop the sessions that are idle for too long; the one used longest ago comes first."""
        if self._expiry_s is None:
            return
        for session in list(self._by_name.values()):
            if time.monotonic() - session.last_used < self._expiry_s:
                return
            if session.num_running:
                self._touched(session)
                continue
            _log.warning(
                "session %r was idle for more than expiry_s=%g s and is dropped, with %d exchanges",
                *(session.name, self._expiry_s, len(session.recording.exchanges)),
            )
            self.pop(session.name)
            self._expired += [session.name, *([] if session.key is None else [session.key])]

    def _touched(self, session: ProxySession) -> ProxySession:
        session.last_used = time.monotonic()
        self._by_name[session.name] = session
        self._by_name.move_to_end(session.name)
        return session


def begins_with(key: str, token: str) -> bool:
    """Whether a key is the token, or the token, a colon and a name; compared in constant time."""
    shown, wanted = key.encode(errors="surrogateescape"), token.encode()
    return hmac.compare_digest(shown[: len(wanted)], wanted) and shown[len(wanted) :][:1] in (b"", b":")
