"""Tool loop (ReAct, 2210.03629): tool calls are run and their answers appended, until a turn calls no tool."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rl_agent.base import AgentLoop
from rl_agent.chat_template import TurnTemplate, messages_of, takes_videos
from rl_agent.errors import RowError
from rl_agent.media import take_images
from rl_agent.registry import create_grader, load_plugin
from rl_agent.session import Session
from rl_agent.text import parse_turn
from rl_agent.tools.base import FunctionTool, Tool, answer_call
from rl_agent.types import readable

if TYPE_CHECKING:
    from rl_agent.base import Generator
    from rl_agent.types import AgentLoopOutput, Message, ParsedTurn, Tokenizer, ToolCall


class ToolLoop(AgentLoop):
    """Tool loop: the model calls tools, several at a time.

    A tool that raises, hangs or writes too much, and a malformed call, give the model a short error or a cut answer,
    and a count in the metrics (`num_tool_calls`, of them `num_tool_malformed`, `_unknown`, `_error`, `_timeout`, and
    `num_tool_cut`). The reason of the end is `extra_fields["end"]`: `answer` (a turn without calls), `cut` (a turn
    ran out of tokens), `max_turns` or `max_completion_tokens`. `extra_fields["tool_error"]` has the tool, type and
    message of the last exception of a tool.

    Args:
        server: Generator of tokens, such as a rollout server.
        tokenizer: Tokenizer of the served model.
        tools: Tools, Python functions, or names of the entry points `rl_agent.tools`. A row's `tools` chooses among
            these and the installed ones by name.
        parser: Tool-call parser: an entry point of `rl_agent.parsers` (hermes, qwen, llama, mistral,
            deepseek, glm, kimi, gpt_oss), or a function from text to `ParsedTurn`.
        max_turns: Most generations.
        max_completion_tokens: Most tokens after the prompt, tool answers included; None leaves it to the server.
        tool_timeout_s: Deadline of one call, seconds, of tools that have none of their own.
        max_tool_tokens: Most tokens of one answer, of tools without a limit of their own; a longer one is cut, marked.
        template_kwargs: Further variables of the chat template.
        sandbox: Kind of sandboxes that the tool `python` runs in, or a mapping with `kind` and its options; see
            `create_sandboxes`.

    Raises:
        SandboxError: there is no such sandbox, or it cannot do what is asked for.
        TemplateError: the chat template cannot show tools or their answers.
        PluginError, ToolDefinitionError: the parser or a tool is unknown or invalid.
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        server: Generator,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Tool | Callable[..., Any] | str] = (),
        parser: str | Callable[[str], ParsedTurn] = "hermes",
        max_turns: int = 8,
        max_completion_tokens: int | None = None,
        tool_timeout_s: float = 30.0,
        max_tool_tokens: int = 1024,
        template_kwargs: Mapping[str, Any] | None = None,
        sandbox: str | Mapping[str, Any] = "process",
    ) -> None:
        super().__init__(server, tokenizer)
        self._sandbox = sandbox
        limits = {"max_turns": max_turns, "tool_timeout_s": tool_timeout_s, "max_tool_tokens": max_tool_tokens}
        if max_completion_tokens is not None:
            limits["max_completion_tokens"] = max_completion_tokens
        for name, value in limits.items():
            if value <= 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        self._parse: Callable[[str], ParsedTurn] = load_plugin("parsers", parser) if isinstance(parser, str) else parser
        self._max_turns = max_turns
        self._max_completion_tokens = max_completion_tokens
        self._timeout_s = tool_timeout_s
        self._max_tool_tokens = max_tool_tokens
        self._template_kwargs = template_kwargs
        self._tools: dict[str, Tool] = {}
        self._templates: dict[tuple[str, ...], TurnTemplate] = {}
        for each in tools:
            tool = _to_tool(each, sandbox)
            self._tools[tool.name] = tool
        self._default_names = tuple(self._tools)
        if tools:
            self._template_of(self._default_names)  # a template without tool answers is refused now

    async def run(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        """Run one row.

        Args:
            sampling_params: Fields of `SamplingParams`; `max_new_tokens` bounds each turn.
            row: The row; `prompt` (chat messages), `images` and `videos` for places in them that bring none, and
                `tools` (names), where they are given, are used.

        Raises:
            RowError: the row has no `prompt`, or there are no tools, or unknown ones.
            FailureError: a generation was aborted before its first token, or a tool's own machinery failed.
        """
        names = self._names_of(row)
        messages, images = take_images(messages_of(row), row, takes_videos=takes_videos(self.tokenizer))
        session, metrics, fields = await self._converse(messages, names, sampling_params, uuid4().hex, images)
        return session.finish(metrics=metrics, extra_fields=fields)

    async def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids and images of the prompt, schemas of the row's tools included."""
        messages, images = take_images(messages_of(row), row, takes_videos=takes_videos(self.tokenizer))
        return self._template_of(self._names_of(row)).prompt(messages), images

    async def _converse(
        self,
        messages: Sequence[Message],
        names: tuple[str, ...],
        sampling_params: Mapping[str, Any],
        session_id: str,
        images: Sequence[str] = (),
    ) -> tuple[Session, dict[str, float], dict[str, Any]]:
        """Run the conversation to its end; returns the session, its metrics and extra fields."""
        template, tools = self._template_of(names), {name: self._tools[name] for name in names}
        session = Session(
            self.server,
            self.tokenizer,
            template.prompt(messages),
            sampling_params,
            max_completion_tokens=self._max_completion_tokens,
            images=images,
            template=template,
        )
        counts, end, tool_s, tool_error = Counter[str](), "max_turns", 0.0, ""
        try:
            while True:
                await session.generate()
                turn = parse_turn(self._parse, session.last_marked_text)
                if not session.is_stopped or not turn.calls:
                    end = "answer" if session.is_stopped else "cut"
                    break
                if session.num_turns == self._max_turns:
                    break
                start = time.perf_counter()
                answers, shown, error = await self._answer(turn.calls, tools, template, session_id, counts)
                tool_error = error or tool_error
                tool_s += time.perf_counter() - start
                if not session.append(answers, shown):
                    end = "max_completion_tokens"
                    break
        finally:
            for tool in tools.values():
                await tool.end_session(session_id)
        metrics = {f"num_tool_{kind}": float(counts[kind]) for kind in _KINDS}
        fields = {"end": end, **({"tool_error": tool_error} if tool_error else {})}
        return session, {**metrics, "tool_s": tool_s}, fields

    @classmethod
    def sandboxes_of(cls, options: Mapping[str, Any]) -> Any:
        """Kind of sandboxes of a loop with these options, or a grader in them; None where none is named.

        Raises:
            SandboxError: there is no such kind, or it cannot do what is asked for.
        """
        return create_grader(sandbox=options["sandbox"]) if "sandbox" in options else None

    async def close(self) -> None:
        """Close the tools."""
        for tool in self._tools.values():
            await tool.close()

    async def _answer(
        self,
        calls: Sequence[ToolCall],
        tools: Mapping[str, Tool],
        template: TurnTemplate,
        session_id: str,
        counts: Counter[str],
    ) -> tuple[list[Message], list[str], str]:
        """Run the calls of one turn concurrently; returns answers as messages, in order, images, and the last error."""
        answers = await asyncio.gather(
            *(answer_call(call, tools, session_id=session_id, timeout_s=self._timeout_s) for call in calls)
        )
        messages, images = list["Message"](), list[str]()
        for call, answer in zip(calls, answers, strict=True):
            tool = tools.get(call.name)
            text, is_cut = self._cut(answer.text, None if tool is None else tool.max_tokens)
            text, num_escaped = template.escape(text)
            call_id = f"call{counts['calls']:05d}"
            counts.update({"calls": 1, answer.outcome: 1, "cut": is_cut, "escaped": num_escaped})
            content = [*[{"type": "image"}] * len(answer.images), {"type": "text", "text": text}]
            answered = {"role": "tool", "name": call.name, "tool_call_id": call_id}
            messages.append({**answered, "content": content if answer.images else text})
            images += answer.images
        return messages, images, next((each.error for each in reversed(answers) if each.error), "")

    def _cut(self, text: str, max_tokens: int | None = None) -> tuple[str, bool]:
        """Truncate a tool's text to the limit of tokens; no text of the model is tokenised here."""
        limit, text = max_tokens or self._max_tool_tokens, readable(text)
        head = text[: 32 * limit]  # so that very long text is not tokenised whole
        ids = self.tokenizer.encode(head, add_special_tokens=False)
        if len(head) == len(text) and len(ids) <= limit:
            return text, False
        kept = self.tokenizer.decode(ids[:limit], skip_special_tokens=False)
        return f"{kept}\n[cut: {len(text)} characters are too many]", True

    def _names_of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        given = row.get("tools")
        if given is None:
            given = self._default_names
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(n, str) for n in given):
            raise RowError(f"field 'tools' of the row is {given!r}; it needs a list of names of tools")
        names = tuple(dict.fromkeys(str(name) for name in given))
        if not names:
            raise RowError("there are no tools; give the loop some, or name them in the row's field 'tools'")
        for name in names:
            if name not in self._tools:
                self._tools[name] = _to_tool(name, self._sandbox)
        return names

    def _template_of(self, names: tuple[str, ...]) -> TurnTemplate:
        if names not in self._templates:
            schemas = [self._tools[name].schema for name in names]
            self._templates[names] = TurnTemplate(self.tokenizer, schemas, self._template_kwargs)
        return self._templates[names]


_MAX_SANDBOXES = 64
_KINDS = ("calls", "malformed", "unknown", "error", "timeout", "cut", "escaped")


def _to_tool(given: Tool | Callable[..., Any] | str, sandbox: str | Mapping[str, Any]) -> Tool:
    found: Any = load_plugin("tools", given) if isinstance(given, str) else given
    if isinstance(found, type):
        runs_code = sandbox != "process" and "pool" in inspect.signature(found).parameters
        found = found(pool=create_grader(num_workers=_MAX_SANDBOXES, sandbox=sandbox)) if runs_code else found()
    return found if isinstance(found, Tool) else FunctionTool(found)
