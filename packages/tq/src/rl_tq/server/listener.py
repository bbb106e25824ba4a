"""TCP listener with limits per peer host, for all connections and for unauthenticated ones."""

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
    """Accepted connection, served by its own threads."""

    @property
    def is_alive(self) -> bool:
        """Whether its threads still run."""
        ...

    @property
    def is_authenticated(self) -> bool:
        """Whether the peer has proved the token."""
        ...

    @property
    def is_shut(self) -> bool:
        """Whether `shut` was called."""
        ...

    def shut(self) -> None:
        """Shut it down, without waiting for its end."""
        ...

    def close(self) -> None:
        """Shut it down and wait for its end."""
        ...


class Listener:
    """TCP listener that accepts connections in its own thread until `close`."""

    def __init__(
        self, address: Callable[[int], str], host: str, port: int, *, timeout_s: float, limits: Limits
    ) -> None:
        """Bind; port 0 is a free one. `address` maps the port to the server's address, for error messages.

        Raises:
            AddressError: the port cannot be bound.
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
        """Start accepting; `serve(connection, label)` starts serving a connection and returns at once."""
        self._thread = threading.Thread(target=self._accept, args=(serve,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, and close every connection."""
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
        """Whether a host may have another connection; above the limit, its oldest unauthenticated one is shut down."""
        own = [served for peer, served in self._served if peer == host]
        unproved = [served for served in own if not served.is_authenticated]
        # One that was shut before has not ended yet: in a burst, it would be shut again instead of the next.
        waiting = [served for served in unproved if not served.is_shut]
        if len(waiting) >= self._limits.unauthenticated:
            waiting[0].shut()
        return len(own) - len(unproved) < self._limits.connections
