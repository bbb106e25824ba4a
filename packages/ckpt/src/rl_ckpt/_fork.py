"""Keeps forked children from holding a session open: a peer's death must be seen although its process has children."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_hooks: list[bool] = []


def close_in_children(connection: socket.socket) -> socket.socket:
    """Close this socket in every child that is forked from now on; in this process nothing changes. Returns it."""
    if not _hooks and hasattr(os, "register_at_fork"):
        _hooks.append(True)
        os.register_at_fork(after_in_child=_close_all)
    _sockets.add(connection)
    return connection


def _close_all() -> None:
    for connection in list(_sockets):
        connection.close()
    _sockets.clear()
