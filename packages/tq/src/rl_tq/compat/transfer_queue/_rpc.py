"""Calls of the controller from other threads and processes, by the standard library's authenticated connections.

Calls and answers are pickled here (`Connection.send` would pass tensors by descriptor), samplers and tags being any
Python objects: only who knows the key is listened to. A
connection serves one call at a time; a client takes as many as it has calls under way.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import threading
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from rl_tq.errors import ServerLostError, WaitTimeoutError

_GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerInfo:
    """Where a controller is reached, and the key that it asks for. Pass it to other processes as it is."""

    host: str
    port: int
    key: bytes = field(repr=False)


class ControllerServer:
    """Answers the calls of a controller's public methods until `close`."""

    def __init__(self, controller: Any, host: str = "127.0.0.1") -> None:
        self._controller = controller
        key = secrets.token_bytes(32)
        self._listener = Listener((host, 0), backlog=128, authkey=key)
        address: Any = self._listener.address
        self.info = ControllerInfo(host=host, port=address[1], key=key)
        self._is_closed = False
        threading.Thread(target=self._accept, name="rl-tq-compat-controller", daemon=True).start()

    def close(self) -> None:
        """Take no more clients."""
        self._is_closed = True
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            # Only a connection wakes the thread that accepts.
            Client((self.info.host, self.info.port), authkey=self.info.key).close()
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError):
                continue  # whoever came has left, or has no key
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, contextlib.suppress(OSError, EOFError):  # the client left
            while not self._is_closed:
                method, arguments, named = pickle.loads(connection.recv_bytes())
                try:
                    value = getattr(self._controller, method)
                    answer = (True, value(*arguments, **named) if callable(value) else value)
                except Exception as error:  # noqa: BLE001 - whatever failed is the caller's to see
                    answer = (False, error)
                connection.send_bytes(pickle.dumps(answer))


class ControllerStub:
    """A controller as its clients have it. Good for any number of threads; survives a fork."""

    def __init__(self, info: ControllerInfo) -> None:
        self.info = info
        self._pid = os.getpid()
        self._idle: list[Connection] = []

    def call(self, method: str, *arguments: Any, timeout_s: float = _GRACE_S, **named: Any) -> Any:
        """Call a method and return what it returns, or raise what it raises.

        Raises:
            ServerLostError: the controller is gone.
            WaitTimeoutError: it did not answer in time.
        """
        connection = self._connection()
        try:
            connection.send_bytes(pickle.dumps((method, arguments, named)))
            if not connection.poll(timeout_s + _GRACE_S):
                connection.close()
                raise WaitTimeoutError(
                    f"the controller at {self.info.host}:{self.info.port} did not answer {method!r} within "
                    f"{timeout_s + _GRACE_S} s"
                )
            is_answer, value = pickle.loads(connection.recv_bytes())
        except (OSError, EOFError) as error:
            connection.close()
            if isinstance(error, WaitTimeoutError):
                raise
            raise self._lost(error) from error
        self._idle.append(connection)
        if not is_answer:
            raise value
        return value

    def close(self) -> None:
        """Leave."""
        while self._idle:
            self._idle.pop().close()

    def _connection(self) -> Connection:
        if self._pid != os.getpid():  # the parent's connections are the parent's
            self._pid, self._idle = os.getpid(), []
        try:
            return self._idle.pop()
        except IndexError:
            pass
        try:
            return Client((self.info.host, self.info.port), authkey=self.info.key)
        except (OSError, EOFError, AuthenticationError) as error:
            raise self._lost(error) from error

    def _lost(self, error: BaseException) -> ServerLostError:
        return ServerLostError(
            f"the controller at {self.info.host}:{self.info.port} is gone ({error or type(error).__name__}): call "
            "init() again where it ran"
        )
