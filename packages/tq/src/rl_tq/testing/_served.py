"""Fixtures of the conformance suite: a served queue, a second client, and values as plain lists."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from rl_tq.registry import connect, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensordict import TensorDict

    from rl_tq.base import TransferQueue


def rows_of(value: Any) -> list[Any]:
    """A fetched column as plain lists, one item per row."""
    if isinstance(value, torch.Tensor):
        return [row.tolist() for row in value.unbind()]
    return value.tolist()


def turns_of(value: TensorDict) -> list[Any]:
    """A fetched column of turns as plain lists, one list of turns per row."""
    rows = zip(value["values"].unbind(), value["lengths"].unbind(), strict=True)
    return [[turn.tolist() for turn in values.split(lengths.tolist())] for values, lengths in rows]


def until(is_true: Any, timeout_s: float = 20.0) -> None:
    """Wait until a condition holds; fail after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain"
        time.sleep(0.005)


SLACK_S = 3.0
"""Seconds by which a wait may exceed its deadline, on a loaded machine."""


def ends_within(call: Callable[[], Any], seconds: float, tries: int = 3) -> None:
    """Assert that a call is at most this slow in the best of some tries: one may be slowed by other load."""
    took: list[float] = []
    for _ in range(tries):
        begun = time.monotonic()
        call()
        took.append(time.monotonic() - begun)
        if took[-1] <= seconds:
            return
    raise AssertionError(f"it took {min(took):.1f} s at best, and {seconds:.1f} s were allowed")


class Served:
    """Each test gets a queue that is served here, and a second client of it."""

    address: ClassVar[str]
    """Address to serve, with an empty name, so that each test has its own queue."""

    also: ClassVar[str] = ""
    """Second address of the same queue, to which the second client connects; empty: the first."""

    @pytest.fixture
    def queue(self) -> Iterator[TransferQueue]:
        """The client that serves."""
        with serve(self.address, timeout_s=20.0, also=[self.also] if self.also else []) as served:
            yield served

    @pytest.fixture
    def peer(self, queue: TransferQueue) -> Iterator[TransferQueue]:
        """Another client of the same queue."""
        with connect(queue.addresses[-1], timeout_s=20.0) as client:
            yield client
