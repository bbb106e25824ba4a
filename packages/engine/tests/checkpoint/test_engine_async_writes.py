"""A thread writes checkpoints while training goes on: what it writes, and when it says what went wrong."""

import inspect
import threading

import pytest
import torch
import torch.distributed.checkpoint

from rl_engine import CheckpointError
from rl_engine.checkpoint import sharded
from rl_engine.checkpoint.sharded import CheckpointWriter
from rl_engine.distributed.world import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"), owns_group=False)


@pytest.fixture
def slow_save(monkeypatch):
    """A write that begins when the event is set."""
    go, save = threading.Event(), sharded.save

    def wait_and_save(*given):
        assert go.wait(30)
        save(*given)

    monkeypatch.setattr(sharded, "save", wait_and_save)
    yield go
    go.set()


def test_what_is_written_is_what_was_there_when_save_was_called(tmp_path, slow_save):
    writer, weight = CheckpointWriter(ALONE, is_async=True, timeout_s=30), torch.ones(3)
    writer.save(tmp_path / "checkpoint", {"model.a": weight}, 1, 1)
    drawn = torch.rand(2)
    weight.zero_()
    assert not (tmp_path / "checkpoint").exists()
    slow_save.set()
    writer.wait()
    manifest = sharded.restore(tmp_path / "checkpoint", {"model.a": weight}, ALONE, seed=0)
    assert (manifest.step, weight.tolist()) == (1, [1, 1, 1])
    assert torch.equal(torch.rand(2), drawn)


def test_a_write_that_does_not_end_is_named_and_may_still_end(tmp_path, slow_save):
    writer = CheckpointWriter(ALONE, is_async=True, timeout_s=0.05)
    writer.save(tmp_path / "checkpoint", {"model.a": torch.ones(3)}, 1, 1)
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match="checkpoint is still being written after 0 s. Look at the file system"
        ):
            writer.wait()
    slow_save.set()
    writer._timeout_s = 30
    writer.wait()
    assert (tmp_path / "checkpoint" / "manifest.json").is_file()


def test_a_failure_is_raised_once_and_the_next_save_succeeds(tmp_path):
    (tmp_path / "file").write_text("")
    writer, tensors = CheckpointWriter(ALONE, is_async=True, timeout_s=30), {"model.a": torch.ones(3)}
    writer.save(tmp_path / "file" / "checkpoint", tensors, 1, 1)
    with pytest.raises(
        CheckpointError, match="file/checkpoint was not written .*; the one before it, if any, is as it was"
    ):
        writer.wait()
    writer.wait()
    writer.save(tmp_path / "checkpoint", tensors, 2, 2)
    writer.wait()
    assert sharded.read_step(tmp_path / "checkpoint").step == 2


def test_the_async_save_of_torch_still_pickles_between_ranks():
    """Why the thread is ours (docs/checkpoints.md); decide again once this fails."""
    exchange = inspect.getsource(torch.distributed.checkpoint.utils._DistWrapper)
    assert all(name in exchange for name in ("gather_object", "scatter_object_list", "broadcast_object_list"))
    assert "pickle.dump(metadata" in inspect.getsource(torch.distributed.checkpoint.filesystem)
