from pathlib import Path

import pytest

from rl_omni.testing import write_tiny_policy

HEADS = {
    "bins": {"kind": "bins", "chunk_size": 1, "action_size": 2, "num_bins": 8},
    "flow": {"kind": "flow", "chunk_size": 1, "action_size": 2, "num_steps": 3, "noise": 0.5},
}
REACH = f"{Path(__file__).parents[4] / 'examples/actions/reach.py'}:Reach"


@pytest.fixture(scope="session", params=HEADS)
def policy(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "policy"
    return str(write_tiny_policy(folder, HEADS[request.param], ("reach", "the", "target"), patch_size=8))
