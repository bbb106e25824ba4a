"""Slots are filled and drained in turn, and never overwritten before they are drained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from rl_csrc.errors import ArgumentError
from rl_csrc.pipeline import run_slots

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    return request.param


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_every_item_passes_through_unharmed(device: str, num_slots: int) -> None:
    sources = [torch.full((1000,), float(i), device=device) for i in range(11)]
    targets = [torch.full_like(x, -1.0) for x in sources]
    slots = [torch.empty(1000, device=device) for _ in range(num_slots)]
    used: list[int] = []

    def fill(i: int, slot: torch.Tensor) -> None:
        used.append(slot.data_ptr())
        slot.copy_(sources[i])

    def drain(i: int, slot: torch.Tensor) -> None:
        if device == "cuda":
            torch.cuda._sleep(1_000_000)  # slow enough that an unordered refill would be seen
        targets[i].copy_(slot)

    assert run_slots(range(11), slots, fill, drain) == 11
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)
    assert used == [slots[i % num_slots].data_ptr() for i in range(11)]


def test_items_made_on_the_way_are_ready_when_they_are_read(device: str) -> None:
    def made() -> Iterator[torch.Tensor]:
        for i in range(7):
            if device == "cuda":
                torch.cuda._sleep(1_000_000)
            yield torch.full((1000,), float(i), device=device)

    targets: list[torch.Tensor] = []

    def drain(_: torch.Tensor, slot: torch.Tensor) -> None:
        targets.append(slot.clone())

    slots = [torch.empty(1000, device=device) for _ in range(2)]
    assert run_slots(made(), slots, lambda item, slot: slot.copy_(item), drain) == 7
    assert [target.unique().tolist() for target in targets] == [[float(i)] for i in range(7)]


def test_an_error_passes_on_and_nothing_is_left_running(device: str) -> None:
    slots = [torch.zeros(4, device=device) for _ in range(2)]
    drained: list[int] = []

    def fill(i: int, slot: torch.Tensor) -> None:
        if i == 2:
            raise RuntimeError("no more data")
        slot.fill_(i)

    with pytest.raises(RuntimeError, match="no more data"):
        run_slots(range(5), slots, fill, lambda i, _: drained.append(i))
    assert drained == [0, 1]
    assert slots[0].tolist() == [0.0] * 4


def test_no_slots_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="0 slots"):
        run_slots([1], [], lambda *_: None, lambda *_: None)
    assert run_slots([], [torch.empty(1)], lambda *_: None, lambda *_: None) == 0
