"""Large results lie on huge pages where the system has them, and small ones are left alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import rl_csrc
from rl_csrc import _cpu
from rl_csrc.native import LARGE_BYTES, in_huge_pages


def advised(x: torch.Tensor) -> bool:
    """Whether the mapping around the middle of the tensor is marked for huge pages (`hg` of /proc/self/smaps)."""
    middle, inside = x.data_ptr() + x.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= middle < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


@pytest.mark.process
def test_large_results_are_advised() -> None:
    if not _cpu.advise_huge_pages(torch.empty(LARGE_BYTES * 8, dtype=torch.uint8)):
        pytest.skip("this system does not take advice on huge pages")
    x = in_huge_pages(torch.empty(LARGE_BYTES * 8, dtype=torch.uint8))
    assert advised(x)
    assert bool((x.fill_(7) == 7).all())
    logits = torch.zeros(2, LARGE_BYTES, dtype=torch.bfloat16, requires_grad=True)
    rl_csrc.logprobs(logits, torch.zeros(2, dtype=torch.int64)).logprobs.sum().backward()
    assert logits.grad is not None
    assert advised(logits.grad)


def test_small_or_strided_memory() -> None:
    assert not _cpu.advise_huge_pages(torch.empty(1000))
    with pytest.raises(rl_csrc.ArgumentError, match="contiguous memory"):
        _cpu.advise_huge_pages(torch.empty(100, 100).T)
