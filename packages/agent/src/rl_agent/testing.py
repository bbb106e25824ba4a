"""Test kit: a tokenizer and a server in memory, and the conformance suite that every agent loop must pass.

A loop's own test file subclasses the suite; pytest finds the tests:

    class TestMyLoop(AgentLoopConformance):
        def make_loop(self, server, tokenizer):
            return MyLoop(server, tokenizer)
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

from rl_agent.errors import RowError
from rl_agent.types import AgentLoopOutput
from rl_agent.validation import validate_output
from rl_rollout.errors import RequestError, ServerLostError
from rl_rollout.types import FinishReason, GenerateRequest, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_agent.base import AgentLoop, Generator
    from rl_agent.types import Message, Tokenizer


class FakeTokenizer:
    """Fake tokenizer: one token per character (its code point plus 3), and a ChatML-like append-only template.

    Special ids: 0 `<|im_start|>`, 1 `<|im_end|>` (end of sequence), 2 padding. Tool calls are rendered as Hermes does.
    """

    eos_token_id = 1
    """Id of the token that ends a turn."""
    all_special_tokens = ("<|im_start|>", "<|im_end|>", "<|pad|>")
    """Special tokens."""
    all_special_ids = (0, 1, 2)
    """Ids of the special tokens."""
    image = "\ue000"
    """Image placeholder."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`: of its characters, and of the special tokens that it spells out."""
        parts = re.split(r"(<\|im_start\|>|<\|im_end\|>|<\|pad\|>)", text)
        specials = self.all_special_tokens
        return [i for p in parts for i in ([specials.index(p)] if p in specials else (ord(c) + 3 for c in p))]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`."""
        specials = self.all_special_tokens
        return "".join(chr(i - 3) if i >= 3 else "" if skip_special_tokens else specials[i] for i in token_ids)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """`<|im_start|>role`, a new line, `content<|im_end|>` and a new line for each message; tools come first."""
        messages = list(conversation)
        if tools:
            messages.insert(0, {"role": "system", "content": "\n".join(json.dumps(tool) for tool in tools)})
        text = ""
        for message in messages:
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            content = message["content"]
            if not isinstance(content, str):
                content = "".join(self.image if part["type"] == "image" else part["text"] for part in content)
            body = content + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
            text += f"<|im_start|>{message['role']}\n{body}<|im_end|>\n"
        text += "<|im_start|>assistant\n" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text


class FakeGenerator:
    """Fake server in memory, which answers by a function.

    Args:
        reply: Gives the completion's ids for a request, or raises what the server should raise. The answer is cut at
            the request's `max_new_tokens`. The default answers `ok` and the end of sequence.
        delay_s: Duration of every generation, seconds.
        weight_version: Weight version of every token; may be changed at any time.
    """

    def __init__(
        self,
        reply: Callable[[GenerateRequest], Sequence[int]] | None = None,
        *,
        delay_s: float = 0.0,
        weight_version: int = 0,
    ) -> None:
        self._reply = reply or _say_ok
        self._delay_s = delay_s
        self.weight_version = weight_version
        """Weight version of the tokens generated from now on."""
        self.requests: list[GenerateRequest] = []
        """Requests in the order of arrival."""
        self.outputs: list[TokenOutput] = []
        """Outputs in the order in which they were returned."""
        self.num_running = 0
        """Number of generations in flight."""
        self.max_running = 0
        """Most generations that were ever in flight."""
        self.started = asyncio.Event()
        """Set when the first generation starts."""
        self._in_flight: set[str] = set()

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Generate after the delay. The log-prob of token i is -(i + 1) / 64.

        Raises:
            RequestError: the request's id is in flight already.
        """
        if request.request_id in self._in_flight:
            raise RequestError(f"request id {request.request_id!r} is in flight already")
        self._in_flight.add(request.request_id)
        self.requests.append(request)
        self.started.set()
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await asyncio.sleep(self._delay_s)
            ids = tuple(self._reply(request))
        finally:
            self.num_running -= 1
            self._in_flight.discard(request.request_id)
        limit = request.sampling_params.max_new_tokens
        output = TokenOutput(
            request_id=request.request_id,
            token_ids=ids[:limit],
            logprobs=tuple(-(i + 1) / 64 for i in range(len(ids[:limit]))),
            weight_versions=(self.weight_version,) * len(ids[:limit]),
            finish_reason=FinishReason.LENGTH if len(ids) > limit else FinishReason.STOP,
        )
        self.outputs.append(output)
        return output


def _say_ok(_: GenerateRequest) -> Sequence[int]:
    return [*FakeTokenizer().encode("ok"), FakeTokenizer.eos_token_id]


class AgentLoopConformance:
    """Conformance suite of agent loops: subclass it, and define how a loop is made."""

    sampling_params: dict[str, Any] = {"max_new_tokens": 64}  # noqa: RUF012 - a test class's constant
    """Sampling parameters of every run."""

    def make_loop(self, server: Generator, tokenizer: Tokenizer) -> AgentLoop:
        """Create the loop under test."""
        raise NotImplementedError

    def make_row(self, index: int) -> dict[str, Any]:
        """Row that the loop can run; different for every index."""
        return {"prompt": [{"role": "user", "content": f"question {index}"}]}

    def reply(self, request: GenerateRequest) -> Sequence[int]:
        """Answer of the fake model; the default repeats the end of its prompt, so that rows have different answers."""
        return [*request.prompt_token_ids[-32:], FakeTokenizer.eos_token_id]

    def test_outputs_are_valid(self) -> None:
        """Every trajectory is valid."""
        for output in self._run(FakeGenerator(self.reply))[0]:
            validate_output(output)

    def test_emitted_tokens_are_kept_and_context_is_only_appended_to(self) -> None:
        """Each request's prompt is a prefix of a trajectory, followed there by exactly what the model answered."""
        server = FakeGenerator(self.reply, weight_version=7)
        outputs = self._run(server)[0]
        assert server.outputs, "the loop generated nothing"
        answers = {output.request_id: output for output in server.outputs}
        for request in server.requests:
            assert any(_holds(output, request, answers[request.request_id]) for output in outputs), (
                f"no trajectory holds the answer {answers[request.request_id].token_ids} to {request.prompt_token_ids}"
            )

    def test_the_mask_marks_exactly_what_the_model_wrote(self) -> None:
        """The loss masks of an unbranched session have as many 1s as tokens were generated."""
        server = FakeGenerator(self.reply)
        outputs = self._run(server)[0]
        num_generated = sum(len(output.token_ids) for output in server.outputs)
        assert sum(sum(output.loss_mask) for output in outputs) == num_generated

    def test_every_request_has_the_given_sampling_parameters(self) -> None:
        """A turn may ask for fewer tokens than the batch."""
        server, given = FakeGenerator(self.reply), {**self.sampling_params, "temperature": 0.5, "top_k": 7}
        asyncio.run(_run(self.make_loop(server, FakeTokenizer()), given, self.make_row(0)))
        for params in (request.sampling_params for request in server.requests):
            assert (params.temperature, params.top_k) == (0.5, 7), f"the request has {params}"
            assert params.max_new_tokens <= given["max_new_tokens"], f"the request has {params}"

    def test_rows_run_at_the_same_time_do_not_mix(self) -> None:
        """Thirty-two concurrent rows on one instance have the same results as each alone."""
        together = self._run(FakeGenerator(self.reply, delay_s=0.001), num_rows=32)
        for index in (0, 13, 31):
            alone = self._run(FakeGenerator(self.reply), first_row=index)[0]
            assert [o.prompt_token_ids for o in together[index]] == [o.prompt_token_ids for o in alone]
            assert [o.completion_token_ids for o in together[index]] == [o.completion_token_ids for o in alone]

    def test_a_lost_server_is_not_swallowed(self) -> None:
        """An error of the server leaves the loop unchanged, so that the runner knows its kind."""

        def lose(_: GenerateRequest) -> Sequence[int]:
            raise ServerLostError("the fake server went away")

        try:
            self._run(FakeGenerator(lose))
        except ServerLostError:
            return
        raise AssertionError("the loop returned although its server was lost")

    def test_a_row_without_its_fields_is_refused(self) -> None:
        """The error is a RowError, before anything is generated."""
        server = FakeGenerator(self.reply)
        loop = self.make_loop(server, FakeTokenizer())
        try:
            asyncio.run(_run(loop, dict(self.sampling_params), {}))
        except RowError:
            assert not server.requests, "the loop generated before it looked at its row"
            return
        raise AssertionError("the loop ran a row that has no field at all")

    def test_cancellation_ends_it(self) -> None:
        """A cancelled run ends, and leaves no generation in flight."""

        async def cancel_it() -> int:
            server = FakeGenerator(self.reply, delay_s=3600)
            loop = self.make_loop(server, FakeTokenizer())
            task = asyncio.create_task(_run(loop, dict(self.sampling_params), self.make_row(0)))
            waiting = asyncio.create_task(server.started.wait())
            await asyncio.wait([task, waiting], timeout=10, return_when=asyncio.FIRST_COMPLETED)
            assert server.num_running, "the loop generated nothing within 10 s"
            task.cancel()
            await asyncio.wait([task], timeout=10)
            assert task.cancelled(), "the loop was cancelled and went on"
            return server.num_running

        assert asyncio.run(cancel_it()) == 0

    def _run(self, server: FakeGenerator, *, num_rows: int = 1, first_row: int = 0) -> list[list[AgentLoopOutput]]:
        loop = self.make_loop(server, FakeTokenizer())
        rows = [self.make_row(first_row + i) for i in range(num_rows)]

        async def run_all() -> list[list[AgentLoopOutput]]:
            return await asyncio.gather(*(_run(loop, dict(self.sampling_params), row) for row in rows))

        return asyncio.run(run_all())


async def _run(loop: AgentLoop, sampling_params: dict[str, Any], row: dict[str, Any]) -> list[AgentLoopOutput]:
    given = await loop.run(sampling_params, row)
    return [given] if isinstance(given, AgentLoopOutput) else given


def _holds(output: AgentLoopOutput, request: GenerateRequest, answer: TokenOutput) -> bool:
    """Whether a trajectory has the request's prompt, then its answer with loss mask 1 and the same log-probs."""
    ids = (*output.prompt_token_ids, *output.completion_token_ids)
    start = len(request.prompt_token_ids)
    end = start + len(answer.token_ids)
    completion = slice(start - len(output.prompt_token_ids), end - len(output.prompt_token_ids))
    return (
        start >= len(output.prompt_token_ids)
        and ids[:start] == request.prompt_token_ids
        and ids[start:end] == answer.token_ids
        and output.loss_mask[completion] == (1,) * len(answer.token_ids)
        and output.rollout_logprobs[completion] == answer.logprobs
        and output.weight_versions[completion] == answer.weight_versions
    )
