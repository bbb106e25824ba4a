"""One training process, in this one: what it does with a model that a command without an outcome has left."""

import pytest
import torch.distributed as dist

from rl_tinker.ranks.rank import Rank
from rl_tinker.types import AdapterSpec, Command, ServeConfig, Verb


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
