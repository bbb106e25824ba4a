"""The router over servers without a model."""

import asyncio
import uuid
from dataclasses import replace

import pytest
import torch
from slow_engine import slow_down

import rl_ckpt
from rl_bench.waiting import until_async
from rl_rollout import (
    CkptReceiver,
    ConfigError,
    FinishReason,
    GenerateRequest,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    Router,
    SamplingParams,
    ServerConfig,
    ServerLostError,
    TokenOutput,
    WeightUpdateError,
    connect_server,
    create_server,
)
from rl_rollout.router import Placement, joined, rest_of
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


@pytest.mark.promise("A router places by session")
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


def test_requests_of_a_lost_replica_go_elsewhere():
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


# ---- partial rollouts


class Dying(FakeServer):
    """Is lost in the middle of every request, having given `told` tokens."""

    def __init__(self, told, **fields):
        super().__init__(lambda request: range(100, 150), **fields)
        self.told = told

    async def generate(self, request):
        whole = await super().generate(request)
        error = ServerLostError("killed")
        if self.told:
            cut = {name: getattr(whole, name)[: self.told] for name in ("token_ids", "logprobs", "weight_versions")}
            error.partial = replace(whole, finish_reason=FinishReason.ABORT, **cut)
        raise error


def counting(request):
    """Goes on counting from the last token of the prompt."""
    return range(request.prompt_token_ids[-1] + 1, request.prompt_token_ids[-1] + 50)


@pytest.mark.promise("A request whose replica is lost goes on elsewhere from the tokens that had come")
@pytest.mark.parametrize("told", [0, 1, 3, 4])
def test_a_request_whose_replica_is_lost_goes_on_where_it_was(told):
    async def scenario():
        dying, other = Dying(told), FakeServer(counting)
        dying.weight_version, other.weight_version = 3, 4
        router = await started(dying, other)
        return await router.generate(replace(request("r"), prompt_token_ids=(7, 99))), other.requests

    output, asked = asyncio.run(scenario())
    assert output.token_ids == (100, 101, 102, 103)
    assert output.weight_versions == (3,) * told + (4,) * (4 - told)
    assert len(output.logprobs) == 4
    assert output.finish_reason is FinishReason.LENGTH
    assert [each.prompt_token_ids for each in asked] == ([(7, 99, *range(100, 100 + told))] if told < 4 else [])


@pytest.mark.process
def test_a_replica_is_removed_and_loses_nothing(long_folder):
    """Two real engines: what the removed one has done is kept, and the other one goes on."""

    async def scenario():
        config = ServerConfig(model_path=str(long_folder), num_threads=1)
        servers = [create_server("embedded", config) for _ in range(2)]
        router = await started(*servers)
        params = SamplingParams(max_new_tokens=800, temperature=0.0, ignore_eos=True)
        requests = [
            GenerateRequest(request_id=f"r{i}", prompt_token_ids=(5, 6, 7 + i), sampling_params=params)
            for i in range(6)
        ]
        whole = await asyncio.gather(*map(router.generate, requests))
        has_begun = slow_down(servers[0], 3)
        tasks = [asyncio.create_task(router.generate(each)) for each in requests]
        assert await asyncio.to_thread(has_begun.wait, 60)
        asked = spied(servers[1])
        await servers[0].pause("keep")  # they are in the middle, however fast the machine is
        await router.remove(servers[0])
        again = await asyncio.gather(*tasks)
        with pytest.raises(ConfigError, match="last replica"):
            await router.remove(servers[1])
        with pytest.raises(ConfigError, match="not one of"):
            await router.remove(servers[0])
        await router.stop()
        return whole, again, asked

    whole, again, asked = asyncio.run(scenario())
    assert [output.token_ids for output in again] == [output.token_ids for output in whole]
    assert [output.finish_reason for output in again] == [FinishReason.LENGTH] * 6
    assert all(output.logprobs == pytest.approx(w.logprobs, abs=1e-4) for output, w in zip(again, whole, strict=True))
    assert len(asked) == 3
    for each in asked:
        assert len(each.prompt_token_ids) > 3
        assert len(each.prompt_token_ids) + each.sampling_params.max_new_tokens == 803


@pytest.mark.process
def test_a_replica_that_one_router_removes_goes_on_for_another(long_folder):
    async def scenario():
        config = ServerConfig(model_path=str(long_folder), num_threads=1)
        servers = [create_server("embedded", config) for _ in range(2)]
        urls = [(await server.start()).url for server in servers]
        one, other = await started(*map(connect_server, urls)), await started(connect_server(urls[0]))
        params = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)
        has_begun = slow_down(servers[0], 1)
        task = asyncio.create_task(
            other.generate(GenerateRequest(request_id="r", prompt_token_ids=(5, 6, 7), sampling_params=params))
        )
        assert await asyncio.to_thread(has_begun.wait, 60)
        await one.remove(one.servers[0])
        output = await task
        for each in (one, other, *servers):
            await each.stop()
        return output

    output = asyncio.run(scenario())
    assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 400)


def spied(server):
    """Requests that the server is given from now on."""
    asked, real = [], server.generate

    async def generate(request):
        asked.append(request)
        return await real(request)

    server.generate = generate
    return asked


class Halting(FakeServer):
    """Is in the middle of its first request until that is aborted; then the next weights serve."""

    def __init__(self):
        super().__init__()
        self.has_begun, self.has_ended = asyncio.Event(), asyncio.Event()

    async def generate(self, request):
        output = await super().generate(request)
        if len(self.requests) > 1:
            return replace(output, weight_versions=(2,) * len(output.token_ids))
        self.has_begun.set()
        await self.has_ended.wait()
        parts = {"token_ids": output.token_ids[:2], "logprobs": (-0.25, -0.75), "weight_versions": (1, 1)}
        return replace(output, **parts, finish_reason=FinishReason.ABORT)

    async def abort(self, request_ids=None):
        self.has_ended.set()


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "is aborted"])
def test_held_requests_go_on_from_the_tokens_that_they_have(ends):
    async def scenario():
        server = Halting()
        router = await started(server)
        tasks = [asyncio.create_task(router.generate(request("r")))]
        await server.has_begun.wait()
        await router.hold()
        tasks.append(asyncio.create_task(router.generate(request("new"))))
        await asyncio.wait(tasks, timeout=0.02)
        assert len(server.requests) == 1
        assert not any(task.done() for task in tasks)
        if ends:
            await router.abort()
        await router.release()
        return await asyncio.gather(*tasks), server.requests

    (output, other), asked = asyncio.run(scenario())
    if ends:
        assert (len(output.token_ids), len(other.token_ids), len(asked)) == (2, 0, 1)
        assert output.finish_reason == other.finish_reason == FinishReason.ABORT
        return
    assert output.weight_versions == (1, 1, 2, 2)
    assert output.logprobs == (-0.25, -0.75, -0.5, -0.5), "each as it was recorded"
    (rest,) = [each for each in asked[1:] if each.request_id == "r"]
    assert rest.prompt_token_ids == (1, 2, *output.token_ids[:2])
    assert rest.sampling_params.max_new_tokens == 2
    assert set(other.weight_versions) == {2}


def test_held_tokens_go_on_in_another_process():
    """Another router begins with them; an output that had ended is given as it was, and the rest is forgotten."""

    async def scenario():
        server = Halting()
        router = await started(server)
        task = asyncio.create_task(router.generate(request("r")))
        await server.has_begun.wait()
        await router.hold()
        ((prompt, part),) = router.stopped.outputs()
        task.cancel()
        other = FakeServer()
        again = await started(other)
        ended = replace(part, finish_reason=FinishReason.STOP)
        again.stopped.restore([(prompt, part), (prompt, ended)])
        first, second = [await again.generate(request(name)) for name in ("one", "two")]
        again.stopped.restore([(prompt, ended)])
        await again.hold()
        await again.release()
        return prompt, part, first, second, again, other

    prompt, part, first, second, again, other = asyncio.run(scenario())
    assert (prompt, len(part.token_ids), part.finish_reason) == ((1, 2), 2, FinishReason.ABORT)
    assert (first.token_ids, first.finish_reason) == (part.token_ids, FinishReason.STOP)
    assert second.token_ids[:2] == part.token_ids
    assert (second.logprobs[:2], second.weight_versions[:2]) == (part.logprobs, part.weight_versions)
    assert [each.prompt_token_ids for each in other.requests] == [(1, 2, *part.token_ids)]
    assert again.stopped.outputs() == []


@pytest.mark.process
def test_a_hold_in_the_middle_changes_no_token(long_folder):
    async def scenario():
        server = create_server("embedded", ServerConfig(model_path=str(long_folder), num_threads=1))
        router = await started(server)
        params = SamplingParams(max_new_tokens=300, temperature=1.0, seed=3, ignore_eos=True)
        each = [GenerateRequest(request_id=f"r{i}", prompt_token_ids=(5, 6, i), sampling_params=params) for i in (7, 8)]
        whole = await asyncio.gather(*map(router.generate, each))
        has_begun = slow_down(server, 2)
        tasks = [asyncio.create_task(router.generate(one)) for one in each]
        assert await asyncio.to_thread(has_begun.wait, 60)
        asked = spied(server)
        await router.hold()
        await router.sleep()
        await router.wake()
        await router.release()
        again = await asyncio.gather(*tasks)
        await router.stop()
        return whole, again, asked

    whole, again, asked = asyncio.run(scenario())
    assert len(asked) == 2
    assert all(len(one.prompt_token_ids) > 3 for one in asked)
    assert [output.token_ids for output in again] == [output.token_ids for output in whole]
    assert [output.finish_reason for output in again] == [FinishReason.LENGTH] * 2


def test_an_abort_of_the_caller_ends_a_request_for_good():
    async def scenario():
        servers = [FakeServer(), FakeServer()]
        router = await started(*servers)
        await router.pause("keep")
        task = asyncio.create_task(router.generate(request("r")))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="in flight already"):
            await router.generate(request("r"))
        await router.abort(["r"])
        return await task, served(servers)

    output, counts = asyncio.run(scenario())
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.ABORT)
    assert sum(counts) == 1


def test_parts_are_put_together():
    first = TokenOutput(
        request_id="r",
        token_ids=(3, 4),
        logprobs=(-1.0, -2.0),
        weight_versions=(0, 0),
        finish_reason=FinishReason.ABORT,
        top_logprobs=(((3, -1.0),), ((4, -2.0),)),
        prompt_logprobs=(-0.1,),
        routed_experts=(((0,),), ((1,),), ((2,),)),
    )
    asked = replace(request("r"), returns_prompt_logprobs=True)  # of (1, 2), four tokens
    rest = rest_of(asked, first)
    assert (rest.prompt_token_ids, rest.sampling_params.max_new_tokens) == ((1, 2, 3, 4), 2)
    assert not rest.returns_prompt_logprobs
    second = TokenOutput(
        request_id="r",
        token_ids=(5,),
        logprobs=(-3.0,),
        weight_versions=(1,),
        finish_reason=FinishReason.STOP,
        top_logprobs=(((5, -3.0),),),
        routed_experts=(((9,),), ((9,),), ((9,),), ((3,),)),
    )
    whole = joined(first, second, num_prompt_tokens=2)
    assert (whole.token_ids, whole.logprobs, whole.weight_versions) == ((3, 4, 5), (-1.0, -2.0, -3.0), (0, 0, 1))
    assert whole.top_logprobs == (((3, -1.0),), ((4, -2.0),), ((5, -3.0),))
    assert whole.prompt_logprobs == (-0.1,)
    assert whole.routed_experts == (((0,),), ((1,),), ((2,),), ((3,),))  # P + C - 1 of them, each once
    assert whole.finish_reason is FinishReason.STOP
    assert rest_of(asked, replace(first, token_ids=(3, 4, 5, 6))) is None


# ---- joining, health, room


async def update(router, version, weights=None):
    """As a trainer does it: a sender, and every replica a receiver of it."""
    sender = rl_ckpt.connect(f"inproc://router-{uuid.uuid4().hex}", role="send", timeout_s=30)
    try:
        await asyncio.gather(
            router.update_weights(CkptReceiver(sender.address), version),
            sender.send_weights((weights or {"w": torch.ones(2)}).items(), version=version, num_peers=2),
        )
    finally:
        await sender.close()


@pytest.mark.promise("A latecomer has the current weights before its first request")
def test_a_latecomer_has_the_weights_before_its_first_request():
    async def scenario():
        first, late = FakeServer(), FakeServer()
        router = await started(first)
        await router.update_weights(FakeReceiver({"w": torch.ones(2)}, 3), 3)
        joining = asyncio.create_task(router.add(late))
        await asyncio.sleep(0.01)
        while_joining = [router.servers, await router.generate(request("a"))]
        await update(router, 4)
        await joining
        outputs = await asyncio.gather(*(router.generate(request(f"r{i}")) for i in range(4)))
        await router.stop()
        return first, late, while_joining, outputs

    first, late, (servers, output), outputs = asyncio.run(scenario())
    assert servers == (first,)
    assert output.weight_versions == (3, 3)
    assert late.weight_version == 4
    assert late.requests
    assert {version for output in outputs for version in output.weight_versions} == {4}


def test_a_latecomer_may_take_the_version_from_a_sender():
    async def scenario():
        first, late = FakeServer(), FakeServer()
        router = await started(first)
        await router.update_weights(FakeReceiver({"w": torch.ones(2)}, 3), 3)
        address = f"inproc://router-{uuid.uuid4().hex}"
        sender = rl_ckpt.connect(address, role="send", timeout_s=30)
        await asyncio.gather(
            router.add(late, CkptReceiver(address)),
            sender.send_weights({"w": torch.ones(2)}.items(), version=3, num_peers=1),
        )
        outputs = await asyncio.gather(*(router.generate(request(f"r{i}")) for i in range(4)))
        await sender.close()
        await router.stop()
        return late, outputs

    late, outputs = asyncio.run(scenario())
    assert late.weight_version == 3
    assert late.requests
    assert {version for output in outputs for version in output.weight_versions} == {3}


def test_a_latecomer_that_gets_no_weights_is_not_used():
    class Failing(FakeServer):
        async def update_weights(self, receive, version):
            raise WeightUpdateError("no memory")

    async def scenario():
        first, late = FakeServer(), Failing()
        router = await started(first)
        await router.update_weights(FakeReceiver({"w": torch.ones(2)}, 3), 3)
        with pytest.raises(WeightUpdateError, match="no memory"):
            await router.add(late, FakeReceiver({}, 3))
        return router.servers == (first,), late._is_stopped

    assert asyncio.run(scenario()) == (True, True)


def test_a_latecomer_before_any_update_serves_and_then_pauses():
    async def scenario():
        router, late = await started(FakeServer()), FakeServer()
        await router.pause("keep")
        await router.add(late)
        tasks = [asyncio.create_task(router.generate(request(f"r{i}"))) for i in range(2)]
        await asyncio.sleep(0.01)
        were_done = [task.done() for task in tasks]
        await router.resume()
        await asyncio.gather(*tasks)
        return were_done, len(late.requests)

    assert asyncio.run(scenario()) == ([False, False], 1)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_expired_request_of_a_lost_replica_is_not_resent(is_streamed):
    class Hanging(FakeServer):
        async def generate(self, request):
            await asyncio.sleep(0.05)
            raise ServerLostError("it hung")

    async def scenario():
        other = FakeServer()
        router = await started(Hanging(), other)
        asked = request("r", timeout_s=0.02)
        with pytest.raises(RequestTimeoutError, match="'r' was not done when its time was over, .* lost: it hung"):
            await (anext(router.generate_stream(asked)) if is_streamed else router.generate(asked))
        return router.servers == (other,), served([other])

    assert asyncio.run(scenario()) == (True, [0])


def test_a_replica_whose_join_is_cancelled_gets_no_updates():
    async def scenario():
        first, late = FakeServer(), FakeServer()
        router = await started(first)
        await router.update_weights(FakeReceiver({}, 1), 1)
        joining = asyncio.create_task(router.add(late))  # it waits for the next update
        await asyncio.sleep(0.01)
        joining.cancel()
        await asyncio.wait([joining])
        await router.update_weights(FakeReceiver({}, 2), 2)
        return first.weight_version, router.servers == (first,), late._is_stopped

    assert asyncio.run(scenario()) == (2, True, True)


def test_who_waits_for_room_goes_to_a_replica_that_joins():
    async def scenario():
        busy, late = FakeServer(), FakeServer()
        router = Router([busy], max_in_flight=1)
        await router.start()
        await busy.pause("keep")
        tasks = [asyncio.create_task(router.generate(request(f"r{i}"))) for i in range(2)]
        await asyncio.sleep(0.01)
        await router.add(late)
        async with asyncio.timeout(10):
            output = await tasks[1]
        await busy.resume()
        await tasks[0]
        return output.request_id, served([busy, late])

    assert asyncio.run(scenario()) == ("r1", [1, 1])


@pytest.mark.promise("`health_check_s` notices a loss that no request has met")
@pytest.mark.process
def test_a_replica_that_fails_its_health_check_is_removed(monkeypatch):
    """Its connection stays open, as that of a process that hangs does."""
    monkeypatch.setattr("rl_rollout.http.http_server.GRACE_S", 0.0)

    async def scenario():
        is_over = asyncio.Event()

        async def answer_once(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            body = b'{"model": "m", "pid": 1, "capabilities": {}}'
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await is_over.wait()
            writer.close()

        listener = await asyncio.start_server(answer_once, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        other = FakeServer()
        router = Router([connect_server(url, timeout_s=0.2), other], health_check_s=0.01)
        await router.start()
        await until_async(lambda: len(router.servers) != 2)
        await router.stop()
        is_over.set()
        listener.close()
        assert router.servers == (other,)
        assert str(router.lost[0]) == f"{url}/health did not answer within 0.2 s"

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.promise("A router refuses beyond `max_waiting`")
def test_a_router_has_room_for_so_many_and_refuses_more():
    async def scenario():
        servers = [FakeServer(), FakeServer()]
        router = Router(servers, max_in_flight=2, max_waiting=3)
        await router.start()
        await router.pause("keep")
        tasks = [asyncio.create_task(router.generate(request(f"r{i}"))) for i in range(7)]
        await asyncio.sleep(0.01)
        with pytest.raises(OverloadedError, match="2 replicas are given 2 requests each, and 3 wait already"):
            await router.generate(request("more"))
        given = served(servers)
        await router.resume()
        return given, len(await asyncio.gather(*tasks)), len((await router.generate(request("more"))).token_ids)

    assert asyncio.run(scenario()) == ([2, 2], 7, 2)


@pytest.mark.process
def test_the_wait_for_a_replica_is_part_of_a_requests_time():
    async def scenario():
        server = FakeServer()
        router = Router([server], max_in_flight=1)
        await router.start()
        await router.pause("keep")
        first = asyncio.create_task(router.generate(request("first")))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestTimeoutError, match="'whole' got no replica in its time"):
            await router.generate(request("whole", timeout_s=0.05))
        with pytest.raises(RequestTimeoutError, match="'streamed' got no replica in its time"):
            await anext(router.generate_stream(request("streamed", timeout_s=0.05)))
        late = asyncio.create_task(router.generate(request("late", timeout_s=60.0)))
        await asyncio.sleep(0.1)
        await router.resume()
        await asyncio.gather(first, late)
        return server.requests[-1].timeout_s

    assert 59.0 < asyncio.run(scenario()) < 59.95


@pytest.mark.promise("and by prefix")
def test_a_known_prefix_is_followed_unless_its_holder_is_busy():
    placement = Placement()
    loads = {"a": 0, "b": 0}
    long = tuple(range(40))
    assert placement.choose(loads, long, None) == "a"
    loads["a"] = 3
    assert placement.choose(loads, (*long, 7, 8), None) == "a"  # two full blocks of 16 are known
    assert placement.choose(loads, (9, *long), None) == "b"  # another prefix: the least loaded
    loads["a"] = 9  # more than 8 above b
    assert placement.choose(loads, long, None) == "b"
    loads["a"] = 0
    loads["b"] = 5
    assert placement.choose(loads, long, None) == "b"  # whoever was asked last has it
    placement.forget_prefixes()
    assert placement.choose(loads, long, None) == "a"
    assert placement.choose({"b": 5}, long, "session") == "b"
    assert placement.choose(loads, (1,), "session") == "b"


@pytest.mark.parametrize("field", ["max_in_flight", "max_waiting", "health_check_s"])
def test_bad_settings(field):
    with pytest.raises(ConfigError, match=f"{field}=-1"):
        Router([FakeServer()], **{field: -1})


def test_the_conversation_unused_for_longest_is_forgotten_first(monkeypatch):
    monkeypatch.setattr("rl_rollout.router.MAX_SESSIONS", 2)
    placement = Placement()
    for session in ("first", "second", "first"):
        assert placement.choose({"a": 0, "b": 1}, (1,), session) == "a"
    assert placement.choose({"a": 1, "b": 0}, (1,), "third") == "b"
    loads = {"a": 1, "b": 0}
    assert placement.choose(loads, (1,), "first") == "a"
    assert placement.choose(loads, (1,), "second") == "b"
