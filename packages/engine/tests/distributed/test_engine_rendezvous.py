"""Engines one after the other, in the same processes."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)  # two processes on a machine that may be busy
SCRIPT = Path(__file__).parents[1] / "support" / "again_ranks.py"


def test_ranks_that_part_meet_again_and_never_at_the_last_meeting(tmp_path, start_ranks):
    seen = start_ranks(SCRIPT, tmp_path, 2)["seen"]
    assert seen == [[(0, number), (1, number)] for number in range(4)]
