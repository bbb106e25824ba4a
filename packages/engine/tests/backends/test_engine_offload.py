"""What is moved away is gone from where it was: bytes of live tensors, and on a GPU what the allocator holds."""

import gc
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from rl_engine import ConfigError, EngineConfig, create_engine
from rl_engine.losses import sft_loss
from rl_engine.model import activations, module_engine
from rl_engine.model.device_memory import DeviceMemory
from rl_engine.testing import ragged_batch, write_tiny_model

DATA = ragged_batch([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]])


def built(folder, backend="fsdp", **changes):
    write_tiny_model(folder, hidden_size=128, intermediate_size=512)
    engine = create_engine(backend, EngineConfig(model_path=str(folder), **changes))
    engine.initialize()
    return engine


def live_bytes(device):
    """Of the storages of all tensors alive on a device."""
    gc.collect()
    plain = (torch.Tensor, torch.nn.Parameter)  # a subclass may have no memory of its own
    tensors = [thing for thing in gc.get_objects() if type(thing) in plain]
    alive = [tensor for tensor in tensors if tensor.device.type == device and tensor.layout == torch.strided]
    return sum({part.data_ptr(): part.nbytes() for part in (tensor.untyped_storage() for tensor in alive)}.values())


def freed_by(act):
    """Bytes on the CPU that are let go."""
    before = live_bytes("cpu")
    act()
    return before - live_bytes("cpu")


def model_of(engine):
    return engine.parts.built.scorer.model


def sizes_of(engine):
    """Bytes of the parameters, and of their two moments."""
    parameters = sum(tensor.numel() * 4 for tensor in model_of(engine).parameters())
    moments = sum(value.nbytes for state in engine.parts.built.optimizer.state.values() for value in state.values())
    return parameters, moments


BACKENDS = ("fsdp", "megatron", "torchtitan")
OF_A_CPU = ("fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS[1:]))
OF_A_GPU = [
    pytest.param(name, marks=pytest.mark.skipif(name != "fsdp" and find_spec(name) is None, reason="not installed"))
    for name in BACKENDS
]


@pytest.mark.parametrize("backend", OF_A_CPU)
def test_modes_take_gradients_home_and_back(tmp_path, backend):
    engine, away = built(tmp_path, backend), torch.device("cpu", 0)  # to an engine not the place where it computes
    places = engine.parts.placement.devices
    engine.forward_backward_batch(DATA, sft_loss)
    engine.to(away)
    with engine.eval_mode():
        assert places["model"] != away
        engine.forward_backward_batch(DATA, sft_loss, forward_only=True)
    with engine.train_mode():
        assert away not in places.values()
        engine.forward_backward_batch(DATA, sft_loss)
    assert set(places.values()) == {away}
    with pytest.raises(ConfigError, match="Gradients are on the device") if backend != "megatron" else nullcontext():
        engine.to("cpu", grad=False)
    engine.close()


@pytest.mark.process
@pytest.mark.parametrize("backend", OF_A_CPU)
def test_optimizer_state_that_is_moved_leaves_nothing_behind(tmp_path, backend):
    engine = built(tmp_path, backend)
    engine.forward_backward_batch(DATA, sft_loss)
    engine.optimizer_step()
    parameters, moments = sizes_of(engine)
    assert moments > 2 * parameters - 1
    assert freed_by(lambda: engine.to("meta", model=False, optimizer=True, grad=False)) == moments
    if backend == "megatron":  # its gradients have a buffer of their own, in which parameters start at multiples of 64
        padded = sum(buffer.grad_data.nbytes for buffer in engine.parts.built.optimizer._buffers())
        assert parameters <= padded < 1.1 * parameters
        assert freed_by(lambda: engine.to("meta", model=False, optimizer=False, grad=True)) == padded
    else:
        assert freed_by(engine.optimizer_zero_grad) == parameters
    engine.close()


@pytest.mark.process
@pytest.mark.parametrize("backend", OF_A_CPU[:2])  # FSDP keeps its shards where it is sent nowhere (to meta)
def test_a_frozen_model_that_is_moved_leaves_nothing_behind(tmp_path, backend):
    engine = built(tmp_path, backend, optimizer=None)
    engine.forward_backward_batch(DATA, None)
    parameters = sum(tensor.numel() * 4 for tensor in model_of(engine).parameters())
    assert freed_by(lambda: engine.to("meta")) >= parameters
    engine.close()


def take_steps(engine):
    """Norms of three steps, and the weights after them."""
    norms = []
    with engine.train_mode():
        for _ in range(3):
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(DATA, sft_loss)
            norms.append(engine.optimizer_step())
    return norms, {name: tensor.cpu().clone() for name, tensor in engine.get_per_tensor_param()[0]}


@pytest.mark.parametrize("key", ["cpu_offload", "optimizer_offload", "activation_offload"])
def test_an_offload_without_a_gpu_is_refused(tmp_path, key):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU to offload from")
    with pytest.raises(ConfigError, match=f"{key} is true and there is no GPU: everything is on the CPU"):
        built(tmp_path, **{key: True})


def test_offloads_that_would_do_nothing_are_refused():
    for changes, said in (
        ({"optimizer_offload": True, "cpu_offload": True}, "optimizer_offload is true and cpu_offload keeps its state"),
        ({"optimizer_offload": True, "optimizer": None}, "optimizer_offload is true and there is no optimizer"),
        ({"activation_offload": True, "optimizer": None}, "activation_offload is true and a frozen engine keeps no"),
    ):
        with pytest.raises(ConfigError, match=said):
            EngineConfig(model_path="any", **changes)


@pytest.mark.process
def test_cpu_offload_is_what_every_layer_is_sharded_with(tmp_path, monkeypatch):
    """As if there were a GPU: the policy is FSDP's, on all parameters, and steps are those without it."""
    plain = built(tmp_path)
    want = take_steps(plain)
    plain.close()
    monkeypatch.setattr(module_engine, "has_gpu", lambda: True)
    engine = built(tmp_path, cpu_offload=True)
    groups = [module._get_fsdp_state()._fsdp_param_group for module in find_sharded(engine)]
    assert len(groups) == 3  # two layers, and the rest
    assert all(parameter.offload_to_cpu for group in groups for parameter in group.fsdp_params)
    assert sum(len(group.fsdp_params) for group in groups) == len(list(engine.parts.built.scorer.parameters()))
    norms, weights = take_steps(engine)
    assert norms == pytest.approx(want[0], rel=1e-5)
    torch.testing.assert_close(weights, want[1], rtol=1e-5, atol=1e-6)
    engine.save_checkpoint(tmp_path / "checkpoint", 3)
    take_steps(engine)
    assert engine.load_checkpoint(tmp_path / "checkpoint") == 3
    torch.testing.assert_close(dict(engine.get_per_tensor_param()[0]), weights, rtol=0, atol=0)
    engine.close()


def find_sharded(engine):
    return [module for module in engine.parts.built.scorer.modules() if isinstance(module, FSDPModule)]


class CountingDriver:
    """Stands for torch's allocator calls and the GPU: all that is not page-locked lies "there"."""

    def __init__(self):
        self.pinned, self.calls, self.watched, self.alive = {}, [], [], []

    def pin(self, address, num_bytes):
        assert address % 4096 == 0
        self.pinned[address] = num_bytes
        return True

    def unpin(self, address):
        del self.pinned[address]

    def to_device(self, tensor, device):
        assert device.type == "cuda"
        return tensor.clone()

    def is_on_host(self, tensor):
        return tensor.data_ptr() in self.pinned

    def synchronize(self):
        self.calls.append("wait")

    def give_back(self):
        """What is alive now stays with this process."""
        self.calls.append("give back")
        self.alive.append(sum(not reference.expired() for reference in self.watched))


def storages_of(engine):
    """References to what the engine's numbers lie in: parameters and gradients, then the optimizer's."""
    parameters = [*engine.parts.built.scorer.parameters()]
    model = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    states = [value for state in engine.parts.built.optimizer.state.values() for value in state.values()]

    def reference(tensor):
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return StorageWeakRef(own.untyped_storage())

    return [reference(tensor) for tensor in model], [reference(value) for value in states]


@pytest.mark.process
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])  # plain parameters, and FSDP's shards
def test_an_offload_leaves_no_reference_and_the_same_steps(tmp_path, precision):
    stayed = built(tmp_path, precision=precision)
    want = [take_steps(stayed), take_steps(stayed)]
    stayed.close()
    engine, driver = built(tmp_path, precision=precision), CountingDriver()
    engine.parts.placement.memory = DeviceMemory(driver)
    found = [take_steps(engine)]
    engine.parts.placement.devices = dict.fromkeys(
        engine.parts.placement.devices, torch.device("cuda")
    )  # as if it lay there
    model, states = storages_of(engine)
    assert len(model) == 2 * len([*engine.parts.built.scorer.parameters()]), "the last step's gradients are there"
    driver.watched = states
    engine.optimizer_zero_grad()
    engine.to("cpu", model=False, grad=False)
    assert driver.calls == ["wait", "give back"]
    assert driver.alive == [0], "the optimizer's state, before the weights are sent"
    assert sum(not reference.expired() for reference in model) == len(model) // 2, "the gradients are gone"
    driver.watched = [*model, *states]
    engine.to("cpu")
    assert driver.calls == ["wait", "give back"] * 2
    assert driver.alive == [0, 0]
    assert sum(driver.pinned.values()) > 0
    num_pinned = len(driver.pinned)
    for _ in range(2):  # the host's copies lie where they lay
        engine.to("cuda")
        engine.to("cpu")
        assert len(driver.pinned) == num_pinned
    engine.to("cuda")
    engine.parts.placement.devices = dict.fromkeys(engine.parts.placement.devices, torch.device("cpu"))
    found.append(take_steps(engine))
    assert [norms for norms, _ in found] == [norms for norms, _ in want]
    for (_, ours), (_, theirs) in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    engine.close()
    assert not driver.pinned


@pytest.mark.process
@pytest.mark.parametrize("backend", OF_A_CPU)
def test_the_optimizers_state_is_on_the_gpu_in_steps_alone(tmp_path, monkeypatch, backend):
    """As if there were a GPU: where the optimizer's state is said to be in every pass and every step."""
    plain = built(tmp_path, backend)
    want = take_steps(plain)
    plain.close()
    monkeypatch.setattr(module_engine, "has_gpu", lambda: True)
    engine, places = built(tmp_path, backend, optimizer_offload=True), []
    there, here = torch.device("cpu", 0), torch.device("cpu")  # to an engine not the place where it computes
    step, run = engine.parts.built.optimizer.clip_and_step, engine.parts.runner.run
    monkeypatch.setattr(
        engine.parts.built.optimizer,
        "clip_and_step",
        lambda: places.append(("step", engine.parts.placement.devices["optimizer"])) or step(),
    )
    monkeypatch.setattr(
        engine.parts.runner,
        "run",
        lambda *given: places.append(("pass", engine.parts.placement.devices["optimizer"])) or run(*given),
    )
    engine.parts.placement.compute_device = there
    engine.parts.placement.devices = {"model": there, "grad": there, "optimizer": here}
    norms, weights = take_steps(engine)
    assert places == [("pass", here), ("step", there)] * 3
    assert engine.parts.placement.devices["optimizer"] == here
    assert norms == want[0]
    torch.testing.assert_close(weights, want[1], rtol=0, atol=0)
    engine.close()


@pytest.mark.process
@pytest.mark.parametrize("backend", OF_A_CPU)
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_offloaded_activations_give_the_same_steps(tmp_path, monkeypatch, backend, is_recomputed):
    """As if there were a GPU: what autograd saves is copied, but for parameters, and used in the backward pass."""
    monkeypatch.setattr(module_engine, "has_gpu", lambda: True)
    monkeypatch.setattr(activations, "_SMALL_BYTES", 0)
    saver, copied, engines = torch.autograd.graph.save_on_cpu, [], []

    def keep(saved):
        weights = [weight for weight in model_of(engines[-1]).parameters() if not isinstance(weight, DTensor)]
        places = {weight.untyped_storage().data_ptr() for weight in weights}  # gathered ones too, while they are there
        assert saved.untyped_storage().data_ptr() not in places
        copied.append(tuple(saved.shape))

    class Watched(saver):
        def __init__(self, pin_memory):
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda saved: keep(saved) or pack(saved)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Watched)
    seen = []
    for is_offloaded in (False, True):
        engine = built(tmp_path, backend, activation_offload=is_offloaded, activation_checkpointing=is_recomputed)
        engines.append(engine)
        seen.append(take_steps(engine))
        assert bool(copied) == is_offloaded
        engine.close()
    num_layers, num_steps = 2, 3
    states = [shape for shape in copied if shape[-1:] == (128,) and len(shape) > 1]
    assert len(states) >= num_layers * num_steps  # the inputs of layers at least
    assert seen[0][0] == seen[1][0]
    torch.testing.assert_close(seen[0][1], seen[1][1], rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloaded_activations_leave_the_gpu(tmp_path):
    """What is allocated after a forward pass of 4,096 tokens, and the steps."""
    allocated, seen = {}, []
    rows = ragged_batch([[5] * 256] * 16, [[7] * 256] * 16)
    for is_offloaded in (False, True):
        engine = built(tmp_path, activation_offload=is_offloaded, max_tokens_per_gpu=8192)

        def loss(output, columns, is_offloaded=is_offloaded):
            allocated[is_offloaded] = torch.cuda.memory_allocated()
            return sft_loss(output, columns)

        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(rows, loss)
            seen.append(engine.optimizer_step())
        engine.close()
    assert allocated[True] < 0.6 * allocated[False]
    assert seen[1] == pytest.approx(seen[0], rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", OF_A_GPU)
def test_an_offloaded_optimizer_leaves_the_gpu_between_steps(tmp_path, backend):
    plain = built(tmp_path, backend)
    want = take_steps(plain)
    plain.close()
    engine = built(tmp_path, backend, optimizer_offload=True)
    assert not any(value.is_cuda for state in engine.parts.built.optimizer.state.values() for value in state.values())
    norms, weights = take_steps(engine)
    assert not any(value.is_cuda for state in engine.parts.built.optimizer.state.values() for value in state.values())
    assert norms == pytest.approx(want[0], rel=1e-4)
    torch.testing.assert_close(weights, want[1], rtol=1e-4, atol=1e-5)
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cpu_offload_keeps_parameters_gradients_and_moments_off(tmp_path):
    plain = built(tmp_path)
    want = take_steps(plain)
    plain.close()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine = built(tmp_path, cpu_offload=True)
    norms, weights = take_steps(engine)
    assert norms == pytest.approx(want[0], rel=1e-4)
    torch.testing.assert_close(weights, want[1], rtol=1e-4, atol=1e-5)
    local = [parameter.to_local() for parameter in engine.parts.built.scorer.parameters()]
    moments = [
        value.to_local()
        for state in engine.parts.built.optimizer.state.values()
        for value in state.values()
        if value.ndim
    ]
    assert not any(tensor.is_cuda for tensor in [*local, *moments])
    parameters, _ = sizes_of(engine)
    assert torch.cuda.memory_allocated() - before < parameters
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", OF_A_GPU)
def test_offload_empties_the_gpu_and_modes_bring_everything_back(tmp_path, backend):
    engine = built(tmp_path, backend)
    engine.forward_backward_batch(DATA, sft_loss)
    engine.optimizer_step()
    torch.cuda.synchronize()
    before, (parameters, moments) = torch.cuda.memory_allocated(), sizes_of(engine)
    engine.to("cpu", model=False, optimizer=True, grad=False)
    assert before - torch.cuda.memory_allocated() >= moments
    engine.to("cpu")
    assert before - torch.cuda.memory_allocated() >= moments + 2 * parameters  # and the gradients
    with engine.train_mode():
        assert all(parameter.is_cuda for parameter in model_of(engine).parameters())
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(DATA, sft_loss)
        engine.optimizer_step()
    assert not any(parameter.is_cuda for parameter in model_of(engine).parameters())
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", OF_A_GPU)
def test_offload_gives_the_driver_all_but_a_context(tmp_path, backend):
    """As `cudaMemGetInfo` of any process tells it; megatron's two communicators of one rank, of NCCL, stay."""
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    engine = built(tmp_path, backend)
    engine.forward_backward_batch(DATA, sft_loss)
    engine.optimizer_step()
    engine.optimizer_zero_grad()
    engine.to("cpu")
    kept = 256 << 20 if backend != "megatron" else 1 << 30  # the libraries' workspaces
    assert free - torch.cuda.mem_get_info()[0] < kept
    assert torch.cuda.memory_reserved() <= 64 << 20  # cuBLAS's workspaces, of two streams on Hopper
    engine.close()


OFFLOADED = """
    import sys
    from pathlib import Path
    from rl_engine import EngineConfig, create_engine
    from rl_engine.losses import sft_loss
    from rl_engine.testing import ragged_batch, write_tiny_model

    backend, folder = sys.argv[1:]
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    write_tiny_model(Path(folder), head_dim=64, **sizes)
    engine = create_engine(backend, EngineConfig(model_path=folder, precision="bfloat16"))
    engine.initialize()
    for _ in range(2):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(ragged_batch([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]]), sft_loss)
        engine.optimizer_step()
    print("trained", flush=True)
    sys.stdin.readline()
    engine.optimizer_zero_grad()
    engine.to("cpu")
    print("offloaded", flush=True)
    sys.stdin.readline()
    engine.close()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", OF_A_GPU)
def test_an_offload_leaves_another_process_all_but_a_gibibyte(tmp_path, backend):
    """By `cudaMemGetInfo` of this process: what the other keeps are its context and the libraries' workspaces, and with
    megatron two communicators of NCCL, 0.4 GiB each on an H200."""
    torch.zeros(1, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(OFFLOADED), backend, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:

        def reaches(word):
            return any(line.strip() == word for line in iter(other.stdout.readline, ""))

        assert reaches("trained")
        assert free - torch.cuda.mem_get_info()[0] > 3 << 30  # weights, gradients and moments
        other.stdin.write("\n")
        other.stdin.flush()
        assert reaches("offloaded")
        assert free - torch.cuda.mem_get_info()[0] <= (2 << 30 if backend == "megatron" else 1 << 30)
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.wait(60) == 0
