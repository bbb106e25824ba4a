"""Engines one after the other, in the same processes."""

import re
import socket
from pathlib import Path

import pytest

from rl_engine.distributed.world import join_world
from rl_engine.errors import EngineError

pytestmark = pytest.mark.timeout(600)  # two processes on a machine that may be busy
SCRIPT = Path(__file__).parents[1] / "support" / "again_ranks.py"


@pytest.mark.process
def test_separated_ranks_meet_again_but_not_at_the_last_one(tmp_path, start_ranks):
    seen = start_ranks(SCRIPT, tmp_path, 2)["seen"]
    assert seen == [[(0, number), (1, number)] for number in range(4)]


def test_an_address_that_is_taken_is_a_sentence(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        for name, value in (where | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(EngineError, match=re.escape(f"cannot meet at 127.0.0.1:{where['MASTER_PORT']}: ")):
            join_world(timeout_s=5, needs_group=True)
