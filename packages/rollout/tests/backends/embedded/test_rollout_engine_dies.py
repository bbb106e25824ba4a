"""The process that computes is killed, one of several of a server of others: told, and gone on from elsewhere."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from rollout_servers import (
    alone,
    real_model,
    real_sglang,
    real_sglang_config,
    real_vllm,
    real_vllm_config,
    request,
)

from rl_rollout import CkptReceiver, Router, ServerConfig, ServerLostError, create_server

pytestmark = pytest.mark.process

DEADLINE_S = 120.0


def send_signal(server, name, signal_number):
    """Send a signal to the process of this title among those that the server started."""
    group = server.process.pid
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
            is_its = os.getpgid(int(folder.name)) == group
        except OSError:
            continue  # it has ended
        if is_its and name in title:
            os.kill(int(folder.name), signal_number)
            return
    raise AssertionError(f"no process of {group} is called {name}")


async def begun(server):
    """Return when a request that is asked now has its answer: others have begun."""
    await server.generate(request("begun", max_new_tokens=1))


class Dies:
    def test_its_requests_go_on_elsewhere(self, folder):
        """Whatever it had told counts once."""
        requests = [request(str(i), prompt=(5, 6, 7 + i), max_new_tokens=2000) for i in range(4)]

        async def scenario():
            dying = create_server(self.backend, self.config(folder))
            other = create_server("embedded", ServerConfig(model_path=str(folder), max_model_len=4096, num_threads=1))
            router = Router([dying])
            try:
                await asyncio.gather(router.start(), other.start())
                tasks = [asyncio.create_task(router.generate(each)) for each in requests]
                await begun(dying)
                send_signal(dying, self.process, signal.SIGSTOP)  # what has begun does not end meanwhile
                await router.add(other)
                send_signal(dying, self.process, signal.SIGKILL)
                async with asyncio.timeout(DEADLINE_S):
                    outputs = await asyncio.gather(*tasks)
                return outputs, router.lost
            finally:
                await router.stop()

        outputs, lost = asyncio.run(scenario())
        assert [len(output.token_ids) for output in outputs] == [2000] * 4
        assert outputs[0].token_ids == alone(folder, replace(requests[0], request_id="alone")).token_ids
        assert len(lost) == 1
        assert self.backend in str(lost[0])

    def test_an_update_that_is_under_way_is_over(self, folder, new_trainer):
        async def scenario():
            server, trainer = create_server(self.backend, self.config(folder)), new_trainer(600)
            await server.start()
            try:
                # The sender never sends: the update waits for it, for longer than this test.
                update = asyncio.create_task(server.update_weights(CkptReceiver(trainer.sender.address), 1))
                await asyncio.sleep(2.0)
                assert not update.done()
                send_signal(server, self.process, signal.SIGKILL)
                async with asyncio.timeout(DEADLINE_S):
                    with pytest.raises(ServerLostError, match=self.backend):
                        await update
                    with pytest.raises(ServerLostError, match=self.backend):
                        await server.generate(request())
            finally:
                await server.stop()
                await trainer.close()

        asyncio.run(scenario())


@real_vllm
class TestVllm(Dies):
    backend, process = "vllm", "EngineCore"

    @pytest.fixture
    def folder(self, tmp_path):
        return real_model(tmp_path)

    @staticmethod
    def config(folder):
        return real_vllm_config(folder, max_model_len=4096)


@real_sglang
class TestSglang(Dies):
    backend, process = "sglang", "sglang::scheduler"

    @pytest.fixture
    def folder(self, tmp_path):
        return real_model(tmp_path)

    @staticmethod
    def config(folder):
        return real_sglang_config(folder, max_model_len=4096)
