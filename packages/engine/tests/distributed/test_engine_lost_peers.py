"""A rank whose peer calls something else, or is gone, says so whatever it is doing."""

from pathlib import Path

import pytest

from rl_engine.testing import write_tiny_model

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[1] / "support" / "peer_ranks.py"


@pytest.mark.promise("A peer that is gone or does something else is named")
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_peer_that_does_something_else_or_is_gone_is_named(start_ranks, tmp_path, backend):
    write_tiny_model(tmp_path / "model")
    seen = start_ranks(SCRIPT, tmp_path, 2, backend)
    assert "for a loss and its gradient (rank 0) and a loss without its gradient (rank 1)" in seen["gradient"]
    assert "for a loss without its gradient (rank 0) and scores alone (rank 1)" in seen["loss"]
    assert "Ranks save different checkpoints" in seen["path"]
    for call in ("pass", "step", "export", "model"):
        assert "Rank 0 of 2 got no answer from another rank" in seen[call], call
