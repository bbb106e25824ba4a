"""Tools of a real MCP server, over stdio and over HTTP."""

import asyncio
import json
import socket
import subprocess
import sys
import time

import pytest

from rl_agent import AgentRunner, Failure, FailureError
from rl_agent.loops.tool import ToolLoop
from rl_agent.testing import FakeGenerator, FakeTokenizer

mcp = pytest.importorskip("mcp", reason="needs the extra rl-agent[mcp]")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.process]  # the mcp package's own

SERVER = r'''
import os, sys
from mcp.server import MCPServer
from mcp.types import ImageContent
server = MCPServer("test")

@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("broken")

@server.tool()
def picture() -> list:
    """Take a picture."""
    return [ImageContent(type="image", data="QUJD", mime_type="image/png")]

@server.tool()
def lone() -> str:
    """Give half a character."""
    return "a\ud800b"

@server.tool()
def deep() -> str:
    """Give deep nesting."""
    return "[" * 20000

@server.tool()
def big() -> str:
    """Give ten megabytes, and a NUL byte."""
    return "x" * 10_000_000 + "\0"

@server.tool()
async def hang() -> str:
    """Never answer."""
    import asyncio
    await asyncio.Event().wait()

@server.tool()
def leave() -> str:
    """Raise no Exception."""
    raise SystemExit(3)

@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
'''
TOKENIZER = FakeTokenizer()


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class HttpServer:
    """A server process that listens on a port; it is ours to start again."""

    def __init__(self, path):
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        self.path, self.process = path, None

    def start(self):
        if self.process is not None:
            self.process.wait(60)
        self.process = subprocess.Popen([sys.executable, self.path, str(self.port)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return f"http://127.0.0.1:{self.port}/mcp"
            assert self.process.poll() is None, "the server ended"
            time.sleep(0.05)
        raise AssertionError("the server does not listen within 120 s")


@pytest.fixture(params=["stdio", pytest.param("http", marks=pytest.mark.slow)])
def reach(request, tmp_path):
    """`(server, restart)`: what `connect_mcp` is given, and what brings the server back after its death."""
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    if request.param == "stdio":
        yield mcp.StdioServerParameters(command=sys.executable, args=[str(path)]), lambda: None
        return
    server = HttpServer(path)
    yield server.start(), server.start
    server.process.kill()
    server.process.wait()


def test_a_servers_tools_are_called_and_its_death_is_a_failure(reach):
    from rl_agent.mcp import connect_mcp

    server, restart = reach

    async def main():
        tools = await connect_mcp(server, timeout_s=120)

        async def run(*turns):
            turns = iter(turns)
            model = FakeGenerator(lambda _: [*TOKENIZER.encode(next(turns)), 1])
            loop = ToolLoop(model, TOKENIZER, tools=tools, tool_timeout_s=120)
            return await loop.run({"max_new_tokens": 4096}, {"prompt": [{"role": "user", "content": "go"}]})

        output = await run(call("add", a=1, b=2) + call("fail"), "well")
        with pytest.raises(FailureError, match="MCP server of tool 'die' is gone") as caught:
            await run(call("die"), "well")
        restart()
        again = await run(call("add", a=3, b=4), "well")
        picture = await run(call("picture"), "well")
        await tools[0].close()
        return output, caught.value.failure, again, picture

    output, failure, again, picture = asyncio.run(main())
    said = TOKENIZER.decode(output.completion_token_ids)
    assert "tool\n3<|im_end|>" in said
    assert "error: Error executing tool fail" in said
    assert output.metrics["num_tool_error"] == 1
    assert (failure.kind, failure.is_retryable) == ("tool", True)
    assert picture.images == ("data:image/png;base64,QUJD",), "as the server encoded it"
    assert "tool\n7<|im_end|>" in TOKENIZER.decode(again.completion_token_ids), "the server is started again"


def test_what_a_servers_tools_do_ends_no_run(reach):
    """Each call is one rollout of a batch: all end, as trajectories with the error in them or as failures."""
    from rl_agent.mcp import connect_mcp

    names = ["deep", "big", "hang", "add", "lone", "leave"]

    async def main():
        tools = await connect_mcp(reach[0], timeout_s=60)
        for tool in tools:
            tool.timeout_s = {"hang": 1, "lone": 5, "leave": 5}.get(tool.name, 60)  # three of them may never answer

        def loop_of(name):
            turns = iter([call(name, **({"a": 1, "b": 2} if name == "add" else {})), "well"])
            model = FakeGenerator(lambda _: [*TOKENIZER.encode(next(turns)), 1])
            return ToolLoop(model, TOKENIZER, tools=tools)

        rows = [{"agent_name": name, "prompt": [{"role": "user", "content": "go"}]} for name in names]
        runner = AgentRunner(loop_of, timeout_s=60, max_attempts=1, max_concurrent=1)  # the last kill the server
        found = {names[r.row_index]: r.outputs async for r in runner.run(rows, {"max_new_tokens": 4096})}
        await tools[0].close()
        return found

    found = asyncio.run(main())
    assert len(found) == len(names)
    told = {
        name: each.message if isinstance(each, Failure) else TOKENIZER.decode(each[0].completion_token_ids)
        for name, each in found.items()
    }
    if not isinstance(found["lone"], Failure):
        assert "\ufffd" in told["lone"] or "error: " in told["lone"]
    assert "[[[[" in told["deep"]
    assert "characters are too many" in told["big"]
    assert "did not answer within 1 s" in told["hang"]
    assert "error: " in told["leave"] or "is gone" in told["leave"]
    assert "tool\n3<|im_end|>" in told["add"], "a call that hangs does not hold up the next"
    assert all(text.encode() for text in told.values())


RAW = r"""
import json, sys
answers = {
    "lone": '{"content": [{"type": "text", "text": "a\\ud800b"}]}',
    "malformed": '{"content": [',
    "wrong": '{"content": 7}',
    "deep": '{"content": [], "structuredContent": ' + '{"a":' * 5000 + "1" + "}" * 5001,
    "none": "null",
}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    result = '{"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, '
    result += '"serverInfo": {"name": "x", "version": "1"}}'
    if asked["method"] == "tools/list":
        result = json.dumps({"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in answers]})
        if len(sys.argv) > 1:
            continue
    elif asked["method"] == "tools/call":
        result = answers[asked["params"]["name"]]
    print('{"jsonrpc": "2.0", "id": %s, "result": %s}' % (json.dumps(asked["id"]), result), flush=True)
"""


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("lone", "did not answer within 2 s"),
        ("malformed", "did not answer within 2 s"),
        ("wrong", "error: ValidationError"),
        ("deep", "did not answer within 2 s"),
        ("none", "did not answer within 2 s"),
    ],
)
def test_malformed_answers_of_a_server_end_no_run(tmp_path, name, outcome):
    from rl_agent.mcp import connect_mcp

    (tmp_path / "raw.py").write_text(RAW)

    async def main():
        server = mcp.StdioServerParameters(command=sys.executable, args=[str(tmp_path / "raw.py")])
        tools = await connect_mcp(server, timeout_s=60)
        turns = iter([call(name), "well"])
        model = FakeGenerator(lambda _: [*TOKENIZER.encode(next(turns)), 1])
        loop = ToolLoop(model, TOKENIZER, tools=tools, tool_timeout_s=2)
        runner = AgentRunner(lambda _: loop, timeout_s=60, max_attempts=1)
        (found,) = [r async for r in runner.run([{"prompt": [{"role": "user", "content": "go"}]}], {})]
        await tools[0].close()
        return found.outputs

    found = asyncio.run(main())
    assert not isinstance(found, Failure), found
    said = TOKENIZER.decode(found[0].completion_token_ids)
    assert outcome in said, said
    assert found[0].metrics["num_tool_error"] + found[0].metrics["num_tool_timeout"] == 1


def test_a_server_that_does_not_list_its_tools_says_so(tmp_path):
    from rl_agent.mcp import connect_mcp

    (tmp_path / "raw.py").write_text(RAW)
    server = mcp.StdioServerParameters(command=sys.executable, args=[str(tmp_path / "raw.py"), "mute"])
    with pytest.raises(FailureError, match="did not list its tools within 5 s"):
        asyncio.run(connect_mcp(server, timeout_s=5))


def test_a_server_that_cannot_be_reached_says_so():
    from rl_agent.mcp import connect_mcp

    with pytest.raises(FailureError, match="no-such-command.* could not be reached"):
        asyncio.run(connect_mcp(mcp.StdioServerParameters(command="no-such-command"), timeout_s=60))
