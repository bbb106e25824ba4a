"""Conformance suite of rollout servers. Public through `rl_rollout.testing`."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import urllib.request
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rl_rollout.errors import (
    GenerationError,
    RequestError,
    RequestTimeoutError,
    ServerLostError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_rollout.testing.tiny_models import VOCAB_SIZE, load_weights
from rl_rollout.types import FinishReason, GenerateRequest, SamplingParams, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from torch import Tensor

    from rl_rollout.base import RolloutServer
    from rl_rollout.types import TokenChunk

    Update = Callable[["Served", Mapping[str, Tensor], int], Awaitable[None]]


_ids = itertools.count()


async def update_in_process(served: Served, weights: Mapping[str, Tensor], version: int) -> None:
    """Update a server in this process, by a receiver object."""
    from rl_rollout.testing.fake import FakeReceiver

    await served.server.update_weights(FakeReceiver(weights, version), version)


@dataclass(slots=True, kw_only=True)
class Served:
    """Server under test, and how the suite reaches it.

    The suite takes the weights in `model_path` for those that the server was started with.
    """

    server: RolloutServer
    """The started server."""
    run: Callable[[Any], Any]
    """Function that runs a coroutine on the server's event loop: `asyncio.Runner().run`."""
    model_path: str
    """Model folder of `write_tiny_model`."""
    update: Update = update_in_process
    """Function that installs weights as a version, or raises `WeightUpdateError`."""
    max_model_len: int
    """Longest prompt plus completion that the server takes; a request that fills it must run for seconds."""
    api_token: str | None = None
    """Bearer token of its HTTP endpoint."""
    version: int = field(default=0)
    """Weight version that was installed last."""

    def request(self, prompt: tuple[int, ...] = (5, 6, 7), **params: Any) -> GenerateRequest:
        """Request with a fresh id that runs to its length."""
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
        """Install weights as the next version; returns the version."""
        version = self.version + 1
        self.run(self.update(self, weights, version))
        self.version = version
        return version


def expect(error: type[Exception], call: Callable[[], Any], text: str = "") -> None:
    """Check that `call` raises `error` with `text` in its message."""
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


T = TypeVar("T")

NUM_SOME = 500
"""New tokens of a request that finishes soon."""


class InFlight:
    """Request in flight that fills the context, so that it runs for seconds.

    Args:
        served: Server under test.
        request_id: Its id; None: one of its own.
    """

    def __init__(self, served: Served, request_id: str | None = None) -> None:
        self._served = served
        request = served.request((5,), max_new_tokens=served.max_model_len - 1)
        self.request: GenerateRequest = replace(request, request_id=request_id or request.request_id)
        self.task = asyncio.create_task(served.server.generate(self.request))

    async def proceed(self) -> None:
        """Wait until it has new tokens: until a later request has its answer."""
        await asyncio.sleep(0)
        await self._served.server.generate(self._served.request((6,)))

    async def end(self) -> TokenOutput:
        """Abort it; returns its output."""
        assert not self.task.done() or not was_aborted(self.task.result()), (
            "what was to leave a request in flight aborted it"
        )
        await self._served.server.abort([self.request.request_id, "nobody"])
        return await self.task


def in_time(attempt: Callable[[], T], was_in_flight: Callable[[T], bool], num_attempts: int = 5) -> T:
    """Result of `attempt`, repeated until its request was still in flight at the call under test."""
    found = None
    for _ in range(num_attempts):
        if was_in_flight(found := attempt()):
            return found
    raise AssertionError(f"the request had ended before the call each of {num_attempts} times; the last: {found!r}")


def was_aborted(output: TokenOutput) -> bool:
    """Whether the request of an output was aborted, and so in flight until then."""
    return output.finish_reason is FinishReason.ABORT


def check_beginning(served: Served, part: TokenOutput) -> None:
    """Check that an output is a prefix of what the served weights generate."""
    assert part.token_ids
    assert len(part.logprobs) == len(part.weight_versions) == len(part.token_ids)
    whole = served.generate((5,), max_new_tokens=len(part.token_ids))
    assert part.token_ids == whole.token_ids
    assert all(abs(a - b) < 1e-4 for a, b in zip(part.logprobs, whole.logprobs, strict=True))


class ControlConformance:
    """Tests of abort, pause, weight updates and sleep."""

    def test_abort_returns_what_there_is_and_it_can_be_resumed(self, served: Served) -> None:
        async def scenario() -> TokenOutput:
            going = InFlight(served)
            await going.proceed()
            return await going.end()

        part = in_time(lambda: served.run(scenario()), was_aborted)
        check_beginning(served, part)
        done = part.token_ids
        rest = served.generate((5, *done), max_new_tokens=20)
        assert done + rest.token_ids == served.generate((5,), max_new_tokens=len(done) + 20).token_ids

    def test_abort_without_ids_ends_everything(self, served: Served) -> None:
        async def scenario() -> TokenOutput:
            going = InFlight(served)
            await going.proceed()
            await served.server.abort()
            return await going.task

        check_beginning(served, in_time(lambda: served.run(scenario()), was_aborted))

    def test_an_abort_is_of_no_other_id_that_begins_alike(self, served: Served) -> None:
        async def scenario() -> TokenOutput:
            going = InFlight(served)
            other = InFlight(served, request_id=f"{going.request.request_id}-on")
            await other.proceed()
            await going.end()
            await other.proceed()
            return await other.end()

        check_beginning(served, in_time(lambda: served.run(scenario()), was_aborted))

    def test_an_id_in_flight_is_refused(self, served: Served) -> None:
        async def scenario() -> tuple[TokenOutput | BaseException, TokenOutput]:
            going = InFlight(served)
            await going.proceed()
            same_id = replace(served.request(), request_id=going.request.request_id)
            (second,) = await asyncio.gather(served.server.generate(same_id), return_exceptions=True)
            return second, await going.end()

        second, first = in_time(lambda: served.run(scenario()), lambda found: was_aborted(found[1]))
        assert isinstance(second, RequestError), f"a second request of an id in flight got {second!r}"
        check_beginning(served, first)

    def test_a_request_that_is_late_or_left_is_over_and_its_id_free(self, served: Served) -> None:
        late = replace(served.request((5,), max_new_tokens=served.max_model_len - 1), timeout_s=0.2)

        async def wait() -> TokenOutput | BaseException:
            return (await asyncio.gather(served.server.generate(late), return_exceptions=True))[0]

        found = served.run(wait())
        if isinstance(found, RequestTimeoutError):  # before its first token
            assert "timeout_s" in str(found), f"the error names no setting: {found}"
        else:
            assert isinstance(found, TokenOutput), f"a late request got {found!r}"
            assert found.finish_reason is FinishReason.TIMEOUT, f"a late request ended with {found.finish_reason}"
            check_beginning(served, found)

        async def leave() -> str:
            going = InFlight(served)
            await going.proceed()
            going.task.cancel()
            await asyncio.wait([going.task])
            return going.request.request_id

        for request_id in (late.request_id, served.run(leave())):
            again = served.run(served.server.generate(replace(served.request(), request_id=request_id)))
            assert same_tokens(again, served.generate())

    def test_a_control_call_may_be_left(self, served: Served) -> None:
        async def scenario() -> TokenOutput:
            going = InFlight(served)
            await going.proceed()
            left = asyncio.create_task(served.server.abort(["nobody"]))
            await asyncio.sleep(0)  # it has begun
            left.cancel()
            await asyncio.wait([left])
            await going.proceed()
            return await going.end()

        check_beginning(served, in_time(lambda: served.run(scenario()), was_aborted))

    def test_pause_keep_freezes_and_holds(self, served: Served) -> None:
        async def scenario() -> tuple[bool, TokenOutput, TokenOutput]:
            going = InFlight(served)
            await going.proceed()
            await served.server.pause("keep")
            second = asyncio.create_task(served.server.generate(served.request((6,))))
            await asyncio.sleep(0.2)
            is_held = not second.done()
            await served.server.resume()
            await going.proceed()
            return is_held, await going.end(), await second

        is_held, part, second = in_time(lambda: served.run(scenario()), lambda found: was_aborted(found[1]))
        assert is_held
        check_beginning(served, part)
        assert same_tokens(second, served.generate((6,)))

    def test_pause_wait_lets_requests_in_flight_finish(self, served: Served) -> None:
        async def scenario() -> tuple[bool, bool, bool, TokenOutput]:
            first = asyncio.create_task(served.server.generate(served.request((5,), max_new_tokens=NUM_SOME)))
            await asyncio.sleep(0)
            await served.server.generate(served.request((6,), max_new_tokens=1))
            was_in_flight = not first.done()
            await served.server.pause("wait")
            second = asyncio.create_task(served.server.generate(served.request((6,))))
            await asyncio.sleep(0.1)
            states = first.done(), second.done()
            await served.server.resume()
            await second
            return was_in_flight, *states, await first

        _, first_done, second_done, output = in_time(lambda: served.run(scenario()), lambda found: found[0])
        assert (first_done, second_done) == (True, False)
        assert len(output.token_ids) == NUM_SOME

    def test_pause_abort_ends_requests_in_flight(self, served: Served) -> None:
        async def scenario() -> TokenOutput:
            going = InFlight(served)
            await going.proceed()
            await served.server.pause("abort")
            output = await going.task
            await served.server.resume()
            return output

        check_beginning(served, in_time(lambda: served.run(scenario()), was_aborted))

    def test_new_weights_change_the_output_and_the_version(self, served: Served) -> None:

        prompt = (*range(3, VOCAB_SIZE),) * 2  # blocks of a cache that may be found again
        old_weights = load_weights(served.model_path)
        old = served.generate(prompt, max_new_tokens=20)
        version = served.install(other_weights(old_weights))
        new = served.generate(prompt, max_new_tokens=20)
        assert new.token_ids != old.token_ids
        assert new.weight_versions == (version,) * 20
        if served.server.capabilities.gives_prompt_logprobs:  # computed anew: nothing of the old weights is left
            whole = served.request((*prompt, *new.token_ids), max_new_tokens=1)
            scores = served.run(served.server.generate(replace(whole, returns_prompt_logprobs=True))).prompt_logprobs
            assert all(abs(a - b) < 1e-4 for a, b in zip(scores[len(prompt) - 1 :], new.logprobs, strict=True))
        served.install(old_weights)
        assert same_tokens(served.generate(prompt, max_new_tokens=20), old)

    def test_a_request_in_flight_goes_on_under_new_weights(self, served: Served) -> None:

        weights = load_weights(served.model_path)

        async def scenario(version: int) -> TokenOutput:
            going = InFlight(served)
            await going.proceed()
            await served.server.pause("keep")
            await served.update(served, other_weights(weights), version)
            await served.server.resume()
            await going.proceed()
            return await going.end()

        def attempt() -> TokenOutput:
            served.install(weights)
            output = served.run(scenario(served.version + 1))
            served.version += 1
            return output

        output = in_time(attempt, was_aborted)
        versions, version = output.weight_versions, served.version - 1
        num_old = versions.count(version)
        num_new = len(versions) - num_old
        assert num_old > 0
        assert num_new > 0
        assert versions == (version,) * num_old + (version + 1,) * num_new
        # What follows the swap is what the new weights say after this context: old keys and values are gone.
        rest = served.generate((5, *output.token_ids[:num_old]), max_new_tokens=num_new)
        assert rest.token_ids == output.token_ids[num_old:]
        served.install(weights)
        check_beginning(served, first_tokens(output, num_old))

    def test_a_failed_update_leaves_the_old_version_serving(self, served: Served) -> None:

        weights = load_weights(served.model_path)
        old = served.generate(max_new_tokens=20)
        name = next(iter(weights))
        others = other_weights(weights)
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
        """Logits that are not finite give an error, and the server takes the next weights."""
        import torch

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

        async def scenario() -> TokenOutput:
            going = InFlight(served)
            await going.proceed()
            await served.server.sleep(1)
            await asyncio.sleep(0.1)
            await served.server.wake()
            await going.proceed()
            return await going.end()

        check_beginning(served, in_time(lambda: served.run(scenario()), was_aborted))

    def test_after_sleep_2_the_server_refuses_until_an_update(self, served: Served) -> None:

        if 2 not in served.server.capabilities.sleep_levels:
            expect(UnsupportedError, lambda: served.run(served.server.sleep(2)), "level 2")
            return
        old = served.generate(max_new_tokens=20)
        served.run(served.server.sleep(2))
        served.run(served.server.wake())
        expect(WeightUpdateError, served.generate)
        served.install(load_weights(served.model_path))
        assert same_tokens(served.generate(max_new_tokens=20), old)


def first_tokens(output: TokenOutput, count: int) -> TokenOutput:
    """First tokens of an output."""
    return replace(
        output,
        token_ids=output.token_ids[:count],
        logprobs=output.logprobs[:count],
        weight_versions=output.weight_versions[:count],
    )


def other_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Different weights of the same names and shapes."""
    return {name: (tensor.roll(1, dims=0) if tensor.ndim > 1 else tensor.clone()) for name, tensor in weights.items()}


class GenerationConformance:
    """Tests of generation, of batch neighbours, and of refused requests."""

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

    def test_greedy_is_repeatable_with_any_neighbours(self, served: Served) -> None:
        alone = served.generate(max_new_tokens=20)
        requests = [served.request((5, 6, 7), max_new_tokens=20)]
        requests += [served.request(tuple(range(3, 5 + i)), max_new_tokens=3 + i, temperature=1.0) for i in range(20)]
        assert same_tokens(served.generate_all(requests)[0], alone)

    def test_a_seed_fixes_the_tokens_with_any_neighbours(self, served: Served) -> None:
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

    def test_logprobs_are_of_the_distribution_that_was_sampled_from(self, served: Served) -> None:
        """Log-probs under temperature, top-k and top-p are those that transformers computes."""
        import torch
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(served.model_path, trust_remote_code=False).eval()
        prompt = (5, 6, 7)
        for top_k, top_p in ((0, 1.0), (20, 1.0), (0, 0.9), (20, 0.9)):
            try:
                output = served.generate(prompt, temperature=0.7, top_k=top_k, top_p=top_p, max_new_tokens=60)
            except UnsupportedError:
                continue
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
            ordered, order = (logits / 0.7).sort(dim=-1, descending=True)
            if top_k:
                ordered[:, top_k:] = -math.inf
            if top_p < 1:
                probs = ordered.softmax(-1)
                ordered[probs.cumsum(-1) - probs >= top_p] = -math.inf
            place = order.argsort(-1).gather(-1, torch.tensor(output.token_ids)[:, None])
            wanted = ordered.log_softmax(-1).gather(-1, place)[:, 0]
            torch.testing.assert_close(torch.tensor(output.logprobs), wanted, atol=1e-4, rtol=0)

    def test_penalties_and_min_p_are_in_the_logprobs(self, served: Served) -> None:
        """Penalties of what prompt and completion have, then the temperature, then min-p (2407.01082)."""
        import torch
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(served.model_path, trust_remote_code=False).eval()
        prompt, settings = (5, 6, 7), {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.3}
        try:
            output = served.generate(
                prompt, temperature=0.7, min_p=0.05, max_new_tokens=40, ignore_eos=True, **settings
            )
        except UnsupportedError:
            return
        ids = (*prompt, *output.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        for step, row in enumerate(logits):
            for token in set(ids[: len(prompt) + step]):
                row[token] *= 1 / 1.3 if row[token] > 0 else 1.3
            for token in set(output.token_ids[:step]):
                row[token] -= 0.4 + 0.3 * output.token_ids[:step].count(token)
        probs = (logits / 0.7).softmax(-1)
        probs[probs < 0.05 * probs.amax(-1, keepdim=True)] = 0.0
        wanted = (probs / probs.sum(-1, keepdim=True)).log().gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs), wanted, atol=1e-4, rtol=0)

    def test_a_structured_output_is_one_of_the_choices(self, served: Served) -> None:
        """Log-probs are the model's where the server says so; restricted ones are of fewer tokens, so not lower."""
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(served.model_path)
        asked: dict[str, Any] = {
            "choice": ("abc", "bc", "cab"),
            "ignore_eos": False,
            "temperature": 1.0,
            "max_new_tokens": 12,
        }
        if served.server.capabilities.structured == "none":
            expect(UnsupportedError, lambda: served.generate(**asked), "structured output")
            return
        output = served.generate((5, 6, 7), **asked)
        assert tokenizer.decode(output.token_ids, skip_special_tokens=True) in asked["choice"]
        scoring = served.request((5, 6, 7, *output.token_ids), max_new_tokens=1)
        prompt_logprobs = served.run(
            served.server.generate(replace(scoring, returns_prompt_logprobs=True))
        ).prompt_logprobs
        for logprob, of_model in zip(output.logprobs, prompt_logprobs[-len(output.token_ids) :], strict=True):
            is_equal = abs(logprob - of_model) < 1e-3
            assert is_equal or (served.server.capabilities.structured == "restricted" and logprob > of_model)

    def test_top_and_prompt_logprobs_are_those_of_the_drawn_tokens(self, served: Served) -> None:
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
        expect(RequestError, lambda: served.generate(repetition_penalty=0.0), "repetition_penalty")
        expect(RequestError, lambda: served.generate(max_new_tokens=0), "max_new_tokens")
        assert same_tokens(served.generate(), good)


class ServerConformance(ControlConformance, GenerationConformance):
    """Conformance suite: inherit it, and define a fixture `served` of module scope. Tests run in order."""

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
        """Runs last, as it stops the server."""
        served.run(served.server.stop())
        served.run(served.server.stop())
        expect(ServerLostError, served.generate)


async def _http(url: str, api_token: str | None, message: Any = None) -> Any:
    """Send a GET, or a POST with a JSON body, without our own client."""
    data = None if message is None else json.dumps(message).encode()
    headers = {"Authorization": f"Bearer {api_token}"} if api_token else {}

    def call() -> Any:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=30) as answer:
            return json.load(answer)

    return await asyncio.to_thread(call)
