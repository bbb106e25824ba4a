"""Calls of the controller from other threads and processes: rl-tq's messages over TCP, after its handshake.

Only who knows the controller's key is listened to, and arguments are plain values (`codec`): nothing that is read can
run code. A connection serves one call at a time; a client takes as many as it has calls under way.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from rl_csrc.ipc import close_in_children
from rl_tq import errors
from rl_tq.errors import AddressError, ServerLostError, TransferQueueError, WaitTimeoutError
from rl_tq.protocol import framing as _stream
from rl_tq.protocol import handshake as _handshake
from rl_tq.protocol.codec import encode as encode_message
from rl_tq.protocol.framing import Limits
from rl_tq.server.listener import Listener
from rl_tq_transfer_queue.values import codec

_GRACE_S = 30.0
_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, LookupError, MemoryError,
    NotImplementedError, OverflowError, RuntimeError, TimeoutError, TypeError, ValueError, ZeroDivisionError,
)  # fmt: skip
METHODS = frozenset({
    "check_dtypes", "clear_partition", "clear_samples", "get_consumption_status", "get_metadata",
    "get_partition_snapshot", "get_production_status", "kv_list", "kv_retrieve_keys", "kv_retrieve_meta",
    "list_partitions", "locate", "publish", "queue_address", "reset_consumption", "restore", "set_custom_meta",
    "snapshot",
})  # fmt: skip
"""Methods of the controller that clients may call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerInfo:
    """Address of a controller and its secret key. Pass it to other processes as it is."""

    host: str
    port: int
    key: str = field(repr=False)


class ControllerServer:
    """RPC server for a controller's public methods, until `close`."""

    def __init__(self, controller: Any, host: str = "127.0.0.1", key: str | None = None) -> None:
        key = key or secrets.token_hex(32)
        self._listener = Listener(
            lambda port: f"the controller at {host}:{port}", host, 0, timeout_s=_GRACE_S, limits=Limits()
        )  # fmt: skip
        self.info = ControllerInfo(host=host, port=self._listener.port, key=key)
        self._listener.start(lambda connection, _: _ClientConnection(controller, connection, key.encode()))

    def close(self) -> None:
        """Stop accepting clients."""
        self._listener.close()


class _ClientConnection:
    """Connection of one client, served by its own thread."""

    def __init__(self, controller: Any, connection: socket.socket, key: bytes) -> None:
        self.is_authenticated = self.is_shut = False
        self._controller = controller
        self._connection = connection
        self._key = key
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the connection is open."""
        return self._thread.is_alive()

    def shut(self) -> None:
        """Shut it down without waiting."""
        self.is_shut = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it. A call that is blocked on samples is abandoned."""
        self.shut()

    def _serve(self) -> None:
        with self._connection, contextlib.suppress(OSError, ValueError, MemoryError):  # the client left, or is none
            _handshake.welcome(self._connection, self._key)
            self.is_authenticated = True
            while True:
                message, _ = _stream.receive(self._connection)
                _stream.send(self._connection, encode_message(self._answer(message)))

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            method, arguments, named = codec.decode(message["call"])
            if method not in METHODS:
                raise AttributeError(f"the controller has no {method!r} to call")
            value = getattr(self._controller, method)
            return {"value": codec.encode(value(*arguments, **named) if callable(value) else value)}
        except Exception as error:  # noqa: BLE001 - whatever failed is the caller's to see
            return {"error": type(error).__name__, "message": str(error.args[0]) if error.args else str(error)}


class ControllerStub:
    """RPC stub of a controller for its clients. Thread-safe; usable after a fork."""

    def __init__(self, info: ControllerInfo) -> None:
        self.info = info
        self._pid = os.getpid()
        self._idle: list[socket.socket] = []

    def call(self, method: str, *arguments: Any, timeout_s: float = _GRACE_S, **named: Any) -> Any:
        """Call a method and return what it returns, or raise what it raises.

        Raises:
            ServerLostError: the controller is gone.
            WaitTimeoutError: it did not answer in time.
            TypeError: an argument cannot be carried.
        """
        call = encode_message({"call": codec.encode((method, arguments, named))})
        connection = self._connection()
        try:
            connection.settimeout(timeout_s + _GRACE_S)
            _stream.send(connection, call)
            reply, _ = _stream.receive(connection)
        except OSError as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise WaitTimeoutError(
                    f"the controller at {self.info.host}:{self.info.port} did not answer {method!r} within "
                    f"{timeout_s + _GRACE_S} s"
                ) from error
            raise self._lost(error) from error
        self._idle.append(connection)
        if "error" in reply:
            raise _error(reply["error"], reply["message"])
        return codec.decode(reply["value"])

    def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop().close()

    def __del__(self) -> None:
        self.close()

    def _connection(self) -> socket.socket:
        if self._pid != os.getpid():  # the parent's connections are the parent's
            self._pid, self._idle = os.getpid(), []
        try:
            return self._idle.pop()
        except IndexError:
            pass
        try:
            connection = socket.create_connection((self.info.host, self.info.port), timeout=_GRACE_S)
            close_in_children(connection)
            _stream.prepare(connection, _GRACE_S)
            _handshake.introduce(connection, str(self.info), _GRACE_S, self.info.key.encode())
        except (OSError, AddressError) as error:
            raise self._lost(error) from error
        return connection

    def _lost(self, error: BaseException) -> ServerLostError:
        return ServerLostError(
            f"the controller at {self.info.host}:{self.info.port} is gone ({error or type(error).__name__}): call "
            "init() again where it ran"
        )


def _error(name: str, message: str) -> Exception:
    known = {kind.__name__: kind for kind in _ERRORS}
    kind = known.get(name) or getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(message)
    return TransferQueueError(f"the controller failed with {name}: {message}")
