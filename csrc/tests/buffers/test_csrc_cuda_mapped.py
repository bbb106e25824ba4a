"""Memory that comes and goes at its address: the driver's calls in order, on host memory; on a GPU, its own."""

import ctypes
import faulthandler
import importlib
import os

import pytest
import torch

pytestmark = pytest.mark.process

PAGE = 1 << 16


class Driver:
    """The emulated driver: what it was asked, and what it refuses next."""

    def __init__(self, library):
        self.library = library
        library.rl_emulated_driver_calls.restype = ctypes.c_char_p
        library.rl_emulated_driver_taken.restype = ctypes.c_uint64
        self.calls()

    def calls(self):
        """Since the last time: name, address, bytes."""
        lines = self.library.rl_emulated_driver_calls().decode().splitlines()
        return [(name, int(address), int(size)) for name, address, size in map(str.split, lines)]

    def names(self):
        return [name for name, *_ in self.calls()]

    def taken(self):
        return self.library.rl_emulated_driver_taken()

    def fail(self, name):
        self.library.rl_emulated_driver_fail(name.encode())


@pytest.fixture
def driver(emulated):
    return Driver(emulated.library)


@pytest.fixture
def new_memory(driver):
    return importlib.import_module("rl_csrc.cuda.mapped").MappedMemory


def test_memory_leaves_and_comes_back_at_the_same_address(driver, new_memory):
    memory = new_memory(3 * PAGE + 5, torch.device("cpu"))
    assert memory.num_bytes == 4 * PAGE
    assert driver.taken() == 4 * PAGE
    (_, address, _), *rest = driver.calls()
    assert rest == [("create", 0, 4 * PAGE), ("map", address, 4 * PAGE), ("access", address, 4 * PAGE)]
    tensor = memory.tensor(PAGE, (16, 8), torch.bfloat16)
    assert tensor.data_ptr() == address + PAGE
    tensor.fill_(3)

    memory.give_back()
    assert not memory.is_there
    assert driver.calls() == [("unmap", address, 4 * PAGE), ("release", 0, 0)]
    assert driver.taken() == 0
    memory.give_back()
    assert driver.calls() == []

    memory.take()
    memory.take()
    assert driver.names() == ["create", "map", "access"]
    assert driver.taken() == 4 * PAGE
    assert tensor.data_ptr() == address + PAGE
    tensor.fill_(5)  # what a graph would write to
    assert memory.tensor(PAGE, (128,), torch.bfloat16).eq(5).all()
    memory.close()
    assert driver.names() == ["unmap", "release", "free"]
    assert driver.taken() == 0


@pytest.mark.process
def test_what_is_used_while_it_is_given_back_is_a_fault(new_memory):
    memory = new_memory(PAGE, torch.device("cpu"))
    tensor = memory.tensor(0, (4,), torch.float32)
    memory.give_back()
    child = os.fork()
    if not child:
        faulthandler.disable()
        tensor.fill_(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    memory.close()


@pytest.mark.parametrize("step", ["create", "map", "access"])
def test_missing_device_memory_is_an_error_and_leaves_nothing(driver, new_memory, step):
    memory = new_memory(PAGE, torch.device("cpu"))
    memory.give_back()
    driver.calls()
    driver.fail(step)
    with pytest.raises(torch.OutOfMemoryError, match=r"0.00 GiB were asked of cpu, and less is free"):
        memory.take()
    assert (
        driver.names()
        == {
            "create": ["create"],
            "map": ["create", "map", "release"],
            "access": ["create", "map", "access", "unmap", "release"],
        }[step]
    )
    assert driver.taken() == 0
    memory.take()  # once there is room
    memory.close()
    driver.calls()
    driver.fail(step)
    with pytest.raises(torch.OutOfMemoryError):
        new_memory(PAGE, torch.device("cpu"))
    assert driver.names()[-1] == "free"
    assert driver.taken() == 0


def test_a_tensor_lies_within(new_memory):
    memory = new_memory(PAGE, torch.device("cpu"))
    for offset, shape in ((0, (PAGE,)), (2, (4,)), (PAGE - 8, (4,))):
        with pytest.raises(ValueError, match="are not whole elements inside"):
            memory.tensor(offset, shape, torch.float32)
    assert memory.tensor(8, (0,), torch.float32).numel() == 0
    memory.close()


@pytest.mark.gpu
def test_a_gpu_s_memory_leaves_and_comes_back_under_a_graph():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here.")
    new_memory = importlib.import_module("rl_csrc.cuda.mapped").MappedMemory
    size = 1 << 30
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    memory = new_memory(size, torch.device("cuda"))
    tensor = memory.tensor(1 << 20, (1 << 20,), torch.float32)
    assert before - torch.cuda.mem_get_info()[0] >= size
    tensor.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    memory.give_back()
    assert before - torch.cuda.mem_get_info()[0] < size // 4
    memory.take()
    tensor.fill_(41)
    graph.replay()
    assert tensor.eq(42).all()
    memory.close()
