"""One training process, in this one: what it does with a model that a command without an outcome has left."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rl_tinker.errors import RequestError
from rl_tinker.ranks.modules import lora_modules
from rl_tinker.ranks.rank import Rank
from rl_tinker.types import AdamParams, AdapterSpec, Command, ServeConfig, Verb
from rl_tinker.wire.protobuf import FLOAT32, INT64, message

pytestmark = pytest.mark.process


@pytest.fixture
def rank(tiny_model, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Rank(ServeConfig(model_path=str(tiny_model), dtype="float32"), str(tiny_model))
    dist.destroy_process_group()


@pytest.mark.process
def test_a_model_that_is_still_in_memory_is_replaced(rank, tmp_path):
    shape = {"model": "s:train:0", "adapter": AdapterSpec(rank=2, train_unembed=False), "folder": str(tmp_path / "one")}
    for verb in (Verb.CREATE, Verb.RESTORE, Verb.RESTORE):
        assert not rank.run(Command(verb=verb, **shape)).error, verb


def test_experts_are_in_no_group_of_modules(tmp_path):
    names = ("self_attn.q_proj.weight", "mlp.gate.weight", "mlp.experts.0.up_proj.weight")
    save_file({f"model.layers.0.{name}": torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    modules = lora_modules(tmp_path)
    assert modules.of(AdapterSpec(rank=2, train_unembed=False)) == ("q_proj",)
    with pytest.raises(RequestError, match="set train_attn"):
        modules.of(AdapterSpec(rank=2, train_attn=False, train_unembed=False))


def body(tokens):
    """A `forward_backward` request of one row, cross entropy."""
    request = message("ForwardBackwardRequest")(model_id="m", loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
    size = len(tokens) - 1
    for name, values, dtype in (
        ("target_tokens", np.array(tokens[1:]), INT64),
        ("weights", np.ones(size, "f4"), FLOAT32),
    ):
        datum.loss_fn_inputs[name].dense, datum.loss_fn_inputs[name].dtype = values.tobytes(), dtype
        datum.loss_fn_inputs[name].shape.append(size)
    return request.SerializeToString()


@pytest.mark.process
def test_all_weights_are_trained_saved_restored_and_exported(tiny_model, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        rank = Rank(ServeConfig(model_path=str(tiny_model), dtype="float32", training="full"), str(tiny_model))
        work = Command(verb=Verb.FORWARD, requests=[("m", body([5, 6, 7, 8]))], backward=True)
        adam = AdamParams(learning_rate=0.05)

        def ran(verb, folder, **options):
            answer = rank.run(Command(verb=verb, model="m", folder=str(tmp_path / folder), **options))
            assert not answer.error
            return answer

        def stepped(folder):
            loss = rank.run(work).results[0]
            return loss, ran(Verb.OPTIM_STEP, folder, adam=adam).metrics

        ran(Verb.CREATE, "start")
        first, second = stepped("one"), stepped("two")
        assert first != second
        ran(Verb.EXPORT, "weights")
        exported = load_file(tmp_path / "weights" / "model.safetensors")
        base = load_file(tiny_model / "model.safetensors")
        assert exported.keys() == base.keys()
        assert all(not exported[name].equal(base[name]) for name in base if base[name].ndim > 1)
        ran(Verb.RESTORE, "one")
        assert stepped("again") == second
        ran(Verb.RESTORE, "one", optimizer=False)
        assert stepped("anew")[1]["step"] == 1.0
        ran(Verb.CREATE, "new")
        assert stepped("first") == first
    finally:
        dist.destroy_process_group()
