"""What the suites bring to their own defence: failures that say what was seen, and ports that nobody takes away."""

import asyncio
import errno
import socket
import sys
from types import SimpleNamespace

import pytest

from rl_ckpt import CkptError, ReceiverState
from rl_ckpt.testing import KillSuite, new_port


def test_a_failed_assertion_of_a_suite_shows_its_values():
    async def received():
        done = asyncio.get_running_loop().create_future()
        done.set_exception(CkptError("gone"))
        return done

    done = asyncio.run(received())
    with pytest.raises(AssertionError, match="assert 3 is None"):
        KillSuite._examine(SimpleNamespace(version=3, state=ReceiverState.IDLE), done, ("Seal", "before"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port that is bound cannot be listened on by another")
def test_a_new_port_is_given_to_nobody_who_does_not_name_it():
    port = new_port()
    with socket.socket() as thief, pytest.raises(OSError, match="in use") as refused:
        thief.bind(("127.0.0.1", port))
    assert refused.value.errno == errno.EADDRINUSE
    for _ in range(2):  # one sender and its successor
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(server.getsockname()) as end:
            connection, place = server.accept()
            connection.close()
            assert place == end.getsockname()
