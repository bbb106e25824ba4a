"""Program in a sandbox of another kind: it connects to its caller, which sends code over the connection.

Started with this folder first in `sys.path`, and by the sandbox's own Python: it imports the standard library alone.
Frames are bytes behind their length. Limits are those of the sandbox.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_agent.sandbox.process import execution, judge
else:
    import execution
    import judge

_HEADER = struct.Struct("<I")
_CONNECT_S = 60.0


def main(host: str, port: str, token: str, mode: str) -> None:
    """Serve the caller in a mode: `solution`, the values of a grade; `code`, runs in one namespace."""
    connection = socket.create_connection((host, int(port)), _CONNECT_S)
    connection.settimeout(None)
    connection.sendall(f"{token}\n".encode())
    if mode == "solution":
        judge.hold_solution(_received(connection).decode(errors="surrogatepass"), connection.detach())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY:  # the rest is for the report
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(soft - execution.MAX_REPORT_BYTES, 0), hard))
    namespace = vars(execution.own_main_module())
    while True:
        request = json.loads(_received(connection))
        files = [os.open(f"/tmp/.rl-agent-{number}", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600) for number in (0, 1)]
        for number in (0, 1):
            os.unlink(f"/tmp/.rl-agent-{number}")
        os.write(files[0], request["stdin"].encode(errors="surrogatepass"))
        os.lseek(files[0], 0, os.SEEK_SET)
        for source, target in ((files[0], 0), (files[1], 1), (files[1], 2)):
            os.dup2(source, target)
        for each in files:
            os.close(each)
        execution.open_streams()
        execution.run(request["code"], namespace, is_last=request["is_last"])
        size = os.fstat(1).st_size
        connection.sendall(_HEADER.pack(size))
        for start in range(0, size, 1 << 20):
            connection.sendall(os.pread(1, 1 << 20, start))


def _received(connection: socket.socket) -> bytes:
    (size,) = _HEADER.unpack(_exactly(connection, _HEADER.size))
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            sys.exit()
        data += piece
    return data
