"""Free ports."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_FIRST, _LAST = 20_000, 65_535
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ATTEMPTS = 200


def free_address(host: str) -> tuple[str, int]:
    """`host`, which is this machine's, and a port that nobody listens at yet.

    Seconds may pass until it is used, in which the other processes of a run connect and listen: the port is one that
    the kernel does not give to those who ask for any.
    """
    draw, ports = random.SystemRandom(), _ports_of_ones_own()
    for port in draw.sample(ports, min(len(ports), _ATTEMPTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return host, port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


def _ports_of_ones_own() -> list[int]:
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return []
    return [*range(_FIRST, low), *range(max(high + 1, _FIRST), _LAST)]
