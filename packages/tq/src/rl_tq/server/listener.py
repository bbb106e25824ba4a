"""A TCP listener with limits: so many connections of a peer host, and so many of them without a proof of the token."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Protocol

from rl_csrc.ipc import close_in_children
from rl_tq.errors import AddressError
from rl_tq.protocol import framing

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_tq.protocol.framing import Limits

_RETRY_S = 0.1


class Served(Protocol):
    """One accepted connection, which threads of its own serve."""

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        ...

    @property
    def is_authenticated(self) -> bool:
        """Whether the other end proved the token."""
        ...

    @property
    def is_shut(self) -> bool:
        """Whether it was told to end."""
        ...

    def shut(self) -> None:
        """Have it end, without waiting."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Listener:
    """Accepts connections until `close`, from a thread of its own."""

    def __init__(
        self, address: Callable[[int], str], host: str, port: int, *, timeout_s: float, limits: Limits
    ) -> None:
        """Bind.

        Args:
            address: What users call the server, by port, for errors.
            host: Interface to listen at.
            port: 0 for a free one.
            timeout_s: Deadline of every send.
            limits: Of connections.

        Raises:
            AddressError: it cannot be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise AddressError(
                f"{address(port)} cannot be served: {error.strerror}; take another port, or an address of this host"
            ) from error
        close_in_children(self._socket)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._timeout_s = timeout_s
        self._limits = limits
        self._served: list[tuple[str, Served]] = []
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, serve: Callable[[socket.socket, str], Served]) -> None:
        """Accept from now on; `serve(connection, label)` begins to serve one, and returns at once."""
        self._thread = threading.Thread(target=self._accept, args=(serve,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more, and end every connection."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread is not None:
            self._thread.join()
        for _, served in self._served:
            served.close()

    def _accept(self, serve: Callable[[socket.socket, str], Served]) -> None:
        while not self._is_closed.is_set():
            try:
                connection, peer = self._socket.accept()
            except OSError:
                self._is_closed.wait(_RETRY_S)  # closed, or no descriptor is left for now
                continue
            close_in_children(connection)
            try:
                framing.prepare(connection, self._timeout_s)
                self._served = [each for each in self._served if each[1].is_alive]
                if self._has_room(peer[0]):
                    self._served.append((peer[0], serve(connection, f"client {peer[0]}:{peer[1]}")))
                else:
                    connection.close()
            except (OSError, RuntimeError):  # it left already, or no thread is left for it
                connection.close()

    def _has_room(self, host: str) -> bool:
        """Whether one more connection of a host may come; of too many without a proof, the oldest one ends."""
        own = [served for peer, served in self._served if peer == host]
        unproved = [served for served in own if not served.is_authenticated]
        # One that was shut before has not ended yet: in a burst, it would be shut again instead of the next.
        waiting = [served for served in unproved if not served.is_shut]
        if len(waiting) >= self._limits.unauthenticated:
            waiting[0].shut()
        return len(own) - len(unproved) < self._limits.connections
