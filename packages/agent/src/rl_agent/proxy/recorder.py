"""Recorder: turns the calls of a session into requests for the rollout server, and its answers into exchanges."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rl_agent.base import StreamingGenerator
from rl_agent.chat_template import TurnTemplate
from rl_agent.errors import RowError
from rl_agent.media import take_images
from rl_agent.proxy.live_text import LiveText, opens_thinking
from rl_agent.proxy.recording import Exchange, find_parent, message_key
from rl_agent.proxy.requests import Answer, new_call_id
from rl_agent.text import parse_turn
from rl_agent.types import ParsedTurn
from rl_rollout.types import FinishReason, GenerateRequest, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from rl_agent.base import Generator
    from rl_agent.proxy.requests import Call, Writer
    from rl_agent.proxy.sessions import ProxySession
    from rl_agent.types import Tokenizer
    from rl_rollout.types import Capabilities, TokenChunk

_MOST_TEMPLATES = 256
"""Sets of tools whose templates are cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Call that is ready to be generated, once per choice."""

    session: ProxySession
    parent: int | None
    """Index of the exchange that it continues."""
    conversation: tuple[Any, ...]
    """Keys of all its messages."""
    tools: str
    """Tools and variables of the template, as JSON."""
    forced: str
    """Start of a tool call that the prompt ends with, since the call requires one."""
    num_escaped: int
    """Number of special tokens that were broken in its messages."""
    requests: tuple[GenerateRequest, ...]
    """Requests for the rollout server."""


class Recorder:
    """Recorder of exchanges: prepares calls, generates their choices, and records what was sampled.

    Args:
        server: Generator of tokens, such as a rollout server.
        tokenizer: Tokenizer of the served model.
        parse: Tool-call parser.
        template_kwargs: Further variables of the chat template.
        policy: Name of the policy of server and tokenizer, where there are several.

    Raises:
        TemplateError: the chat template cannot continue a conversation.
    """

    def __init__(
        self,
        server: Generator,
        tokenizer: Tokenizer,
        parse: Callable[[str], ParsedTurn],
        template_kwargs: Mapping[str, Any] | None,
        policy: str = "",
    ) -> None:
        self._policy = policy
        self._server, self._tokenizer, self._parse = server, tokenizer, parse
        self._template_kwargs = dict(template_kwargs or {})
        self._template = lru_cache(_MOST_TEMPLATES)(self._make_template)
        self._template(json.dumps([[], {}]))

    async def generate(
        self, call: Call, prepared: Prepared, show: Callable[[int, LiveText, Sequence[int]], Awaitable[None]]
    ) -> list[tuple[LiveText, TokenOutput]]:
        """Generate all choices at the same time; the first failure ends the others."""
        texts = [self._live_text(call, prepared) for _ in prepared.requests]
        streams = call.is_streaming or bool(call.stops)
        tasks = [
            asyncio.ensure_future(self._sample(request, text, lambda ids, i=i: show(i, texts[i], ids), streams=streams))
            for i, (request, text) in enumerate(zip(prepared.requests, texts, strict=True))
        ]
        try:
            return [*zip(texts, await asyncio.gather(*tasks), strict=True)]
        finally:
            for task in tasks:
                task.cancel()

    async def _sample(
        self,
        request: GenerateRequest,
        text: LiveText,
        show: Callable[[Sequence[int]], Awaitable[None]],
        *,
        streams: bool,
    ) -> TokenOutput:
        """Generate one choice up to its end or a stop string, after which the server is not asked for more."""
        server = self._server
        if not (streams and isinstance(server, StreamingGenerator)) or request.has_extras:
            output = await server.generate(request)
            await show(output.token_ids)
        else:
            chunks: list[TokenChunk] = []
            async with aclosing(server.generate_stream(request)) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    await show(chunk.token_ids)
                    if text.stop is not None:
                        break
            if text.stop is None and (not chunks or chunks[-1].finish_reason is None):
                raise ConnectionError(f"the stream of request {request.request_id!r} ended without a reason")
            output = TokenOutput.joined(request.request_id, chunks)
        return output if text.stop is None else _cut(output, text.num_tokens)

    def _make_template(self, tools: str) -> TurnTemplate:
        schemas, kwargs = json.loads(tools)
        return TurnTemplate(self._tokenizer, schemas, {**self._template_kwargs, **kwargs})

    def _check_structure(self, call: Call) -> None:
        """Refuse a structured output whose log-probs could not be trained on.

        Raises:
            RowError: the server returns log-probs of the restricted distribution.
        """
        capabilities: Capabilities | None = getattr(self._server, "capabilities", None)
        is_structured = bool({"json_schema", "regex", "choice"} & call.sampling.keys())
        if is_structured and capabilities is not None and capabilities.structured == "restricted":
            raise RowError(
                "this server's log-probs of structured outputs are of the restricted distribution, which the policy's "
                "are not compared with; leave the format out, or use the embedded server"
            )

    def prepare(self, session: ProxySession, call: Call) -> Prepared:
        """Prepare a call: its prompt is that of the exchange that it continues, with the new messages appended."""
        tools = json.dumps([call.tools, call.template_kwargs], sort_keys=True)
        template, exchanges = self._template(tools), session.recording.exchanges
        conversation = tuple(message_key(each) for each in call.messages)
        parent, num_known = find_parent(exchanges, conversation, tools, call.previous, self._policy)
        added, images = take_images(call.messages[num_known:], {})
        messages, num_escaped = template.escaped(added)
        spans: tuple[tuple[int, int], ...] = ()
        if parent is None:
            prompt = template.prompt(messages)
        else:
            before = exchanges[parent]
            continuation = template.continuation(
                messages,
                last_token_id=before.output.token_ids[-1],
                is_stopped=before.output.finish_reason is FinishReason.STOP,
            )
            prompt = (*before.prompt_token_ids, *before.output.token_ids, *continuation)
            spans, images = before.sampled_spans, (*before.images, *images)
            conversation = (*before.conversation, *conversation[num_known:])
        forced = self._forced(call, prompt)
        self._check_structure(call)
        requests = tuple(
            GenerateRequest(
                request_id=uuid4().hex,
                prompt_token_ids=(*prompt, *self._tokenizer.encode(forced, add_special_tokens=False)),
                sampling_params=session.sampling(_of_choice(call.sampling, index)),
                session_id=session.name,
                sampled_spans=spans,
                images=images,
                num_top_logprobs=call.num_top_logprobs,
            )
            for index in range(call.num_choices)
        )
        return Prepared(
            session=session,
            parent=parent,
            conversation=conversation,
            tools=tools,
            forced=forced,
            num_escaped=num_escaped,
            requests=requests,
        )

    def _forced(self, call: Call, prompt: Sequence[int]) -> str:
        """Start of the tool call that the answer has to begin with, in the format of the parser."""
        if call.choice.mode != "required":
            return ""
        start: Callable[[str | None], str] | None = getattr(self._parse, "call_start", None)
        if start is None:
            raise RowError(
                f"tool_choice=required is not supported with parser {getattr(self._parse, '__name__', self._parse)!r}, "
                "which does not say how a call starts; leave it out"
            )
        name = call.tools[0]["function"]["name"] if len(call.tools) == 1 else call.choice.name
        closing = "</think>\n\n" if opens_thinking(self._end_of(prompt)) else ""
        return closing + start(name)

    def _end_of(self, prompt: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt[-16:], skip_special_tokens=False)

    def _live_text(self, call: Call, prepared: Prepared) -> LiveText:
        marks: Sequence[str] | None = getattr(self._parse, "opened_by", None)
        if marks is not None and call.choice.mode == "none":
            marks = [mark for mark in marks if mark == "<think>"]
        is_thinking = opens_thinking(self._end_of(prepared.requests[0].prompt_token_ids))
        hidden = prepared.forced or not call.choice.is_parallel  # what is left of the turn is known at its end
        return LiveText(self._tokenizer, None if hidden else marks, is_thinking=is_thinking, stops=call.stops)

    def record(
        self, call: Call, prepared: Prepared, made: Sequence[tuple[LiveText, TokenOutput]], writer: Writer
    ) -> list[Answer]:
        """Parse and record the choices; text that was streamed already stays as it is."""
        recording = prepared.session.recording
        for _, output in made:
            if not output.token_ids:
                raise ConnectionError(f"the generation ended with reason {output.finish_reason.value!r} before a token")
        recording.num_escaped += prepared.num_escaped
        answers: list[Answer] = []
        for index, (request, (text, output)) in enumerate(zip(prepared.requests, made, strict=True)):
            turn, output = self._parsed(call, prepared.forced, text, output)
            calls = [{"function": {"name": call.name, "arguments": dict(call.arguments)}} for call in turn.calls]
            key = message_key({"role": "assistant", "content": turn.content, "tool_calls": calls})
            start = len(request.prompt_token_ids)
            exchange = Exchange(
                parent=prepared.parent,
                prompt_token_ids=request.prompt_token_ids,
                sampled_spans=(*request.sampled_spans, (start, start + len(output.token_ids))),
                output=output,
                conversation=(*prepared.conversation, key),
                tools=prepared.tools,
                text=self._tokenizer.decode(output.token_ids, skip_special_tokens=True),
                response_id=f"{writer.id}#{index}" if index else writer.id,
                images=request.images,
                policy=self._policy,
            )
            recording.exchanges.append(exchange)
            answers.append(
                Answer(
                    exchange=exchange,
                    turn=turn,
                    call_ids=tuple(new_call_id() for _ in turn.calls),
                    stop=text.stop,
                    logprobs=self._logprobs(output) if call.has_logprobs else (),
                )
            )
        return answers

    def _parsed(self, call: Call, forced: str, text: LiveText, output: TokenOutput) -> tuple[ParsedTurn, TokenOutput]:
        """Turn of an answer, and its tokens: those after its only call are left out if the call asks for one."""

        def decoded(end: int | None) -> str:
            return self._tokenizer.decode(output.token_ids[:end], skip_special_tokens=False)

        is_stopped = output.finish_reason is FinishReason.STOP
        raw = text.text if text.stop is not None else decoded(-1 if is_stopped else None)
        turn = parse_turn(self._parse, forced + raw)
        is_other = not (turn.content.startswith(text.content) and turn.reasoning.startswith(text.reasoning))
        if is_other or call.choice.mode == "none" or any(each.error for each in turn.calls):
            # clients do not know malformed calls: they get the text
            return ParsedTurn(content=text.rest(raw), reasoning=text.reasoning), output
        if call.choice.is_parallel or len(turn.calls) < 2:
            return turn, output
        only = replace(turn, calls=turn.calls[:1])
        counts = range(len(output.token_ids) - 1, 0, -1)
        fewer = next((n for n in counts if parse_turn(self._parse, forced + decoded(n)) == only), None)
        return only, output if fewer is None else _cut(output, fewer)

    def _logprobs(self, output: TokenOutput) -> tuple[dict[str, Any], ...]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}

        tops = output.top_logprobs or ((),) * len(output.token_ids)
        return tuple(
            {**entry(token, logprob), "top_logprobs": [entry(*each) for each in top]}
            for token, logprob, top in zip(output.token_ids, output.logprobs, tops, strict=True)
        )


def _cut(output: TokenOutput, num_tokens: int) -> TokenOutput:
    """The first tokens of an output, ended by a stop that the model does not know."""
    num_fed = max(len(output.routed_experts) - (len(output.token_ids) - num_tokens), 0)
    return replace(
        output,
        token_ids=output.token_ids[:num_tokens],
        logprobs=output.logprobs[:num_tokens],
        weight_versions=output.weight_versions[:num_tokens],
        top_logprobs=output.top_logprobs[:num_tokens],
        routed_experts=output.routed_experts[:num_fed],
        finish_reason=FinishReason.STOP,
    )


def _of_choice(sampling: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Sampling parameters of one choice: with one seed, all would be equal."""
    given = dict(sampling)
    if index and "seed" in given:
        given["seed"] += index
    return given
