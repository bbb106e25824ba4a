"""Processes that are killed (kill -9) while they save leave the checkpoint before it usable, on any backend."""

from pathlib import Path

import pytest
import torch

from rl_engine import EngineConfig, OptimizerConfig, create_engine
from rl_engine.testing import write_tiny_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.process]  # processes on a machine that may be busy
SCRIPT = Path(__file__).parents[1] / "support" / "kill_ranks.py"
KILLED = -9


def traces(folder):
    """What the killed save left."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    return {
        "shards": any(name.startswith(".checkpoint.draft/shard-00001") for name in names),
        "manifest": ".checkpoint.draft/manifest.json" in names,
        "renames": ".checkpoint.previous/manifest.json" in names and "checkpoint" not in names,
    }


def continues(folder, backend):
    """On one rank: the first checkpoint is loaded, and another one can be written in its place."""
    config = EngineConfig(model_path=str(folder / "model"), optimizer=OptimizerConfig(lr=1e-2))
    engine = create_engine(backend, config)
    engine.initialize()
    assert engine.load_checkpoint(folder / "checkpoint") == 1
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    torch.testing.assert_close(weights, torch.load(folder / "kept.pt"), rtol=0, atol=0)
    engine.save_checkpoint(folder / "checkpoint", 3)
    assert engine.load_checkpoint(folder / "checkpoint") == 3
    engine.close()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def check(rank_server, folder, backend, writer, point):
    write_tiny_model(folder / "model")
    codes, errors = rank_server(SCRIPT, folder, 2, backend, writer, point)
    assert codes == [KILLED, KILLED], errors
    found = traces(folder)
    assert found[point]
    assert not (point == "shards" and found["manifest"])
    continues(folder, backend)


@pytest.mark.promise("A checkpoint is complete or absent, also where ranks are killed")
@pytest.mark.parametrize(("writer", "point"), [("at once", "shards"), ("background", "manifest")])
def test_a_save_that_is_killed_leaves_the_one_before(rank_server, tmp_path, writer, point):
    check(rank_server, tmp_path, "fsdp", writer, point)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["shards", "manifest", "renames"])
@pytest.mark.parametrize("writer", ["at once", "background"])
@pytest.mark.parametrize("backend", ["fsdp", "megatron", "torchtitan"])
def test_a_save_that_is_killed_anywhere_leaves_the_one_before(rank_server, tmp_path, backend, writer, point):
    check(rank_server, tmp_path, backend, writer, point)


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["at once", "background"])
def test_a_rank_that_is_killed_alone_is_an_error_on_the_others(rank_server, tmp_path, writer):
    write_tiny_model(tmp_path / "model")
    codes, errors = rank_server(SCRIPT, tmp_path, 2, "fsdp", writer, "one rank")
    assert codes == [1, KILLED]
    assert "rl_engine.errors.CheckpointError: Checkpoint" in errors[0]
    continues(tmp_path, "fsdp")
