"""The router over servers without a model."""

import asyncio

import pytest
import torch

from rl_rollout import ConfigError, GenerateRequest, Router, SamplingParams, ServerLostError, WeightUpdateError
from rl_rollout.testing import FakeReceiver, FakeServer


def request(request_id, **fields):
    return GenerateRequest(
        request_id=request_id, prompt_token_ids=(1, 2), sampling_params=SamplingParams(max_new_tokens=4), **fields
    )


def served(servers):
    return [len(server.requests) for server in servers]


class Breaking(FakeServer):
    """Is lost when it is asked for the third time."""

    async def generate(self, request):
        if len(self.requests) == 2:
            raise ServerLostError("the third request found nobody")
        return await super().generate(request)


async def started(*servers):
    router = Router(servers)
    await router.start()
    return router


def test_requests_go_to_the_least_loaded():
    async def scenario():
        servers = [FakeServer(), FakeServer(), FakeServer()]
        router = await started(*servers)
        await router.pause("keep")
        tasks = [asyncio.create_task(router.generate(request(f"r{i}"))) for i in range(9)]
        await asyncio.sleep(0.01)
        loads = served(servers)
        await router.resume()
        await asyncio.gather(*tasks)
        return loads

    assert asyncio.run(scenario()) == [3, 3, 3]


def test_a_session_stays_on_its_replica():
    async def scenario():
        servers = [FakeServer(), FakeServer()]
        router = await started(*servers)
        for turn in range(5):
            for session in ("a", "b"):
                await router.generate(request(f"{session}{turn}", session_id=session))
        return [{r.session_id for r in server.requests} for server in servers]

    sessions = asyncio.run(scenario())
    assert sessions[0].isdisjoint(sessions[1])


def test_a_lost_replica_is_left_out_and_its_requests_go_elsewhere():
    async def scenario():
        breaking, other = Breaking(), FakeServer()
        router = await started(breaking, other)
        outputs = [await router.generate(request(f"r{i}", session_id="s")) for i in range(6)]
        return outputs, served([breaking, other]), router

    outputs, counts, router = asyncio.run(scenario())
    assert [output.token_ids for output in outputs] == [(1, 2)] * 6
    assert counts == [2, 4]
    assert len(router.servers) == 1
    assert "third request" in str(router.lost[0])


def test_when_all_are_lost_the_router_says_so():
    async def scenario():
        router = await started(Breaking())
        for i in range(3):
            await router.generate(request(f"r{i}"))

    with pytest.raises(ServerLostError, match="all 1 replicas are lost.*third request"):
        asyncio.run(scenario())


def test_one_replica_is_given_the_receiver_itself():
    async def scenario():
        server = FakeServer()
        router = await started(server)
        await router.update_weights(FakeReceiver({"w": torch.ones(2)}), 3)
        with pytest.raises(WeightUpdateError, match="version 3 still serves"):
            await router.update_weights(FakeReceiver({"w": torch.ones(2)}, fail_after=0), 4)
        return server

    server = asyncio.run(scenario())
    assert server.weight_version == 3
    assert server.weights["w"].tolist() == [1, 1]


def test_several_replicas_open_a_receiver_each_by_the_address():
    async def scenario():
        router = await started(FakeServer(), FakeServer())
        # Nobody knows the scheme of this address, so each replica fails on its own.
        await router.update_weights(FakeReceiver({"w": torch.ones(2)}), 1)

    with pytest.raises(WeightUpdateError, match="2 of 2 replicas did not install version 1"):
        asyncio.run(scenario())


def test_sleep_and_wake_reach_every_replica():
    async def scenario():
        servers = [FakeServer(), FakeServer()]
        router = await started(*servers)
        await router.sleep()
        tasks = [asyncio.create_task(router.generate(request(f"r{i}"))) for i in range(2)]
        await asyncio.sleep(0.01)
        is_done = [task.done() for task in tasks]
        await router.wake()
        await asyncio.gather(*tasks)
        await router.stop()
        await router.stop()
        return is_done

    assert asyncio.run(scenario()) == [False, False]


def test_a_router_needs_a_server():
    with pytest.raises(ConfigError, match="at least one"):
        Router([])
