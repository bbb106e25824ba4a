"""The browser agent on real pages in a real Chromium: `uv sync --group frameworks` and Debian's `chromium`."""

import asyncio
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl_agent import AgentRunner, Failure, RowError, create_loop, validate_output
from rl_agent.errors import FailureError
from rl_agent.testing import FakeGenerator, FakeTokenizer

pytest.importorskip("playwright", reason="uv sync --group frameworks")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on the path"),
]

TOKENIZER = FakeTokenizer()
PAGE = """<title>Shop</title><script>function $(id) { return document.getElementById(id) }</script>
<p>Welcome <b>you</b></p><label>Name <input id=name></label>
<select id=size aria-label=size><option>S<option>M</select>
<button onclick="document.title = $('name').value + '/' + $('size').value">Buy</button><button hidden>never</button>"""
ROW = {
    "prompt": [{"role": "user", "content": "buy an M as Ann"}],
    "html": PAGE,
    "check": "document.title == 'Ann/M'",
}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def run(*turns, row=ROW, **options):
    says = iter(turns)
    server = FakeGenerator(lambda _: [*TOKENIZER.encode(next(says)), 1])

    async def main():
        loop = create_loop("gui", server, TOKENIZER, **options)
        try:
            async with asyncio.timeout(120):
                return await loop.run({"max_new_tokens": 4096}, row)
        finally:
            await loop.close()

    output = asyncio.run(main())
    validate_output(output)
    return output


def context(output):
    pairs = zip(output.completion_token_ids, output.loss_mask, strict=True)
    return TOKENIZER.decode([i for i, m in pairs if not m])


def test_the_model_acts_sees_results_and_the_page_decides():
    turns = [call("fill", element=1, text="Ann") + call("choose", element=2, option="M"), call("click", element=3)]
    output = run(*turns, "bought")
    assert (output.reward, output.num_turns, output.extra_fields["end"]) == (1.0, 3, "answer")
    prompt = TOKENIZER.decode(output.prompt_token_ids)
    assert "page: Shop\nWelcome you" in prompt
    assert '[1] input "Name"\n[2] select "size" = "S"\n[3] button "Buy"' in prompt
    assert "never" not in prompt
    assert '[1] input "Name" = "Ann"\n[2] select "size" = "M"' in context(output)
    assert "page: Ann/M" in context(output)


def test_the_wrong_thing_earns_nothing():
    assert run(call("click", element=3), "bought").reward == 0.0


def test_what_cannot_be_done_is_told():
    turns = [call("click", element=9), call("fill", element="x", text="y"), call("press", key="No"), call("look", at=1)]
    output = run(*turns, "well", action_timeout_s=5.0)
    said = context(output)
    assert "error: Locator.click: Timeout 5000ms exceeded." in said
    assert "error: element is 'x'; it has to be int" in said
    assert 'error: Keyboard.press: Unknown key: "No"' in said
    assert "error: there is no argument 'at'" in said
    assert output.metrics["num_tool_error"] == 4.0


def test_a_screenshot_is_an_image_of_the_trajectory():
    output = run(call("look"), "seen", has_screenshots=True)
    assert len(output.images) == 2
    assert all(image.startswith("data:image/png;base64,iVBOR") for image in output.images)
    assert TOKENIZER.decode(output.prompt_token_ids).count(TOKENIZER.image) == 1


@pytest.mark.promise("A page reaches its own origin only")
def test_a_page_reaches_its_own_origin_and_nothing_else():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.server.server_port, self.path))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            other = f"http://127.0.0.1:{strangers[0]}/stolen"
            self.wfile.write(f"<img src='/own'><img src='{other}'><iframe src='{other}'></iframe>".encode())

        def log_message(self, *_):
            pass

    seen, strangers = [], []
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    strangers.append(servers[1].server_port)
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{servers[0].server_port}/"
    try:
        run(call("look"), "seen", row={**ROW, "html": None, "url": url, "check": "true"})
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
    assert {port for port, _ in seen} == {servers[0].server_port}
    assert {"/", "/own"} <= {path for _, path in seen}


@pytest.mark.parametrize(
    ("change", "kind", "stage"),
    [
        ({"check": "no.such"}, "environment", "check"),
        ({"check": "'yes'"}, "grader", "check"),
        ({"html": None, "url": "http://127.0.0.1:9/"}, "environment", "open"),
    ],
)
def test_what_breaks_is_a_failure_and_no_reward(change, kind, stage):
    async def main():
        server = FakeGenerator(lambda _: [*TOKENIZER.encode("done"), 1])
        agents = AgentRunner(lambda name: create_loop(name, server, TOKENIZER), default_loop="gui", max_attempts=1)
        (result,) = [result async for result in agents.run([{**ROW, **change}], {"max_new_tokens": 64})]
        await agents.close()
        return result.outputs

    failure = asyncio.run(main())
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.stage) == (kind, stage)


@pytest.mark.parametrize("change", [{"check": None}, {"url": "file:///x"}, {"html": 3}])
def test_a_row_that_cannot_be_run_is_refused(change):
    with pytest.raises(RowError, match=r"needs one of 'url' and 'html'|a text is needed"):
        run("done", row={**ROW, **change})


def test_previews_share_a_tab_and_see_nothing_of_one_another(monkeypatch):
    """Every prompt is measured before the first step: pages of text are, in a tab that is opened once."""
    from rl_agent.loops.gui import Browser

    opened, real = [], Browser.open

    async def counted(self, session_id, url, html):
        opened.append(url)
        return await real(self, session_id, url, html)

    monkeypatch.setattr(Browser, "open", counted)
    leaves = "<title>A</title><script>window.left = 1; setInterval(() => 0, 1)</script>"
    seen = "<title>B</title><p id=p></p><script>p.innerText = String(window.left)</script>"

    async def main():
        loop = create_loop("gui", FakeGenerator(lambda _: [1]), TOKENIZER)
        try:
            async with asyncio.timeout(120):
                rows = [{**ROW, "html": page} for page in (leaves, seen, PAGE, PAGE)]
                return [await loop.prompt(row) for row in rows]
        finally:
            await loop.close()

    prompts = [TOKENIZER.decode(ids) for ids, _ in asyncio.run(main())]
    assert opened == [None]
    assert "page: B\nundefined\n" in prompts[1]
    assert prompts[2] == prompts[3]
    assert '[3] button "Buy"' in prompts[2]


def test_a_page_of_text_has_no_tab_of_a_preview_that_failed(monkeypatch):
    """The tab of a URL may reach its origin."""
    from rl_agent.loops.gui import Browser

    opened, real = [], Browser.open

    async def counted(self, session_id, url, html):
        opened.append(url)
        return await real(self, session_id, url, html)

    monkeypatch.setattr(Browser, "open", counted)
    elsewhere = {**ROW, "url": "http://127.0.0.1:9/"}
    del elsewhere["html"]

    async def main():
        loop = create_loop("gui", FakeGenerator(lambda _: [1]), TOKENIZER)
        try:
            async with asyncio.timeout(120):
                with pytest.raises(FailureError):
                    await loop.prompt(elsewhere)
                await loop.prompt(ROW)
        finally:
            await loop.close()

    asyncio.run(main())
    assert opened == ["http://127.0.0.1:9/", None]
