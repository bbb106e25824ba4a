"""What is moved away is gone from where it was: bytes of live tensors, and on a GPU what the allocator holds."""

import gc

import pytest
import torch

from rl_engine import EngineConfig, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch, write_tiny_model

DATA = ragged_batch([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]])


def built(folder, **changes):
    write_tiny_model(folder, hidden_size=128, intermediate_size=512)
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), **changes))
    engine.initialize()
    return engine


def live_bytes(device):
    """Of the storages of all tensors alive on a device."""
    gc.collect()
    plain = (torch.Tensor, torch.nn.Parameter)  # a subclass may have no memory of its own
    tensors = [thing for thing in gc.get_objects() if type(thing) in plain]
    alive = [tensor for tensor in tensors if tensor.device.type == device and tensor.layout == torch.strided]
    return sum({part.data_ptr(): part.nbytes() for part in (tensor.untyped_storage() for tensor in alive)}.values())


def sizes_of(engine):
    """Bytes of the parameters, and of their two moments."""
    parameters = sum(tensor.numel() * 4 for tensor in engine._scorer.parameters())
    moments = sum(value.nbytes for state in engine._optimizer.state.values() for value in state.values())
    return parameters, moments


def test_optimizer_state_that_is_moved_leaves_nothing_behind(tmp_path):
    engine = built(tmp_path)
    engine.forward_backward_batch(DATA, sft_loss)
    engine.optimizer_step()
    before, (parameters, moments) = live_bytes("cpu"), sizes_of(engine)
    assert moments > 2 * parameters - 1
    engine.to("meta", model=False, optimizer=True, grad=False)  # a place that takes no memory
    assert before - live_bytes("cpu") == moments
    before = live_bytes("cpu")
    engine.optimizer_zero_grad()
    assert before - live_bytes("cpu") == parameters
    engine.close()


def test_a_frozen_model_that_is_moved_leaves_nothing_behind(tmp_path):
    engine = built(tmp_path, optimizer=None)
    engine.forward_backward_batch(DATA, None)
    before = live_bytes("cpu")
    parameters = sum(tensor.numel() * 4 for tensor in engine._scorer.parameters())
    engine.to("meta")
    assert before - live_bytes("cpu") >= parameters
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offload_empties_the_gpu_and_modes_bring_everything_back(tmp_path):
    engine = built(tmp_path)
    engine.forward_backward_batch(DATA, sft_loss)
    engine.optimizer_step()
    torch.cuda.synchronize()
    before, (parameters, moments) = torch.cuda.memory_allocated(), sizes_of(engine)
    engine.to("cpu", model=False, optimizer=True, grad=False)
    assert before - torch.cuda.memory_allocated() >= moments
    engine.to("cpu")
    assert before - torch.cuda.memory_allocated() >= moments + 2 * parameters  # and the gradients
    with engine.train_mode():
        assert all(parameter.is_cuda for parameter in engine._scorer.parameters())
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(DATA, sft_loss)
        engine.optimizer_step()
    assert not any(parameter.is_cuda for parameter in engine._scorer.parameters())
    engine.close()
