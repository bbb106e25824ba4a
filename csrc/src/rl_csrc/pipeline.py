"""Work that passes through a few buffers: while one slot is drained, the next is filled.

On CUDA the two halves run on streams of their own. A slot is filled again only after the event that says its last drain
is done, so the host never waits and never holds more than the slots it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from rl_csrc.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Item = TypeVar("Item")


def run_slots(
    items: Iterable[Item],
    slots: Sequence[torch.Tensor],
    fill: Callable[[Item, torch.Tensor], object],
    drain: Callable[[Item, torch.Tensor], object],
) -> int:
    """Call `fill(item, slot)` then `drain(item, slot)` for every item, slots in turn; return the number of items.

    With CUDA slots both only enqueue work, on the current stream that they find; the caller's stream waits for all of
    it, also when one of them raises. With CPU slots each item is filled and drained before the next. Two slots overlap
    filling with draining. Raises `ArgumentError` without slots, or with slots on several devices.

    Items are asked for on the stream that fills, so what an iterator makes there is ready when `fill` reads it, and its
    memory is not used again before. `drain` reads the slot; an item's own CUDA memory may be gone by then.
    """
    devices = {slot.device for slot in slots}
    if len(devices) != 1:
        raise ArgumentError(f"run_slots: {len(slots)} slots on {len(devices)} devices; wanted one or more, all on one.")
    device = devices.pop()
    if device.type == "cuda":
        return _run_on_streams(items, slots, fill, drain, device)
    count = 0
    for count, item in enumerate(items, 1):
        slot = slots[(count - 1) % len(slots)]
        fill(item, slot)
        drain(item, slot)
    return count


def _run_on_streams(
    items: Iterable[Item],
    slots: Sequence[torch.Tensor],
    fill: Callable[[Item, torch.Tensor], object],
    drain: Callable[[Item, torch.Tensor], object],
    device: torch.device,
) -> int:
    callers = torch.cuda.current_stream(device)
    filling, draining = torch.cuda.Stream(device), torch.cuda.Stream(device)
    filling.wait_stream(callers)
    draining.wait_stream(callers)
    drained: list[torch.Event | None] = [None] * len(slots)
    count = 0
    try:
        for count, item in enumerate(_made_on(filling, items), 1):
            number = (count - 1) % len(slots)
            last = drained[number]
            if last is not None:
                filling.wait_event(last)
            with torch.cuda.stream(filling):
                fill(item, slots[number])
            draining.wait_stream(filling)
            with torch.cuda.stream(draining):
                drain(item, slots[number])
            drained[number] = draining.record_event()
    finally:
        callers.wait_stream(filling)
        callers.wait_stream(draining)
    return count


def _made_on(stream: torch.cuda.Stream, items: Iterable[Item]) -> Iterator[Item]:
    """The items, each asked for while the stream is current."""
    iterator = iter(items)
    while True:
        with torch.cuda.stream(stream):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
