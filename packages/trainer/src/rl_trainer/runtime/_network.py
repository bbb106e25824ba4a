"""Free ports."""

from __future__ import annotations

import socket


def free_address(host: str) -> tuple[str, int]:
    """`host`, which is this machine's, and a port that nobody listens at yet."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]
