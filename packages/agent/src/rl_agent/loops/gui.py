"""Browser agent loop: the model clicks and types on a local page, whose own state decides the reward."""

# Playwright is there where its tests run, and not where types are checked.
# pyright: reportMissingImports=false, reportUnknownParameterType=false, reportUnknownLambdaType=false

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from playwright.async_api import Error, async_playwright

from rl_agent.chat_template import messages_of, takes_videos
from rl_agent.errors import FailureError, RowError, ToolError
from rl_agent.loops.tool import ToolLoop
from rl_agent.media import data_url, take_images
from rl_agent.tools.base import Tool
from rl_agent.types import LARGEST_REWARD, Failure, FailureKind, ToolResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from playwright.async_api import BrowserContext, Page, Route

    from rl_agent.base import Generator
    from rl_agent.types import AgentLoopOutput, Message, ParsedTurn, Tokenizer


class GuiLoop(ToolLoop):
    """Browser agent loop over headless Chromium, driven by Playwright (`pip install 'rl-agent[gui]'`).

    A row holds `prompt` (what is to be done), `html` (the page itself) or `url` (`file:`, or a local server's; the page
    reaches its own origin and nothing else), and `check`, a JavaScript expression of the page that is evaluated at the
    end: its number, or 1 and 0 for true and false, is the reward. Every action answers the page's text and its numbered
    elements, and a screenshot for vision-language models. A page or a browser that breaks is a failure.

    Args:
        server: Generator of tokens, such as a rollout server.
        tokenizer: Tokenizer of the served model.
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

    async def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids and images of the prompt, with what the row's page shows."""
        messages, images = await self._opened(row, None)
        return self._template_of(tuple(self._tools)).prompt(messages), images

    async def _opened(self, row: Mapping[str, Any], session_id: str | None) -> tuple[list[Message], tuple[str, ...]]:
        """Open the row's page, for a trajectory or to look at it; returns the prompt's messages, and their images."""
        messages = messages_of(row)
        url, html, check = (_text_of(row, name) for name in ("url", "html", "check"))
        if (url is None) == (html is None) or check is None:
            raise RowError("the row needs one of 'url' and 'html', and 'check', a JavaScript expression for the reward")
        shown = await (
            self._browser.preview(url, html) if session_id is None else self._browser.open(session_id, url, html)
        )
        return take_images(_with_page(messages, shown, self._escaped), row, takes_videos=takes_videos(self.tokenizer))

    async def run(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        """Run one row.

        Raises:
            RowError: a field is missing, or is not what it has to be.
            FailureError: the page, its check or the browser failed, or a generation was aborted.
        """
        session_id, names = uuid4().hex, tuple(self._tools)
        async with self._pages:
            try:
                prompt, images = await self._opened(row, session_id)
                session, metrics, fields = await self._converse(prompt, names, sampling_params, session_id, images)
                check = str(row["check"])
                reward = _reward(check, await self._browser.evaluate(session_id, check))
            finally:
                await self._browser.leave(session_id)
        return session.finish(reward=reward, metrics=metrics, extra_fields=fields)

    async def close(self) -> None:
        """Close the browser."""
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
    """Messages of the prompt, with what the page shows appended."""
    page: list[Any] = [{"type": "image", "image": data_url(image)} for image in shown.images]
    text = escape(shown.text)
    last = messages[-1]
    if not page and isinstance(last["content"], str):
        return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}"}]
    own = [{"type": "text", "text": last["content"]}] if isinstance(last["content"], str) else [*last["content"]]
    return [*messages[:-1], {**last, "content": [*own, *page, {"type": "text", "text": f"\n\n{text}"}]}]


def _reward(check: str, value: Any) -> float:
    if isinstance(value, (bool, int, float)) and abs(value) <= LARGEST_REWARD:
        return float(value)
    message = f"check {check!r} gave {value!r:.80}; true, false or a finite number is needed"
    raise FailureError(Failure(kind=FailureKind.GRADER, stage="check", message=message, is_retryable=False))


_LOOK = """() => {
  document.querySelectorAll('[data-agent-id]').forEach(e => e.removeAttribute('data-agent-id'));
  const all = 'a[href], button, input:not([type=hidden]), select, textarea, [onclick], [role=button]';
  const lines = [...document.querySelectorAll(all)].filter(e => e.checkVisibility()).map((e, i) => {
    e.setAttribute('data-agent-id', i + 1);
    const name = e.labels?.[0]?.innerText || e.getAttribute('aria-label') || e.placeholder || e.innerText || e.name;
    const state = 'checked' in e && ['checkbox', 'radio'].includes(e.type) ? (e.checked ? ' (checked)' : '')
      : e.value && e.tagName != 'BUTTON' ? ' = ' + JSON.stringify(e.value) : '';
    return `[${i + 1}] ${e.tagName.toLowerCase()} ${JSON.stringify((name || '').trim())}${state}`;
  });
  return [document.title, document.body.innerText.trim(), lines.join('\\n')];
}"""


@dataclass(slots=True)
class _Tab:
    """Page of one trajectory."""

    context: BrowserContext
    page: Page
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Browser:
    """Headless Chromium whose pages reach only the page that they were opened on, and its origin.

    Args:
        executable: The browser; None looks for `chromium` on the path, and then takes Playwright's own.
        timeout_s: Deadline of one action, seconds.
        has_screenshots: Show pictures of the page besides its text.
        size: Width and height of the window, pixels.
    """

    def __init__(
        self, *, executable: str | None, timeout_s: float, has_screenshots: bool, size: tuple[int, int]
    ) -> None:
        self._executable = executable or shutil.which("chromium")
        self._timeout_s = timeout_s
        self._has_screenshots = has_screenshots
        self._size = size
        self._tabs: dict[str, _Tab] = {}
        self._starting, self._previewing = asyncio.Lock(), asyncio.Lock()
        self._playwright: Any = None
        self._browser: Any = None

    async def open(self, session_id: str, url: str | None, html: str | None) -> ToolResult:
        """Open a page for a trajectory; returns what it shows.

        Raises:
            FailureError: the browser cannot be started, or the page does not load.
        """
        try:
            browser = await self._started()
            width, height = self._size
            context = await browser.new_context(viewport={"width": width, "height": height}, accept_downloads=False)
            context.set_default_timeout(self._timeout_s * 1e3)
            await context.route("**/*", _only(url))
            self._tabs[session_id] = tab = _Tab(context, await context.new_page())
            await (tab.page.goto(url) if url is not None else tab.page.set_content(html or ""))
            return await self._look(tab)
        except Error as error:
            raise _failure("open", error) from error

    async def preview(self, url: str | None, html: str | None) -> ToolResult:
        """What a page shows at first. Pages of text share a tab: they have no origin, and so no storage.

        Raises:
            FailureError: the browser cannot be started, or the page does not load.
        """
        async with self._previewing, AsyncExitStack() as leaving:
            leaving.push_async_callback(self.leave, "preview")
            tab = self._tabs.get("preview")
            if tab is None or tab.page.is_closed() or url is not None:
                await self.leave("preview")
                shown = await self.open("preview", url, html)
            else:
                try:
                    await tab.page.goto("about:blank")
                    await tab.page.set_content(html or "")
                    shown = await self._look(tab)
                except Error as error:
                    raise _failure("open", error) from error
            if url is None:
                leaving.pop_all()  # the tab is for the next page of text too
            return shown

    async def act(self, session_id: str, action: Callable[[Page], Awaitable[None]]) -> ToolResult:
        """Perform an action; returns what the page shows then.

        Raises:
            ToolError: it cannot be done.
            FailureError: the page or the browser is gone.
        """
        tab = self._tabs[session_id]
        async with tab.lock:  # the calls of one turn happen one after the other
            try:
                await action(tab.page)
            except Error as error:
                if tab.page.is_closed():
                    raise _failure("act", error) from error
                raise ToolError(error.message.partition("\n")[0]) from error
            try:
                return await self._look(tab)
            except Error as error:
                raise _failure("look", error) from error

    async def evaluate(self, session_id: str, expression: str) -> Any:
        """Evaluate a JavaScript expression on the trajectory's page.

        Raises:
            FailureError: it has none.
        """
        try:
            return await self._tabs[session_id].page.evaluate(expression)
        except Error as error:
            raise _failure("check", error) from error

    async def leave(self, session_id: str) -> None:
        """Close a trajectory's page, with its cookies and storage."""
        tab = self._tabs.pop(session_id, None)
        if tab is not None:
            await tab.context.close()

    async def close(self) -> None:
        """Close the browser."""
        for session_id in tuple(self._tabs):
            await self.leave(session_id)
        if self._browser is not None:
            await self._browser.close()
        if self._playwright is not None:
            await self._playwright.stop()
        self._browser = self._playwright = None

    async def _started(self) -> Any:
        async with self._starting:
            if self._playwright is None:
                self._playwright = await async_playwright().start()
            if self._browser is None or not self._browser.is_connected():
                arguments = ["--no-sandbox"] if os.getuid() == 0 else []  # Chromium's own refuses to run as root
                self._browser = await self._playwright.chromium.launch(
                    executable_path=self._executable, args=[*arguments, "--disable-dev-shm-usage"]
                )
            return self._browser

    async def _look(self, tab: _Tab) -> ToolResult:
        title, text, elements = await tab.page.evaluate(_LOOK)
        shown = f"page: {title}\n{text}\nelements:\n{elements or 'none'}"
        if not self._has_screenshots:
            return ToolResult(text=shown)
        return ToolResult(text=shown, images=(await tab.page.screenshot(),))


class BrowserTool(Tool):
    """Tool for one action on a page."""

    def __init__(
        self,
        browser: Browser,
        name: str,
        description: str,
        properties: Mapping[str, str],
        action: Callable[[Page, Mapping[str, Any]], Awaitable[None]],
    ) -> None:
        schema = {name: {"type": kind} for name, kind in properties.items()}
        parameters = {"type": "object", "properties": schema, "required": [*properties]}
        super().__init__(name, description, parameters)
        self._browser = browser
        self._types = {name: int if kind == "integer" else str for name, kind in properties.items()}
        self._action = action

    async def call(self, arguments: Mapping[str, Any], session_id: str) -> ToolResult:
        """Perform the action; returns what the page shows then."""
        for name, kind in self._types.items():
            if not isinstance(arguments.get(name), kind):
                raise ToolError(f"{name} is {arguments.get(name)!r}; it has to be {kind.__name__}")
        if unknown := [name for name in arguments if name not in self._types]:
            raise ToolError(f"there is no argument {unknown[0]!r}; there are: {', '.join(self._types) or 'none'}")
        return await self._browser.act(session_id, lambda page: self._action(page, arguments))


def browser_tools(browser: Browser) -> list[Tool]:
    """Tools of the browser: click, fill, choose, press and look."""

    async def click(page: Page, given: Mapping[str, Any]) -> None:
        await _element(page, given).click()

    async def fill(page: Page, given: Mapping[str, Any]) -> None:
        await _element(page, given).fill(given["text"])

    async def choose(page: Page, given: Mapping[str, Any]) -> None:
        await _element(page, given).select_option(given["option"])

    async def press(page: Page, given: Mapping[str, Any]) -> None:
        await page.keyboard.press(given["key"])

    async def look(page: Page, given: Mapping[str, Any]) -> None:
        del given
        await page.wait_for_load_state()

    element = {"element": "integer"}
    return [
        BrowserTool(browser, "click", "Click an element, by its number.", element, click),
        BrowserTool(browser, "fill", "Replace the text of a field.", {**element, "text": "string"}, fill),
        BrowserTool(browser, "choose", "Choose an option of a list.", {**element, "option": "string"}, choose),
        BrowserTool(browser, "press", "Press a key, for example Enter.", {"key": "string"}, press),
        BrowserTool(browser, "look", "See the page again.", {}, look),
    ]


def _element(page: Page, given: Mapping[str, Any]) -> Any:
    return page.locator(f'[data-agent-id="{given["element"]}"]')


def _only(url: str | None) -> Callable[[Route], Awaitable[None]]:
    """Request filter: allows the origin of `url`, or the files in its folder; everything else fails."""
    if url is None:
        base = None
    elif url.startswith("file:"):
        base = url.rpartition("/")[0] + "/"
    else:
        base = "/".join(url.split("/")[:3]) + "/"

    async def decide(route: Route) -> None:
        asked = route.request.url
        is_fine = asked.startswith(("data:", "blob:")) or (base is not None and (asked + "/").startswith(base))
        await (route.continue_() if is_fine else route.abort("blockedbyclient"))

    return decide


def _failure(stage: str, error: Exception) -> FailureError:
    message = f"the browser failed: {str(error).strip()}"
    return FailureError(Failure(kind=FailureKind.ENVIRONMENT, stage=stage, message=message, is_retryable=True))
