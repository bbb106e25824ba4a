"""What a server must do with requests in flight when it is paused, updated, or put to sleep, as tests.

Nothing here depends on how quick a server is: a request that is to be in flight fills the whole context, has its first
tokens before anything is done to it, and is aborted in the end. What came of it is the beginning of its output.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from rl_rollout.errors import (
    GenerationError,
    RequestError,
    RequestTimeoutError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_rollout.testing.served import VOCAB_SIZE, expect, same_tokens
from rl_rollout.types import FinishReason, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from rl_rollout.testing.served import Served
    from rl_rollout.types import GenerateRequest

T = TypeVar("T")

NUM_SOME = 500
"""Tokens of a request that is let finish."""


class InFlight:
    """A request that fills the context.

    Args:
        served: Who generates.
        request_id: Its id; None: one of its own.
    """

    def __init__(self, served: Served, request_id: str | None = None) -> None:
        self._served = served
        request = served.request((5,), max_new_tokens=served.max_model_len - 1)
        self.request: GenerateRequest = replace(request, request_id=request_id or request.request_id)
        self.task = asyncio.create_task(served.server.generate(self.request))

    async def proceed(self) -> None:
        """Return when it has new tokens: when a request that is asked later has its answer."""
        await asyncio.sleep(0)
        await self._served.server.generate(self._served.request((6,)))

    async def end(self) -> TokenOutput:
        """Abort it, as nobody did before; what it has."""
        assert not self.task.done() or not was_aborted(self.task.result()), (
            "what was to leave a request in flight aborted it"
        )
        await self._served.server.abort([self.request.request_id, "nobody"])
        return await self.task


def in_time(attempt: Callable[[], T], was_in_flight: Callable[[T], bool], num_attempts: int = 5) -> T:
    """What a call did to a request in flight; again, should it have ended while this process stood still."""
    found = None
    for _ in range(num_attempts):
        if was_in_flight(found := attempt()):
            return found
    raise AssertionError(f"the request had ended before the call each of {num_attempts} times; the last: {found!r}")


def was_aborted(output: TokenOutput) -> bool:
    """Whether it was in flight to the end."""
    return output.finish_reason is FinishReason.ABORT


def check_beginning(served: Served, part: TokenOutput) -> None:
    """See that what an `InFlight` came to is the beginning of what the served weights say."""
    assert part.token_ids
    assert len(part.logprobs) == len(part.weight_versions) == len(part.token_ids)
    whole = served.generate((5,), max_new_tokens=len(part.token_ids))
    assert part.token_ids == whole.token_ids
    assert all(abs(a - b) < 1e-4 for a, b in zip(part.logprobs, whole.logprobs, strict=True))


class ControlConformance:
    """Aborts, pauses, weight updates, sleep."""

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
        from rl_rollout.testing.tiny_models import load_weights

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
        from rl_rollout.testing.tiny_models import load_weights

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
        from rl_rollout.testing.tiny_models import load_weights

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
        """No token is made up from logits that are not finite, and the server is there for the next weights."""
        import torch

        from rl_rollout.testing.tiny_models import load_weights

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
        from rl_rollout.testing.tiny_models import load_weights

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
    """The beginning of an output."""
    return replace(
        output,
        token_ids=output.token_ids[:count],
        logprobs=output.logprobs[:count],
        weight_versions=output.weight_versions[:count],
    )


def other_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Different weights of the same names and shapes."""
    return {name: (tensor.roll(1, dims=0) if tensor.ndim > 1 else tensor.clone()) for name, tensor in weights.items()}
