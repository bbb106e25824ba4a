"""Tools of an MCP server, over stdio or HTTP (https://modelcontextprotocol.io; `pip install 'rl-agent[mcp]'`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from mcp import Client, MCPError

from rl_agent.errors import FailureError, ToolDefinitionError, ToolError, described, is_foreign
from rl_agent.tools.base import DeadlineError, Tool, with_deadline
from rl_agent.types import Failure, FailureKind, ToolResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mcp import StdioServerParameters


class McpTool(Tool):
    """Tool of an MCP server. All trajectories share the server and its state."""

    def __init__(self, connection: _Connection, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        super().__init__(name, description, parameters)
        self._connection = connection

    async def call(self, arguments: Mapping[str, Any], session_id: str) -> ToolResult:
        """Call the tool; returns text and images of the server's answer.

        Raises:
            ToolError: the tool says that it failed, or answers with neither text nor images.
            FailureError: the server is gone (kind `tool`, retryable: the next call starts it again).
        """
        del session_id
        client = await self._connection.open()
        try:
            result = await client.call_tool(self.name, dict(arguments))
        except MCPError as error:
            if not self._connection.is_lost(error):
                raise ToolError(str(error)) from error
            await self._connection.close()
            message = f"the MCP server of tool {self.name!r} is gone: {error}"
            failure = Failure(kind=FailureKind.TOOL, stage="mcp", message=message, is_retryable=True)
            raise FailureError(failure) from error
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise ToolError(text or "the tool failed and did not say why")
        images = tuple(f"data:{p.mime_type};base64,{p.data}" for p in result.content if p.type == "image")
        if not text and not images and result.content:
            raise ToolError(f"the answer is {result.content[0].type}; only text and images can be shown")
        return ToolResult(text=text, images=images)

    async def close(self) -> None:
        """Disconnect; a server that was started for this client ends."""
        await self._connection.close()


class _Connection:
    """MCP client in its own task, since the task that enters it must also leave it."""

    def __init__(self, server: StdioServerParameters | str, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._client: Client | None = None

    async def open(self) -> Client:
        """Return the client; connects at the first call."""
        async with self._lock:
            if self._client is None or self._task is None or self._task.done():
                self._leave = asyncio.Event()
                ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
                self._task = asyncio.create_task(self._hold(ready))
                try:
                    async with asyncio.timeout(self._timeout_s):
                        self._client = await ready
                except TimeoutError as error:
                    self._task.cancel()
                    raise self.failure(f"did not answer within {self._timeout_s:g} s") from error
            return self._client

    async def _hold(self, ready: asyncio.Future[Client]) -> None:
        try:
            async with Client(self._server) as client:
                ready.set_result(client)
                await self._leave.wait()
        except BaseException as error:  # it is the waiting caller's to see
            if not ready.done():
                ready.set_exception(self.failure(f"could not be reached: {described(error)}"))
            if not is_foreign(error):
                raise

    def failure(self, message: str) -> FailureError:
        text = f"MCP server {self._server!r} {message}"
        return FailureError(Failure(kind=FailureKind.TOOL, stage="mcp", message=text, is_retryable=True))

    def is_lost(self, error: MCPError) -> bool:
        """Whether an error means a closed connection, and not a call that the server refused."""
        return "closed" in str(error).lower() or self._task is None or self._task.done()

    async def close(self) -> None:
        """Disconnect."""
        async with self._lock:
            self._leave.set()
            if self._task is not None:
                await asyncio.wait([self._task], timeout=self._timeout_s)
                self._task.cancel()
            self._task = self._client = None


async def connect_mcp(server: StdioServerParameters | str, *, timeout_s: float = 30.0) -> list[Tool]:
    """List the tools of an MCP server, for `ToolLoop(tools=...)`.

    Args:
        server: Parameters to start a server that talks over stdio (`mcp.StdioServerParameters`), or a server's URL.
        timeout_s: Deadline of connecting, seconds.

    Raises:
        FailureError: it could not be reached.
    """
    connection = _Connection(server, timeout_s)
    try:
        return await with_deadline(_listed(connection), timeout_s)
    except DeadlineError as error:
        raise connection.failure(f"did not list its tools within {timeout_s:g} s") from error
    except (FailureError, ToolDefinitionError):
        raise
    except Exception as error:
        raise connection.failure(f"could not list its tools: {described(error)}") from error


async def _listed(connection: _Connection) -> list[Tool]:
    client = await connection.open()
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += [McpTool(connection, each.name, each.description or "", each.input_schema) for each in page.tools]
        cursor = page.next_cursor
        if cursor is None:
            return tools
