"""What the adapters share: host memory that can go back, and reading a model back through its own loader."""

import torch
from torch import nn

import rl_ckpt
from rl_ckpt.adapters._bindings import Held, LoadRecorder
from rl_ckpt.adapters._staging import Staging
from rl_ckpt.testing import assert_same


class Fused(nn.Module):
    """As an inference engine has it: q and k in one parameter, an embedding that is the head as well."""

    def __init__(self, rank=0, world_size=1):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(8 // world_size, 6), requires_grad=False)
        self.embed = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16), requires_grad=False)
        self._rank, self._rows = rank, 4 // world_size

    @torch.no_grad()
    def load_weights(self, weights):
        for name, tensor in weights:
            if name in ("q", "k"):
                part = tensor.narrow(0, self._rank * self._rows, self._rows)
                self.qk.data.narrow(0, self._rows * (name == "k"), self._rows).copy_(part)
            elif name == "embed.weight":
                self.embed.weight.data.copy_(tensor)
            elif name == "norm":
                self.norm.data.copy_(tensor)


def weights_of(seed):
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(10, 6, generator=generator)
    return {
        "q": torch.randn(4, 6, generator=generator),
        "k": torch.randn(4, 6, generator=generator),
        "embed.weight": embed,
        "head.weight": embed.clone(),
        "norm": torch.randn(6, generator=generator).bfloat16(),
    }


def loaded(model, weights, **options):
    recorder = LoadRecorder(model, weights)
    with recorder:
        model.load_weights(weights.items())
    return Held(model, weights, recorder.bindings, **options)


def test_fused_and_tied_tensors_are_read_back_under_their_own_names():
    model, weights = Fused(), weights_of(0)
    held = loaded(model, weights)
    assert_same(dict(held), weights)
    assert rl_ckpt.tree_digest(held) == rl_ckpt.tree_digest(weights)
    model.qk.data[5, 2] += 1  # row 1 of k
    assert {name for name in held if not torch.equal(held[name], weights[name])} == {"k"}
    model.embed.weight.data[0, 0] += 1
    assert {name for name in held if not torch.equal(held[name], weights[name])} == {"k", "embed.weight", "head.weight"}


def test_a_rank_vouches_for_its_part_and_no_other():
    model, weights = Fused(rank=1, world_size=2), weights_of(0)
    held = loaded(model, weights)
    assert_same(dict(held), weights)
    assert torch.equal(model.qk.data, torch.cat([weights["q"][2:], weights["k"][2:]]))
    model.qk.data[0, 0] += 1
    wrong = held["q"] != weights["q"]
    assert wrong.nonzero().tolist() == [[2, 0]]


def test_what_the_loader_leaves_out_or_rounds_is_seen():
    model, weights = Fused(), weights_of(0)
    held = loaded(model, {**weights, "unknown": torch.ones(3)})
    assert "unknown" not in held
    rounded = {**weights, "norm": torch.randn(6)}  # float32 into bfloat16
    assert rl_ckpt.tree_digest(loaded(model, rounded)) != rl_ckpt.tree_digest(rounded)
    model.load_weights = lambda items: (
        Fused.load_weights(model, items),
        model.register_parameter("norm", nn.Parameter(model.norm.float())),
    )
    assert "norm" not in loaded(model, weights)  # it keeps something else in its place


def test_a_head_that_is_not_the_one_it_is_tied_to_is_seen():
    model, weights = Fused(), weights_of(0)
    weights["head.weight"] += 1
    held = loaded(model, weights)
    assert {name for name in held if not torch.equal(held[name], weights[name])} == {"head.weight"}


def test_every_copy_that_a_tied_layer_keeps_is_looked_at():
    """As on CPUs, where a layer computes with a packed copy: the stale one of a tied layer is found."""
    model, weights = Fused(), weights_of(0)
    packed = {"head.weight": torch.zeros(10, 6), "embed.weight": weights["embed.weight"].clone()}

    def copies(model, path, whole):
        return [packed[path]] if path in packed else [model.get_parameter(path)]

    held = loaded(model, weights, copies=copies)
    assert not torch.equal(held["embed.weight"], weights["embed.weight"])
    packed["head.weight"].copy_(weights["embed.weight"])
    assert torch.equal(held["embed.weight"], weights["embed.weight"])


def test_staging_keeps_the_version_before_until_the_next_is_committed():
    staging, first, second = Staging(), weights_of(1), weights_of(2)
    for name, tensor in first.items():
        staging.put(name, tensor)
    staging.commit()
    memory = {name: tensor.data_ptr() for name, tensor in staging.current.items()}
    staging.put("q", second["q"])
    assert_same(staging.current, first)
    assert_same(staging.merged(), {**first, "q": second["q"]})
    staging.abort()
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


def test_staging_takes_a_tensor_that_has_changed_its_shape():
    staging = Staging()
    for shape in ((2, 3), (4,), (2, 3)):
        staging.put("t", torch.ones(shape))
        staging.commit()
        assert staging.current["t"].shape == shape
