"""What of megatron-core's own does not run without a CUDA device, so that the megatron backend has its own.

Each test fails once megatron-core can: then its part takes the place of ours.
"""

import pytest
import torch
import torch.distributed as dist

from rl_engine.backends.megatron.layout import megatron_calls  # first: without megatron-core's warnings

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


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
    options = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "cuda_graph_scope": []}
    return TransformerConfig(**(options | changes))


class Line(MegatronModule):
    """The smallest model that megatron-core wraps."""

    def __init__(self, dtype):
        super().__init__(settings(params_dtype=dtype))
        self.model_type = ModelType.encoder_or_decoder
        self.linear = torch.nn.Linear(8, 8, dtype=dtype)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_its_distributed_optimizer_takes_cuda_tensors_alone(dtype):
    with megatron_calls():
        wrapped = DistributedDataParallel(
            settings(), DistributedDataParallelConfig(use_distributed_optimizer=True), Line(dtype)
        )
        wrapped(torch.ones(2, 8, dtype=dtype)).sum().backward()  # this part runs
        config = OptimizerConfig(
            lr=1e-3, use_distributed_optimizer=True, bf16=dtype == torch.bfloat16, params_dtype=dtype
        )
        with pytest.raises((TypeError, AssertionError, RuntimeError), match=r"torch\.cuda\.FloatTensor|CUDA|cuda"):
            get_megatron_optimizer(config, [wrapped])


def test_its_schedules_count_tokens_on_a_cuda_device():
    model = Line(torch.float32)

    def step(_, line):
        return line(torch.ones(2, 8)), lambda out: (out.sum(), {})

    model.set_input_tensor = lambda _: None
    sizes = {"num_microbatches": 1, "seq_length": 2, "micro_batch_size": 1}
    with megatron_calls(), pytest.raises((AssertionError, RuntimeError), match=r"CUDA|cuda"):
        get_forward_backward_func()(forward_step_func=step, data_iterator=None, model=model, **sizes)


def test_its_attention_takes_no_packed_rows():
    attention = DotProductAttention(settings(), 1, AttnMaskType.causal, "self")
    x = torch.ones(4, 1, 2, 4)
    with pytest.raises(AssertionError, match="Packed sequence is not supported"):
        attention(x, x, x, None, packed_seq_params=object())


def test_its_norm_takes_no_sequence_parallelism():
    config = settings(normalization="RMSNorm", sequence_parallel=True, tensor_model_parallel_size=2)
    with pytest.raises(AssertionError, match="sequence parallel"):
        WrappedTorchNorm(config, 8)
