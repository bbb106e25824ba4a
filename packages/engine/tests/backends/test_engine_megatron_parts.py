"""What of megatron-core's local layers the megatron backend does without, and what a CPU does without.

The first two fail once megatron-core can: then its part takes the place of ours.
"""

import pytest
import torch
import torch.distributed as dist

from rl_engine import ConfigError, EngineConfig, create_engine
from rl_engine.backends.megatron.layout import megatron_calls  # first: without megatron-core's warnings
from rl_engine.testing import write_tiny_model

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm

pytestmark = [pytest.mark.process, pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")]


@pytest.fixture(autouse=True)
def megatron_on_a_cpu():
    """Nothing stands for CUDA here."""


@pytest.fixture(scope="module", autouse=True)
def groups(tmp_path_factory):
    """A group of one rank, and megatron-core's over it."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with megatron_calls():
        parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


@pytest.fixture(autouse=True)
def no_group_left():
    """The groups stay for the whole module."""
    return


def settings(**changes):
    modules = "cuda_graph_modules" in TransformerConfig.__dataclass_fields__  # from 0.19 on
    graphs = {"cuda_graph_modules" if modules else "cuda_graph_scope": []}
    options = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, **graphs}
    return TransformerConfig(**(options | changes))


def test_its_attention_takes_no_packed_rows():
    attention = DotProductAttention(settings(), 1, AttnMaskType.causal, "self")
    x = torch.ones(4, 1, 2, 4)
    with pytest.raises(AssertionError, match="Packed sequence is not supported"):
        attention(x, x, x, None, packed_seq_params=object())


def test_its_norm_takes_no_sequence_parallelism():
    config = settings(normalization="RMSNorm", sequence_parallel=True, tensor_model_parallel_size=2)
    with pytest.raises(AssertionError, match="sequence parallel"):
        WrappedTorchNorm(config, 8)


@pytest.mark.promise("and is refused without a GPU")
def test_without_a_gpu_it_is_refused(tmp_path):
    write_tiny_model(tmp_path)
    engine = create_engine("megatron", EngineConfig(model_path=str(tmp_path)))
    engine.check(1)  # which any machine may ask
    with pytest.raises(ConfigError, match="needs a CUDA device, as megatron-core allocates on one .* Use the fsdp"):
        engine.initialize()
