"""What every rollout server must do, as tests. Public through `rl_rollout.testing`."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rl_rollout.errors import GenerationError, RequestError, ServerLostError, UnsupportedError, WeightUpdateError
from rl_rollout.types import FinishReason, GenerateRequest, SamplingParams, TokenChunk, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from torch import Tensor

    from rl_rollout.base import RolloutServer

    Update = Callable[["Served", Mapping[str, Tensor], int], Awaitable[None]]

T = TypeVar("T")

_ids = itertools.count()

TINY_ALPHABET = "0123456789+-*/=() \nabcdefghijklmnopqrstuvwxyz?.,:"
"""Characters of a tiny model's tokenizer, one token each, after `<pad>` (0), `<eos>` (1) and `<unk>` (2)."""
VOCAB_SIZE = 3 + len(TINY_ALPHABET)


async def update_in_process(served: Served, weights: Mapping[str, Tensor], version: int) -> None:
    """How a server that takes a receiver object is updated."""
    from rl_rollout.testing import FakeReceiver

    await served.server.update_weights(FakeReceiver(weights, version), version)


@dataclass(slots=True, kw_only=True)
class Served:
    """A started server, and what the suite must know of it.

    The suite takes the weights in `model_path` for those that the server was started with.
    """

    server: RolloutServer
    """Started."""
    run: Callable[[Any], Any]
    """Runs a coroutine on the server's event loop: `asyncio.Runner().run`."""
    model_path: str
    """A folder of `write_tiny_model`."""
    update: Update = update_in_process
    """Brings weights of a version into the server, or raises `WeightUpdateError`."""
    num_long: int = 200
    """Tokens of a request that still runs while something else is done: some tenths of a second."""
    max_model_len: int = 256
    """Longest prompt plus completion that the server takes."""
    api_token: str | None = None
    """What its HTTP endpoint asks for."""
    version: int = field(default=0)
    """Version that was installed last."""

    def request(self, prompt: tuple[int, ...] = (5, 6, 7), **params: Any) -> GenerateRequest:
        """A request with an id of its own that runs to its length."""
        params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
        return GenerateRequest(
            request_id=f"r{next(_ids)}", prompt_token_ids=prompt, sampling_params=SamplingParams(**params)
        )

    def generate(self, prompt: tuple[int, ...] = (5, 6, 7), **params: Any) -> TokenOutput:
        """Run one request."""
        return self.run(self.server.generate(self.request(prompt, **params)))

    def generate_all(self, requests: list[GenerateRequest]) -> list[TokenOutput]:
        """Run requests at the same time."""

        async def together() -> list[TokenOutput]:
            return await asyncio.gather(*map(self.server.generate, requests))

        return self.run(together())

    def install(self, weights: Mapping[str, Tensor]) -> int:
        """Install weights as the next version, and return it."""
        version = self.version + 1
        self.run(self.update(self, weights, version))
        self.version = version
        return version


def expect(error: type[Exception], call: Callable[[], Any], text: str = "") -> None:
    """See that `call` raises `error` with `text` in its message."""
    try:
        call()
    except error as found:
        if text in str(found):
            return
        raise AssertionError(f"{text!r} is not in {str(found)!r}") from found
    raise AssertionError(f"{error.__name__} was not raised")


def same_tokens(left: TokenOutput, right: TokenOutput) -> bool:
    """Whether two outputs agree: ids, reason, and log-probs within 1e-4."""
    is_close = all(abs(a - b) < 1e-4 for a, b in zip(left.logprobs, right.logprobs, strict=True))
    return is_close and (left.token_ids, left.finish_reason) == (right.token_ids, right.finish_reason)


def in_time(attempt: Callable[[], T], was_in_flight: Callable[[T], bool], num_attempts: int = 5) -> T:
    """What a call did to a request in flight. A quick server may end the request before it hears of the call: again."""
    for _ in range(num_attempts):
        if was_in_flight(found := attempt()):
            return found
    raise AssertionError(f"the request had ended before the call each of {num_attempts} times; the last: {found!r}")


class ServerConformance:
    """Inherit, and give a fixture `served` of module scope. Tests run in order and leave the first weights serving."""

    def test_start_again_tells_the_same_address(self, served: Served) -> None:
        address = served.run(served.server.start())
        assert served.run(served.server.start()) == address
        assert address.model
        assert address.pid > 0

    def test_every_token_has_a_logprob_and_a_version(self, served: Served) -> None:
        request = served.request(max_new_tokens=11, temperature=1.0)
        output = served.run(served.server.generate(request))
        assert output.request_id == request.request_id
        assert output.finish_reason is FinishReason.LENGTH
        assert len(output.token_ids) == len(output.logprobs) == 11
        assert all(x <= 0 for x in output.logprobs)
        assert output.weight_versions == (served.version,) * 11

    def test_greedy_is_repeatable_beside_any_neighbours(self, served: Served) -> None:
        alone = served.generate(max_new_tokens=20)
        requests = [served.request((5, 6, 7), max_new_tokens=20)]
        requests += [served.request(tuple(range(3, 5 + i)), max_new_tokens=3 + i, temperature=1.0) for i in range(20)]
        assert same_tokens(served.generate_all(requests)[0], alone)

    def test_a_seed_fixes_the_tokens_beside_any_neighbours(self, served: Served) -> None:
        if not served.server.capabilities.is_seeded:
            expect(UnsupportedError, lambda: served.generate(seed=1), "seed")
            return
        alone = [served.generate(max_new_tokens=20, temperature=1.0, seed=seed) for seed in (1, 2)]
        assert alone[0].token_ids != alone[1].token_ids
        requests = [served.request(max_new_tokens=20, temperature=1.0, seed=seed) for seed in (1, 2)]
        requests += [served.request((9,) * (i + 1), temperature=1.0) for i in range(10)]
        assert all(map(same_tokens, alone, served.generate_all(requests)[:2]))

    def test_a_group_without_seeds_differs(self, served: Served) -> None:
        outputs = served.generate_all([served.request(max_new_tokens=20, temperature=1.0) for _ in range(8)])
        assert len({output.token_ids for output in outputs}) == 8

    def test_a_stop_token_ends_the_output_and_is_its_last_token(self, served: Served) -> None:
        ids = served.generate(max_new_tokens=12).token_ids
        stop = ids[6]
        try:
            output = served.generate(max_new_tokens=12, stop_token_ids=(stop,))
        except UnsupportedError:  # of both together
            output = served.generate(max_new_tokens=12, stop_token_ids=(stop,), ignore_eos=False)
        assert output.token_ids == ids[: ids.index(stop) + 1]
        assert output.finish_reason is FinishReason.STOP

    def test_the_context_ends_a_request(self, served: Served) -> None:
        prompt = (5,) * (served.max_model_len - 10)
        output = served.generate(prompt, max_new_tokens=50)
        assert len(output.token_ids) == 10
        assert output.finish_reason is FinishReason.LENGTH

    def test_top_and_prompt_logprobs_are_those_of_the_drawn_tokens(self, served: Served) -> None:
        from dataclasses import replace

        prompt = (5, 6, 7, 8)
        plain = served.request(prompt, temperature=0.7, seed=None)
        if not served.server.capabilities.gives_top_logprobs:
            expect(UnsupportedError, lambda: served.run(served.server.generate(replace(plain, num_top_logprobs=2))))
        else:
            output = served.run(served.server.generate(replace(plain, num_top_logprobs=VOCAB_SIZE)))
            for token, logprob, top in zip(output.token_ids, output.logprobs, output.top_logprobs, strict=True):
                assert len(top) == VOCAB_SIZE
                assert [x for _, x in top] == sorted((x for _, x in top), reverse=True)
                assert abs(dict(top)[token] - logprob) < 1e-4
                assert abs(sum(math.exp(x) for _, x in top) - 1) < 1e-3  # all of the tiny vocabulary
        scoring = replace(served.request(prompt, max_new_tokens=1), returns_prompt_logprobs=True)
        if not served.server.capabilities.gives_prompt_logprobs:
            expect(UnsupportedError, lambda: served.run(served.server.generate(scoring)))
            return
        scores = served.run(served.server.generate(scoring)).prompt_logprobs
        # The last token of the prompt, had it been drawn.
        drawn = served.generate((5, 6), max_new_tokens=2, temperature=1.0)
        redrawn = replace(served.request((5, 6, *drawn.token_ids), max_new_tokens=1), returns_prompt_logprobs=True)
        found = served.run(served.server.generate(redrawn)).prompt_logprobs
        assert len(scores) == 3
        assert all(abs(a - b) < 1e-4 for a, b in zip(found[1:], drawn.logprobs, strict=True))

    def test_a_stream_adds_up_to_the_output(self, served: Served) -> None:
        from dataclasses import replace

        async def streamed(request: GenerateRequest) -> list[TokenChunk]:
            return [chunk async for chunk in served.server.generate_stream(request)]

        whole = served.generate(max_new_tokens=12)
        chunks = served.run(streamed(served.request(max_new_tokens=12)))
        assert tuple(i for chunk in chunks for i in chunk.token_ids) == whole.token_ids
        assert tuple(v for chunk in chunks for v in chunk.weight_versions) == whole.weight_versions
        assert sum(len(chunk.logprobs) for chunk in chunks) == 12
        assert [chunk.finish_reason for chunk in chunks] == [*[None] * (len(chunks) - 1), FinishReason.LENGTH]
        scoring = replace(served.request(), returns_prompt_logprobs=True)
        expect(RequestError, lambda: served.run(streamed(scoring)), "returns_prompt_logprobs")
        expect(RequestError, lambda: served.run(streamed(served.request(()))), "empty")

    def test_what_a_server_cannot_give_is_refused(self, served: Served) -> None:
        from dataclasses import replace

        can = served.server.capabilities
        if not can.gives_routed_experts:
            request = replace(served.request(), returns_routed_experts=True)
            expect(UnsupportedError, lambda: served.run(served.server.generate(request)), "routed_experts")
        if not can.has_adapters:
            request = replace(served.request(), adapter="mine")
            expect(UnsupportedError, lambda: served.run(served.server.generate(request)), "adapter")
        if not can.takes_images:
            request = replace(served.request(), images=("data:image/png;base64,AA==",))
            expect(UnsupportedError, lambda: served.run(served.server.generate(request)), "images")

    def test_a_bad_request_gets_an_error_and_others_an_answer(self, served: Served) -> None:
        good = served.generate()
        expect(RequestError, lambda: served.generate(()), "empty")
        expect(RequestError, lambda: served.generate((5,) * served.max_model_len), str(served.max_model_len))
        expect(RequestError, lambda: served.generate((5, 10**9)), str(10**9))
        expect(RequestError, lambda: served.generate(temperature=-1.0), "temperature")
        expect(RequestError, lambda: served.generate(top_p=0.0), "top_p")
        expect(RequestError, lambda: served.generate(max_new_tokens=0), "max_new_tokens")
        assert same_tokens(served.generate(), good)

    def test_abort_returns_what_there_is_and_it_can_be_resumed(self, served: Served) -> None:
        whole = served.generate((5,), max_new_tokens=served.num_long)
        part = in_time(lambda: served.run(self._aborted(served)), lambda part: part.finish_reason is FinishReason.ABORT)
        done = part.token_ids
        assert done == whole.token_ids[: len(done)]
        assert len(part.logprobs) == len(part.weight_versions) == len(done)
        rest = served.generate((5, *done), max_new_tokens=served.num_long - len(done))
        assert done + rest.token_ids == whole.token_ids

    async def _aborted(self, served: Served) -> TokenOutput:
        request = served.request((5,), max_new_tokens=served.num_long)
        task = asyncio.create_task(served.server.generate(request))
        await asyncio.sleep(0.05)
        await served.server.pause("keep")
        await served.server.abort([request.request_id, "nobody"])
        await served.server.resume()
        return await task

    def test_pause_keep_freezes_and_holds(self, served: Served) -> None:
        async def scenario() -> tuple[bool, bool, tuple[TokenOutput, TokenOutput]]:
            first = asyncio.create_task(served.server.generate(served.request((5,), max_new_tokens=served.num_long)))
            await asyncio.sleep(0.03)
            await served.server.pause("keep")
            second = asyncio.create_task(served.server.generate(served.request((6,))))
            await asyncio.sleep(0.2)
            states = first.done(), second.done()
            await served.server.resume()
            return *states, await asyncio.gather(first, second)

        _, second_done, outputs = in_time(lambda: served.run(scenario()), lambda found: not found[0])
        assert not second_done
        assert same_tokens(outputs[0], served.generate((5,), max_new_tokens=served.num_long))
        assert same_tokens(outputs[1], served.generate((6,)))

    def test_pause_wait_lets_requests_in_flight_finish(self, served: Served) -> None:
        async def scenario() -> tuple[bool, bool, TokenOutput]:
            first = asyncio.create_task(served.server.generate(served.request((5,), max_new_tokens=served.num_long)))
            await asyncio.sleep(0.03)
            await served.server.pause("wait")
            second = asyncio.create_task(served.server.generate(served.request((6,))))
            await asyncio.sleep(0.1)
            states = first.done(), second.done()
            await served.server.resume()
            await second
            return *states, await first

        first_done, second_done, output = served.run(scenario())
        assert (first_done, second_done) == (True, False)
        assert len(output.token_ids) == served.num_long

    def test_pause_abort_ends_requests_in_flight(self, served: Served) -> None:
        async def scenario() -> TokenOutput:
            task = asyncio.create_task(served.server.generate(served.request((5,), max_new_tokens=served.num_long)))
            await asyncio.sleep(0.03)
            await served.server.pause("abort")
            output = await task
            await served.server.resume()
            return output

        in_time(lambda: served.run(scenario()), lambda output: output.finish_reason is FinishReason.ABORT)

    def test_new_weights_change_the_output_and_the_version(self, served: Served) -> None:
        from rl_rollout.testing import load_weights

        old_weights = load_weights(served.model_path)
        old = served.generate(max_new_tokens=20)
        version = served.install(_other(old_weights))
        new = served.generate(max_new_tokens=20)
        assert new.token_ids != old.token_ids
        assert new.weight_versions == (version,) * 20
        served.install(old_weights)
        assert same_tokens(served.generate(max_new_tokens=20), old)

    def test_a_request_in_flight_goes_on_under_new_weights(self, served: Served) -> None:
        from rl_rollout.testing import load_weights

        weights = load_weights(served.model_path)

        async def scenario(version: int) -> TokenOutput:
            task = asyncio.create_task(served.server.generate(served.request((5,), max_new_tokens=served.num_long)))
            await asyncio.sleep(0.05)
            await served.server.pause("keep")
            await served.update(served, _other(weights), version)
            await served.server.resume()
            return await task

        def attempt() -> TokenOutput:
            served.install(weights)
            output = served.run(scenario(served.version + 1))
            served.version += 1
            return output

        output = in_time(attempt, lambda output: output.weight_versions[-1] == served.version)
        versions, version = output.weight_versions, served.version - 1
        assert sorted(versions) == list(versions)
        assert set(versions) <= {version, version + 1}
        # What follows the swap is what the new weights say after this context: old keys and values are gone.
        num_old = versions.count(version)
        rest = served.generate((5, *output.token_ids[:num_old]), max_new_tokens=served.num_long - num_old)
        assert rest.token_ids == output.token_ids[num_old:]
        served.install(weights)

    def test_a_failed_update_leaves_the_old_version_serving(self, served: Served) -> None:
        from rl_rollout.testing import load_weights

        weights = load_weights(served.model_path)
        old = served.generate(max_new_tokens=20)
        name = next(iter(weights))
        others = _other(weights)
        without = {key: value for key, value in others.items() if key != name}
        bads = [{**others, "no.such.weight": others[name]}, {**others, name: others[name][..., :1]}]
        for bad in (without, *bads):
            expect(WeightUpdateError, lambda bad=bad: served.install(bad), "still serves")
            # A version number that failed is spent: a sender never goes back.
            served.version += 1
            output = served.generate(max_new_tokens=20)
            assert same_tokens(output, old)
            assert output.weight_versions == old.weight_versions
        served.install(weights)

    def test_weights_that_are_not_numbers_fail_their_requests(self, served: Served) -> None:
        """No token is made up from logits that are not finite, and the server is there for the next weights."""
        import torch

        from rl_rollout.testing import load_weights

        weights = load_weights(served.model_path)
        old = served.generate(max_new_tokens=20)
        served.install({**weights, "model.norm.weight": torch.full_like(weights["model.norm.weight"], math.nan)})
        for temperature in (0.0, 1.0):
            expect(GenerationError, lambda t=temperature: served.generate(temperature=t), "not finite")
        served.install(weights)
        assert same_tokens(served.generate(max_new_tokens=20), old)

    def test_sleep_gives_back_the_cache_and_loses_nothing(self, served: Served) -> None:
        if 1 not in served.server.capabilities.sleep_levels:
            expect(UnsupportedError, lambda: served.run(served.server.sleep(1)), "level 1")
            assert served.generate().token_ids
            return
        whole = served.generate((5,), max_new_tokens=served.num_long)

        async def scenario() -> tuple[bool, TokenOutput]:
            task = asyncio.create_task(served.server.generate(served.request((5,), max_new_tokens=served.num_long)))
            await asyncio.sleep(0.05)
            await served.server.sleep(1)
            await asyncio.sleep(0.1)
            is_done = task.done()
            await served.server.wake()
            return is_done, await task

        is_done, output = served.run(scenario())
        assert not is_done
        assert same_tokens(output, whole)

    def test_after_sleep_2_the_server_refuses_until_an_update(self, served: Served) -> None:
        from rl_rollout.testing import load_weights

        if 2 not in served.server.capabilities.sleep_levels:
            expect(UnsupportedError, lambda: served.run(served.server.sleep(2)), "level 2")
            return
        old = served.generate(max_new_tokens=20)
        served.run(served.server.sleep(2))
        served.run(served.server.wake())
        expect(WeightUpdateError, served.generate)
        served.install(load_weights(served.model_path))
        assert same_tokens(served.generate(max_new_tokens=20), old)

    def test_http_endpoint(self, served: Served) -> None:
        address = served.run(served.server.start())
        if not address.url.startswith("http"):
            return
        health = served.run(_http(f"{address.url}/health", served.api_token))
        assert health["model"] == address.model
        message = {"prompt_token_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        answer = served.run(_http(f"{address.url}/generate", served.api_token, message))
        assert tuple(answer["token_ids"]) == served.generate(max_new_tokens=4).token_ids

    def test_stop_ends_it(self, served: Served) -> None:
        """Last: nothing can be asked of the server afterwards."""
        served.run(served.server.stop())
        served.run(served.server.stop())
        expect(ServerLostError, served.generate)


def _other(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Different weights of the same names and shapes."""
    return {name: (tensor.roll(1, dims=0) if tensor.ndim > 1 else tensor.clone()) for name, tensor in weights.items()}


async def _http(url: str, api_token: str | None, message: Any = None) -> Any:
    """GET, or POST a JSON message, without any client library of ours."""
    data = None if message is None else json.dumps(message).encode()
    headers = {"Authorization": f"Bearer {api_token}"} if api_token else {}

    def call() -> Any:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=30) as answer:
            return json.load(answer)

    return await asyncio.to_thread(call)
