"""A stand-in for CUDA, so that megatron-core's own code runs on a CPU, and a backend `megatron_on_cpu` that has it.

megatron-core allocates on a CUDA device, waits for its streams and asks for the names of CUDA's tensor types. Tests
alone use this; on a machine with a GPU it does nothing. With this folder on PYTHONPATH a run of several processes takes
`engine.backend=megatron_on_cpu`.
"""

from contextlib import ExitStack, contextmanager
from functools import wraps

import torch
from torch.utils._device import _device_constructors

MADE = ("empty", "full", "ones", "tensor", "zeros")  # functions of torch that are given device="cuda"
TYPES = {  # float64 is for oracles alone; megatron-core would refuse it
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


class NoStream:
    """Stands for a CUDA stream and its events: on a CPU everything has happened when a call returns."""

    def __init__(self, device=None): ...

    def wait_stream(self, stream): ...

    def record_event(self):
        return self

    def synchronize(self): ...

    def __enter__(self): ...

    def __exit__(self, *details): ...


def answers():
    """Owner, name and stand-in of everything that is answered."""
    import rl_engine.backends.megatron  # noqa: F401 - first: without megatron-core's warnings

    # isort: split
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    _device_constructors()  # torch looks once which functions `with torch.device(...)` goes for
    stream, type_of = NoStream(), torch.Tensor.type

    def split_sizes(tensor, as_numpy=False, record_stream=False):
        """megatron-core makes the plain numbers that all-to-all wants from CUDA tensors only."""
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    @wraps(type_of)
    def name_of_type(tensor, *given, **named):
        return type_of(tensor, *given, **named) if given or named else TYPES.get(tensor.dtype, type_of(tensor))

    def on_the_cpu(make):
        def made(*given, device=None, **named):
            return make(*given, device="cpu" if device == "cuda" else device, **named)

        return made

    copy_grads, to_float = DistributedOptimizer._copy_model_grads_to_main_grads, torch.Tensor.float

    def copy_wide_grads(optimizer):
        """megatron-core makes float32 gradients of any; those of an oracle stay as they are."""
        torch.Tensor.float = lambda tensor: tensor if tensor.dtype == torch.float64 else to_float(tensor)
        try:
            copy_grads(optimizer)
        finally:
            torch.Tensor.float = to_float

    yield DistributedOptimizer, "_copy_model_grads_to_main_grads", copy_wide_grads
    yield torch.cuda, "current_device", lambda: torch.device("cpu")
    yield torch.cuda, "current_stream", lambda: stream
    yield torch.cuda, "default_stream", lambda: stream
    yield torch.cuda, "stream", lambda _: stream
    yield torch.cuda, "Stream", NoStream
    yield torch.cuda, "synchronize", lambda: None
    yield torch.Tensor, "type", name_of_type
    yield random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()
    yield random, "_set_cuda_rng_state", lambda *_, **__: None  # that of the CPU is set before it
    yield token_dispatcher, "maybe_move_tensor_to_cpu", split_sizes
    for name in MADE:
        yield torch, name, on_the_cpu(getattr(torch, name))


@contextmanager
def cuda_stand_in():
    """Calls inside are answered."""
    if torch.cuda.is_available():
        yield
        return
    before = []
    try:
        for owner, name, answer in [*answers()]:
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, answer)
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


_kept = ExitStack()
"""What `create` entered: a context that nobody holds is left at once."""


def create(config):
    """The registry's entry: the megatron backend, in a process that keeps the stand-in."""
    from rl_engine.backends import megatron

    if not hasattr(torch.Tensor.type, "__wrapped__"):
        _kept.enter_context(cuda_stand_in())
    return megatron.create(config)
