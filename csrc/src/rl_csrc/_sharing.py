"""Sending a descriptor to another process over a UNIX socket."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

from rl_csrc.errors import DeadlineError, PeerDiedError

if TYPE_CHECKING:
    from collections.abc import Generator

_GREETING = b"rl-csrc fd\n"


def send_fd(connection: socket.socket, fd: int) -> None:
    """Send one descriptor (SCM_RIGHTS) beside a short greeting."""
    socket.send_fds(connection, [_GREETING], [fd])


@contextlib.contextmanager
def receive_fd(connection: socket.socket, *, timeout_s: float) -> Generator[int]:
    """Yield the descriptor that ``send_fd`` sent, and close it on leaving.

    Raises ``DeadlineError`` if none came in time, ``PeerDiedError`` if the peer closed or sent something else.
    """
    before = connection.gettimeout()
    connection.settimeout(max(timeout_s, 1e-6))
    try:
        greeting, fds, _, _ = socket.recv_fds(connection, len(_GREETING), 1)
    except TimeoutError as error:
        raise DeadlineError(f"the peer sent no descriptor within {timeout_s} s: is it at the same step?") from error
    finally:
        connection.settimeout(before)
    try:
        if greeting != _GREETING or len(fds) != 1:
            raise PeerDiedError(
                f"the peer sent {greeting!r} and {len(fds)} descriptors where it should share one: out of step"
            )
        yield fds[0]
    finally:
        for fd in fds:
            os.close(fd)
