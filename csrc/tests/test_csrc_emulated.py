"""What the emulated device sees: every fault that the tests of the CUDA kernels rely on it to show."""

from __future__ import annotations

import ctypes
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytestmark = pytest.mark.process

if TYPE_CHECKING:
    from torch import Tensor

ORDERS = ["ascending", "descending", "shuffled"]
FAULTS = ["no barrier", "no barrier of the warp", "unwritten", "early end", "divergent", "misaligned"]
FAULTS += ["no expect", "ended block"]


def run(emulated: Any, fault: str, order: str) -> tuple[str, Tensor]:
    """The error of a launch of the faulty kernel, and what it wrote."""
    emulated.configure(order)
    out = torch.full((72,), 5, dtype=torch.int32)
    emulated.library.rl_cuda_error_text.restype = ctypes.c_char_p
    status = emulated.library.rl_emulated_fault(FAULTS.index(fault), ctypes.c_void_p(out.data_ptr()))
    return (emulated.library.rl_cuda_error_text(status).decode() if status else ""), out[:64]


@pytest.mark.parametrize("fault", ["no barrier", "no barrier of the warp"])
def test_a_missing_barrier_makes_the_bits_depend_on_the_order(emulated: Any, fault: str) -> None:
    found = [run(emulated, fault, order)[1].tolist() for order in ("ascending", "descending")]
    assert found[0] != found[1]


def test_what_nobody_wrote_into_shared_memory_is_poison(emulated: Any) -> None:
    error, out = run(emulated, "unwritten", "ascending")
    assert not error
    assert out.tolist() == [-1] * 64


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("early end", r"thread \d+ waits for ever in __syncthreads at faults.cpp:\d+, as do 31"),
        ("divergent", r"thread \d+: __shfl_xor_sync, while others meet in __shfl_xor_sync at"),
        ("misaligned", r"thread \d+: a misaligned address at faults.cpp:\d+"),
        ("no expect", r"thread \d+ waits for ever in a barrier of bytes"),
        ("ended block", r"thread 0: writes to a block that has not begun, or has ended"),
    ],
)
def test_a_fault_is_an_error_that_names_kernel_block_and_thread(
    emulated: Any, fault: str, says: str, order: str
) -> None:
    error, _ = run(emulated, fault, order)
    assert re.search(rf"{fault.replace(' ', '_')}_kernel.*: block [01], {says}", error), error


def test_launches_go_on_after_a_fault(emulated: Any) -> None:
    for _ in range(3):
        assert run(emulated, "early end", "shuffled")[0]
    found = emulated.call("masked_moments", torch.arange(1000.0), None)
    assert [float(x) for x in found[:2]] == [1000.0, 499.5]
