"""Memory that a version lands in before it is in force: reused, and exchanged with what is served."""

import itertools

import pytest
import torch
from torch import Tensor

from rl_ckpt.errors import TensorError
from rl_ckpt.receiver.staging import Staging
from rl_ckpt.testing import assert_same


def weights_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"q": torch.randn(4, 6, generator=generator), "norm": torch.randn(6, generator=generator).bfloat16()}


def test_staging_keeps_the_old_version_until_the_commit():
    staging, first, second = Staging(), weights_of(1), weights_of(2)
    for name, tensor in first.items():
        staging.put(name, tensor)
    staging.commit()
    memory = {name: tensor.data_ptr() for name, tensor in staging.current.items()}
    staging.put("q", second["q"])
    assert_same(staging.current, first)
    assert_same(staging.merged(), {**first, "q": second["q"]})
    staging.clear()
    assert_same(staging.merged(), first)
    for weights in (second, first, second):
        for name, tensor in weights.items():
            staging.put(name, tensor)
        staging.commit()
    assert_same(staging.current, second)
    after = {name: tensor.data_ptr() for name, tensor in staging.current.items()}
    assert set(memory.values()) != set(after.values())  # three syncs later the two sets have changed places
    for name, tensor in first.items():
        staging.put(name, tensor)
    staging.commit()
    assert {name: tensor.data_ptr() for name, tensor in staging.current.items()} == memory


def test_staging_forgets_names_missing_from_a_whole_version():
    staging = Staging()
    staging.put("old", torch.ones(2))
    staging.commit(is_whole=True)
    staging.put("new", torch.zeros(2))
    staging.commit(is_whole=True)
    assert_same(staging.current, {"new": torch.zeros(2)})


def test_staging_takes_a_tensor_that_has_changed_its_shape():
    staging = Staging()
    for shape in ((2, 3), (4,), (2, 3)):
        staging.put("t", torch.ones(shape))
        staging.commit()
        assert staging.current["t"].shape == shape


def test_installed_weights_swap_with_the_targets_and_back():
    staging, old, new = Staging(), weights_of(1), weights_of(2)
    targets = {name: tensor.clone() for name, tensor in old.items()}
    targets["q"] = old["q"].t().contiguous().t()  # not contiguous
    for name, tensor in staging.open(targets).items():
        tensor.copy_(new[name])
    staging.install(targets)
    assert_same(targets, new)
    staging.undo()
    assert_same(targets, old)
    assert_same(staging.incoming, new)
    staging.install(targets)
    staging.clear()
    staging.undo()
    assert_same(targets, new)


def test_an_installation_that_fails_half_way_is_undone():
    staging, old, new = Staging(), weights_of(1), weights_of(2)
    targets = {name: tensor.clone() for name, tensor in old.items()}
    for name, tensor in staging.open(targets).items():
        tensor.copy_(new[name])
    with pytest.raises(KeyError):
        staging.install([*targets, "another"])
    staging.undo()
    assert_same(targets, old)


def test_a_tensor_that_was_interrupted_half_way_is_told(monkeypatch):
    """As by Ctrl-C between two leaves: changing places again would not bring back what was."""
    staging, targets = Staging(), {"t": torch.zeros(3 << 20)}
    staging.open(targets)["t"].fill_(1)
    monkeypatch.setattr(Tensor, "copy_", interrupting(Tensor.copy_, after=4))
    with pytest.raises(KeyboardInterrupt):
        staging.install(targets)
    with pytest.raises(TensorError, match="'t' was interrupted while it was installed"):
        staging.undo()


def interrupting(copy, after):
    calls = itertools.count(1)

    def interrupted(self, *arguments):
        if next(calls) > after:
            raise KeyboardInterrupt
        return copy(self, *arguments)

    return interrupted


def test_room_is_kept_for_the_next_version_and_not_old_names():
    staging, targets = Staging(), weights_of(1)
    rooms = [{name: tensor.data_ptr() for name, tensor in staging.open(targets).items()} for _ in range(2)]
    assert rooms[0] == rooms[1]
    staging.open({"q": targets["q"]})
    assert not staging._spare
