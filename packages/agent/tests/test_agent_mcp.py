"""Tools of a real MCP server, over stdio and over HTTP."""

import asyncio
import json
import socket
import subprocess
import sys
import time

import pytest

from rl_agent import FailureError
from rl_agent.loops.tool import ToolLoop
from rl_agent.testing import FakeGenerator, FakeTokenizer

mcp = pytest.importorskip("mcp", reason="needs the extra rl-agent[mcp]")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.process]  # the mcp package's own

SERVER = '''
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


def test_a_server_that_cannot_be_reached_says_so():
    from rl_agent.mcp import connect_mcp

    with pytest.raises(FailureError, match="no-such-command.* could not be reached"):
        asyncio.run(connect_mcp(mcp.StdioServerParameters(command="no-such-command"), timeout_s=60))
