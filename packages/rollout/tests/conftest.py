"""What several test files need: model folders, and the sending side of weight updates."""

import asyncio
import uuid

import pytest
import torch

import rl_ckpt
from rl_rollout import CkptReceiver
from rl_rollout.testing import write_tiny_model


class Trainer:
    """Sends from this process; the server's process receives."""

    def __init__(self, timeout_s):
        self.sender = rl_ckpt.connect(f"shm://rollout-test-{uuid.uuid4().hex}", role="send", timeout_s=timeout_s)

    async def update(self, served, weights, version):
        """For `Served.update`."""
        await self.update_server(served.server, weights, version)

    async def update_server(self, server, weights, version):
        failures = await asyncio.gather(
            server.update_weights(CkptReceiver(self.sender.address), version),
            self._send(weights, version),
            return_exceptions=True,
        )
        for failure in failures:
            if failure is not None and not isinstance(failure, rl_ckpt.types.SyncReport):
                raise failure

    async def _send(self, weights, version):
        await self.sender.prepare()
        await self.sender.connect()
        return await self.sender.send_weights(weights.items(), version=version)

    async def close(self):
        await self.sender.close()


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory):
    """A model with room for requests that take a second."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-long", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def new_trainer():
    """The class, for those who need senders."""
    return Trainer


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny models gain nothing from a second thread, and on a busy machine they wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3")
