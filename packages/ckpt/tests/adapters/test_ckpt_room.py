"""Adapters that syncs name, bring and remove, in an engine that was started with room for them."""

import pytest
import torch

from rl_ckpt.adapters.engine_lora import Adapters, Copy
from rl_ckpt.errors import AttestationError, TensorError

pytestmark = pytest.mark.core


class Engine(Adapters):
    """Engine with two rooms, of which `held` has what was installed last."""

    def __init__(self):
        super().__init__({"room-1": {}, "room-2": {}}, is_room=True)
        self.held = {}
        self.spoils = False

    def install(self, adapter, tensors):
        self.held[adapter] = {key: tensor.clone() for key, tensor in tensors.items()}
        made = {key: [Copy(self.held[adapter][key], tensor)] for key, tensor in tensors.items()}
        if self.spoils:
            next(iter(self.held[adapter].values())).add_(1)
        return made


def adapter(name, value, rank=2):
    factors = {"x.lora_A.weight": torch.full((rank, 4), value), "x.lora_B.weight": torch.full((3, rank), value)}
    return {f"adapters.{name}.{key}": tensor for key, tensor in (factors | {"scaling": torch.tensor(0.5)}).items()}


def removed(name):
    return {f"adapters.{name}.removed": torch.zeros(1)}


def values(engine):
    return {name: engine.held[slot]["x.lora_A.weight"][0, 0].item() for name, slot in engine.slots.items()}


def test_adapters_of_any_rank_take_rooms_and_leave_them():
    engine = Engine()
    engine.load(adapter("a", 1.0)).require_all()
    engine.load(adapter("b", 2.0, rank=3)).require_all()
    assert engine.slots == {"a": "room-1", "b": "room-2"}
    engine.load(adapter("c", 3.0) | removed("a")).require_all()
    assert engine.slots == {"b": "room-2", "c": "room-1"}
    engine.load(adapter("b", 4.0)).require_all()
    assert values(engine) == {"b": 4.0, "c": 3.0}


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        (adapter("c", 3.0), "there is room for 2; remove one of a, b"),
        (removed("d"), "no adapter 'd' to remove"),
        ({"adapters.a.scaling": torch.ones(())}, "adapter 'a' came without 'factors'"),
        ({"adapters.a.x.lora_A.weight": torch.ones(2, 4)}, "adapter 'a' came without 'scaling'"),
        (dict(list(adapter("a", 1.0).items())[1:]), "came without 'x.lora_A.weight'"),
    ],
)
def test_what_does_not_fit_is_a_sentence(weights, told):
    engine = Engine()
    engine.load(adapter("a", 1.0) | adapter("b", 2.0))
    with pytest.raises(TensorError, match=told):
        engine.load(weights)


def test_a_failed_load_is_undone():
    engine = Engine()
    engine.load(adapter("a", 1.0) | adapter("b", 2.0))
    engine.spoils = True
    with pytest.raises(AttestationError, match="as it was sent"):
        engine.load(adapter("c", 3.0) | removed("a")).require_all()
    engine.spoils = False
    engine.restore()
    assert values(engine) == {"a": 1.0, "b": 2.0}
