"""Tools of a real MCP server, started here over stdio."""

import asyncio
import json
import sys

import pytest

from rl_agent import FailureError
from rl_agent.loops.tool import ToolLoop
from rl_agent.testing import FakeGenerator, FakeTokenizer

mcp = pytest.importorskip("mcp", reason="needs the extra rl-agent[mcp]")
pytestmark = pytest.mark.filterwarnings("default")  # the mcp package's own

SERVER = '''
import os
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

server.run()
'''
TOKENIZER = FakeTokenizer()


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_servers_tools_are_called_and_its_death_is_a_failure(tmp_path):
    from rl_agent.mcp import connect_mcp

    path = tmp_path / "server.py"
    path.write_text(SERVER)

    async def main():
        tools = await connect_mcp(mcp.StdioServerParameters(command=sys.executable, args=[str(path)]), timeout_s=120)

        async def run(*turns):
            turns = iter(turns)
            server = FakeGenerator(lambda _: [*TOKENIZER.encode(next(turns)), 1])
            loop = ToolLoop(server, TOKENIZER, tools=tools, tool_timeout_s=120)
            return await loop.run({"max_new_tokens": 4096}, prompt=[{"role": "user", "content": "go"}])

        output = await run(call("add", a=1, b=2) + call("fail"), "well")
        with pytest.raises(FailureError, match="MCP server of tool 'die' is gone") as caught:
            await run(call("die"), "well")
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
