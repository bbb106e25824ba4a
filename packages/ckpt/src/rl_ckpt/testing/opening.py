"""What every backend must do when an end is opened and closed, and in whose hands."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
from typing import TYPE_CHECKING, NoReturn

import pytest

from rl_ckpt import connect
from rl_ckpt.errors import UsageError
from rl_ckpt.testing.helpers import Pair, Suite, assert_same, failure, receive_all, refusal, sample_weights

if TYPE_CHECKING:
    from torch import Tensor

    from rl_ckpt.base import WeightReceiver, WeightSender

TOLD = 7
"""Exit status of a child that was told what to do."""


class OpeningSuite(Suite):
    """Opened and closed as often as one likes, by one process, with an event loop or without."""

    def test_a_closed_end_says_so(self) -> None:
        """Opening again and closing again are nothing."""

        async def work(pair: Pair) -> None:
            sender, receiver = await pair.send_end(), await pair.receive_end()
            assert await sender.prepare() == await sender.prepare()
            assert (sender.digest, receiver.digest) == (None, None)
            _, report = await asyncio.gather(
                receive_all(receiver), sender.send_weights(sample_weights().items(), version=0)
            )
            assert report.digest == sender.digest == receiver.digest
            for end in (sender, receiver):
                await end.close()
                await end.close()
            await failure(UsageError, sender.send_weights(sample_weights().items(), version=1))
            await failure(UsageError, receive_all(receiver))

        self.run(work)

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_an_end_is_of_one_process(self) -> None:
        """It does not pickle; a forked child is told to open its own, and may close it, and the session goes on."""

        async def work(pair: Pair) -> None:
            sender, receiver = await pair.send_end(), await pair.receive_end()
            for version in (0, 1):
                got, _ = await asyncio.gather(
                    receive_all(receiver), sender.send_weights(sample_weights().items(), version=version)
                )
                assert_same(got, sample_weights())
                child = os.fork()
                if not child:
                    _use_as_a_child(sender, receiver)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == TOLD  # noqa: ASYNC222  # it has an alarm
            for end in (sender, receiver):
                refusal(TypeError, lambda end=end: pickle.dumps(end))

        self.run(work)

    def test_the_synchronous_twins(self) -> None:
        """`send` and `recv`, each in a thread without an event loop."""
        address, got = self.new_address(), dict[str, "Tensor"]()

        def receive() -> None:
            with connect(address, role="receive", timeout_s=self.long_s, token=self.token) as receiver:
                got.update((name, tensor.clone()) for name, tensor in receiver.recv())

        thread = threading.Thread(target=receive)
        thread.start()
        with connect(address, role="send", timeout_s=self.long_s, token=self.token) as sender:
            sender.send(sample_weights().items(), version=0)
        thread.join()
        assert_same(got, sample_weights())


def _use_as_a_child(sender: WeightSender, receiver: WeightReceiver) -> NoReturn:
    """Be refused, close, and exit; killed if any of it hangs."""
    signal.alarm(60)
    status = 1
    try:
        for use in (
            sender.send_weights(sample_weights().items(), version=9), receive_all(receiver), sender.connect(),
            receiver.connect(),
        ):  # fmt: skip
            assert "does not survive a fork" in str(asyncio.run(failure(UsageError, use)))
        for end in (sender, receiver):
            asyncio.run(end.close())
        status = TOLD
    finally:
        os._exit(status)
