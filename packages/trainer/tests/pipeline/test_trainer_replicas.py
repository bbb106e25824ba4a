"""Which rollout servers an agent worker generates on, as they come and go."""

import asyncio

import rl_rollout.registry
from rl_rollout.errors import ServerLostError
from rl_rollout.testing import FakeServer
from rl_rollout.types import GenerateRequest, SamplingParams, ServerAddress
from rl_trainer.workers.agent import Replicas


def address(port, pid):
    return ServerAddress(url=f"http://127.0.0.1:{port}", model="fake", pid=pid)


class Served(FakeServer):
    """Answers with the process id that its address names; gone if that is in `gone`."""

    def __init__(self, where, gone):
        super().__init__(lambda request: [where.pid])
        self._pid, self._gone = where.pid, gone

    async def start(self):
        if self._pid in self._gone:
            raise ServerLostError(f"{self._pid} is gone")
        return await super().start()

    async def generate(self, request):
        await self.start()
        return await super().generate(request)


def answers(monkeypatch, *rounds, gone=()):
    """The process ids that answer while each of these lists of addresses is in use."""
    gone = set(gone)
    monkeypatch.setattr(rl_rollout.registry, "connect_server", lambda where, api_token: Served(where, gone))

    async def ask(router, number):
        params = SamplingParams(max_new_tokens=1)
        request = GenerateRequest(request_id=f"{number}", prompt_token_ids=(number,), sampling_params=params)
        return (await router.generate(request)).token_ids[0]

    async def all_rounds():
        replicas = Replicas(rounds[0])
        told = []
        for addresses, dead in [(rounds[0], set()), *rounds[1:]]:
            gone.update(dead)
            await replicas.use(addresses)
            told.append(set(await asyncio.gather(*(ask(replicas.router, number) for number in range(8)))))
        return told

    return asyncio.run(all_rounds())


A, B, C = address(1, 11), address(2, 22), address(3, 33)


def test_exactly_those_that_are_named_are_used(monkeypatch):
    assert answers(monkeypatch, [A, B], ([B, C], ()), ([A], ())) == [{11, 22}, {22, 33}, {11}]


def test_a_new_server_at_the_port_of_a_dead_one_is_used(monkeypatch):
    again = address(1, 44)
    assert answers(monkeypatch, [A, B], ([again, B], {11})) == [{11, 22}, {44, 22}]


def test_one_that_died_before_it_could_be_used_is_passed_over(monkeypatch):
    told = answers(monkeypatch, [A, B], ([B, C], {11, 33}), ([C], ()), ([A], ()))
    assert told[1:] == [{22}, {22}, {22}]
    assert answers(monkeypatch, [A], ([B], {22}), ([C], ())) == [{11}, {11}, {33}]
