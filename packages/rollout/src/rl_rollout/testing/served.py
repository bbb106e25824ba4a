"""A server under test, and what the conformance suite asks it for. Public through `rl_rollout.testing.fake`."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_rollout.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from torch import Tensor

    from rl_rollout.base import RolloutServer
    from rl_rollout.types import TokenOutput

    Update = Callable[["Served", Mapping[str, Tensor], int], Awaitable[None]]

_ids = itertools.count()

TINY_ALPHABET = "0123456789+-*/=() \nabcdefghijklmnopqrstuvwxyz?.,:"
"""Characters of a tiny model's tokenizer, one token each, after `<pad>` (0), `<eos>` (1) and `<unk>` (2)."""
VOCAB_SIZE = 3 + len(TINY_ALPHABET)


async def update_in_process(served: Served, weights: Mapping[str, Tensor], version: int) -> None:
    """How a server that takes a receiver object is updated."""
    from rl_rollout.testing.fake import FakeReceiver

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
    max_model_len: int
    """Longest prompt plus completion that the server takes; a request that fills it must run for seconds."""
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
