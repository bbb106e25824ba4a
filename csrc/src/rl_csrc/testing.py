"""Test helper: addresses that this process listens at."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def listening_addresses() -> Iterator[str]:
    """IP addresses at which this process listens for TCP, one per socket, from Linux' /proc."""
    links: list[str] = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            links.append(str(fd.readlink()))
    mine = {link[8:-1] for link in links if link.startswith("socket:[")}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in mine:
                words = fields[1].partition(":")[0]
                raw = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
                yield socket.inet_ntop(family, raw)
