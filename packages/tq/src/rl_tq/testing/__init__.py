"""Test kit: a queue in memory, and the conformance suite that every storage must pass. Needs pytest.

A storage of your own passes when a subclass does::

    class TestMine(TransferQueueContract):
        address = "mine://"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_tq.registry import serve
from rl_tq.testing._leases import LeasesContract
from rl_tq.testing._policies import PoliciesContract
from rl_tq.testing._rows import RowsContract
from rl_tq.testing._values import ValuesContract

if TYPE_CHECKING:
    from rl_tq.base import TransferQueue

__all__ = ["TransferQueueContract", "fake_queue"]


def fake_queue() -> TransferQueue:
    """In-process queue, for tests of code that takes a `TransferQueue`. Close it after use."""
    return serve("inproc://")


class TransferQueueContract(ValuesContract, RowsContract, LeasesContract, PoliciesContract):
    """Conformance suite of `TransferQueue`. Each test gets a queue that is served here, and a second client of it."""
