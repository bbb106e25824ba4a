"""A browser agent: the model clicks and types on a local page, and the page's own state decides the reward."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rl_agent.chat_template import messages_of
from rl_agent.errors import FailureError, RowError
from rl_agent.loops.tool import ToolLoop
from rl_agent.media import data_url, take_images
from rl_agent.tools.browser import Browser, browser_tools
from rl_agent.types import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_agent.base import Generator
    from rl_agent.types import AgentLoopOutput, Message, ParsedTurn, Tokenizer, ToolResult


class GuiLoop(ToolLoop):
    """Lets the model use a page in headless Chromium, driven by Playwright (`pip install 'rl-agent[gui]'`).

    A row holds `prompt` (what is to be done), `html` (the page itself) or `url` (`file:`, or a local server's; the page
    reaches its own origin and nothing else), and `check`, a JavaScript expression of the page that is evaluated at the
    end: its number, or 1 and 0 for true and false, is the reward. Every action answers the page's text and its numbered
    elements, and a screenshot for vision-language models. A page or a browser that breaks is a failure.

    Args:
        server: What generates.
        tokenizer: Of the model that is served.
        parser: See `ToolLoop`.
        max_turns: Generations at most.
        max_completion_tokens: Tokens after the prompt at most; None leaves it to the server.
        action_timeout_s: Deadline of one action, seconds.
        max_tool_tokens: Tokens of one answer at most.
        max_pages: Pages open at the same time; further rollouts wait.
        has_screenshots: Show pictures besides the text.
        window: Width and height, pixels.
        executable: The browser; None looks for `chromium` on the path, and then takes Playwright's own.
        template_kwargs: Further variables of the chat template.

    Raises:
        TemplateError: the chat template cannot show tools or their answers.
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        server: Generator,
        tokenizer: Tokenizer,
        *,
        parser: str | Callable[[str], ParsedTurn] = "hermes",
        max_turns: int = 16,
        max_completion_tokens: int | None = None,
        action_timeout_s: float = 10.0,
        max_tool_tokens: int = 2048,
        max_pages: int = 8,
        has_screenshots: bool = False,
        window: tuple[int, int] = (1024, 768),
        executable: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if max_pages < 1 or min(window) < 1:
            raise ValueError(f"max_pages={max_pages} and window={window} must be positive")
        self._browser = Browser(
            executable=executable, timeout_s=action_timeout_s, has_screenshots=has_screenshots, size=window
        )
        self._pages = asyncio.Semaphore(max_pages)
        super().__init__(
            server,
            tokenizer,
            tools=browser_tools(self._browser),
            parser=parser,
            max_turns=max_turns,
            max_completion_tokens=max_completion_tokens,
            tool_timeout_s=4 * action_timeout_s,  # calls of one turn wait for one another
            max_tool_tokens=max_tool_tokens,
            template_kwargs=template_kwargs,
        )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run one row.

        Raises:
            RowError: a field is missing, or is not what it has to be.
            FailureError: the page, its check or the browser failed, or a generation was aborted.
        """
        messages, session_id = messages_of(kwargs), uuid4().hex
        url, html, check = (_text_of(kwargs, name) for name in ("url", "html", "check"))
        if (url is None) == (html is None) or check is None:
            raise RowError("the row needs one of 'url' and 'html', and 'check', a JavaScript expression for the reward")
        async with self._pages:
            try:
                shown = await self._browser.open(session_id, url, html)
                prompt, images = take_images(_with_page(messages, shown, self._escaped), kwargs)
                names = tuple(self._tools)
                session, metrics, end = await self._converse(prompt, names, sampling_params, session_id, images)
                reward = _reward(check, await self._browser.evaluate(session_id, check))
            finally:
                await self._browser.leave(session_id)
        return session.finish(reward=reward, metrics=metrics, extra_fields={"end": end})

    async def close(self) -> None:
        """End the browser."""
        await super().close()
        await self._browser.close()

    def _escaped(self, text: str) -> str:
        return self._template_of(tuple(self._tools)).escape(self._cut(text)[0])[0]


def _text_of(row: Mapping[str, Any], name: str) -> str | None:
    found = row.get(name)
    if found is not None and not isinstance(found, str):
        raise RowError(f"field {name!r} of the row is {found!r:.80}; a text is needed")
    return found


def _with_page(messages: list[Message], shown: ToolResult, escape: Callable[[str], str]) -> list[Message]:
    """The prompt with what the page shows at its end."""
    page: list[Any] = [{"type": "image", "image": data_url(image)} for image in shown.images]
    text = escape(shown.text)
    last = messages[-1]
    if not page and isinstance(last["content"], str):
        return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}"}]
    own = [{"type": "text", "text": last["content"]}] if isinstance(last["content"], str) else [*last["content"]]
    return [*messages[:-1], {**last, "content": [*own, *page, {"type": "text", "text": f"\n\n{text}"}]}]


def _reward(check: str, value: Any) -> float:
    if isinstance(value, (bool, int, float)) and math.isfinite(value):
        return float(value)
    message = f"check {check!r} gave {value!r}; true, false or a finite number is needed"
    raise FailureError(Failure(kind=FailureKind.GRADER, stage="check", message=message, is_retryable=False))
