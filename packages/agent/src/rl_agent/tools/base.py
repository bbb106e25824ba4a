"""Tool interface, tools from Python functions, and calls of tools with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from rl_agent.errors import FailureError, ForeignError, RowError, ToolDefinitionError, ToolError, contained, described
from rl_agent.media import data_url
from rl_agent.types import ToolResult, readable, well_formed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from rl_agent.types import ToolCall

T = TypeVar("T")


class Tool(ABC):
    """Tool that a model may call. One instance serves many trajectories at the same time, on one event loop.

    Args:
        name: Name of the tool, as the model writes it.
        description: Description for the model.
        parameters: JSON schema of the arguments, an object.
        timeout_s: Deadline of one call, seconds; None: the loop's.
        max_tokens: Most tokens of one answer; None: the loop's.

    Raises:
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        for limit, value in (("timeout_s", timeout_s), ("max_tokens", max_tokens)):
            if value is not None and value <= 0:
                raise ValueError(f"{limit} of tool {name!r} is {value}; it must be positive")
        self.name = name
        self.timeout_s = timeout_s
        """Deadline of one call, seconds."""
        self.max_tokens = max_tokens
        """Most tokens of one answer."""
        function = {"name": name, "description": description, "parameters": dict(parameters)}
        self.schema: dict[str, Any] = well_formed({"type": "function", "function": function})
        """JSON schema of the tool for the chat template."""

    @abstractmethod
    async def call(self, arguments: Mapping[str, Any], session_id: str) -> Any:
        """Run one call. A result that is neither a string nor a `ToolResult` is shown to the model as JSON.

        Args:
            arguments: Arguments that the model wrote; not checked against the schema.
            session_id: Id of the trajectory, under which a tool keeps its state.

        Raises:
            ToolError: the call failed; its message is for the model.
            FailureError: the tool's own machinery failed; ends the rollout, as that says nothing about the model.
        """

    async def end_session(self, session_id: str) -> None:
        """Free the state of a finished trajectory."""
        return

    async def close(self) -> None:
        """Free everything."""
        return


class FunctionTool(Tool):
    """Tool from a Python function: name, docstring and signature become its schema (`pip install 'rl-agent[tools]'`).

    A coroutine function is cancelled when its time is over. A plain function runs in a thread, which cannot be stopped:
    one that hangs keeps its thread, though not its rollout. Code that may hang belongs into a `Grader`.

    Args:
        function: Every parameter has an annotation that pydantic knows.
        timeout_s: See `Tool`.
        max_tokens: See `Tool`.

    Raises:
        ToolDefinitionError: a parameter has no annotation, or one that gives no JSON schema.
    """

    def __init__(
        self, function: Callable[..., Any], *, timeout_s: float | None = None, max_tokens: int | None = None
    ) -> None:
        self._function = function
        self._model = _arguments_model(function)
        schema = self._model.model_json_schema()
        schema.pop("title", None)
        for each in schema.get("properties", {}).values():
            each.pop("title", None)
        description = inspect.getdoc(function) or ""
        super().__init__(function.__name__, description, schema, timeout_s=timeout_s, max_tokens=max_tokens)

    async def call(self, arguments: Mapping[str, Any], session_id: str) -> Any:
        """Check the arguments and call the function with them."""
        from pydantic import ValidationError

        del session_id
        try:
            checked = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "arguments"
            raise ToolError(f"argument {place}: {first['msg']}") from error
        given = {name: getattr(checked, name) for name in type(checked).model_fields}
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**given)
        return await in_thread(lambda: self._function(**given))


def _arguments_model(function: Callable[..., Any]) -> Any:
    try:
        from pydantic import ConfigDict, create_model
        from pydantic.errors import PydanticUserError
    except ImportError as error:
        raise ToolDefinitionError("a tool from a function needs pydantic: pip install 'rl-agent[tools]'") from error
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(f"parameter {name!r} of {function.__name__} is {parameter.kind.description}")
        if parameter.annotation is parameter.empty:
            raise ToolDefinitionError(f"parameter {name!r} of {function.__name__} has no annotation; give it a type")
        fields[name] = (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
    try:
        model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except PydanticUserError as error:
        raise ToolDefinitionError(f"the signature of {function.__name__} gives no JSON schema: {error}") from error
    return model


_MOST_RECORDED = 500
"""Characters of an exception that travel with the sample; the model is shown the text up to the limit of tokens."""
Outcome = Literal["ok", "malformed", "unknown", "error", "timeout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """Answer to a call."""

    text: str
    """Text for the model."""
    outcome: Outcome
    """Outcome of the call."""
    images: tuple[str, ...] = ()
    """Data URLs of images."""
    error: str = ""
    """Name of the tool, type and message of its exception; empty where it raised none."""


async def answer_call(call: ToolCall, tools: Mapping[str, Tool], *, session_id: str, timeout_s: float) -> ToolAnswer:
    """Run one call of a tool; returns an answer within its `timeout_s` (or the given one) in any case.

    Raises:
        FailureError: the tool ends the rollout.
    """
    if call.error:
        return ToolAnswer(text=f"error: {call.error}", outcome="malformed")
    tool = tools.get(call.name)
    if tool is None:
        return ToolAnswer(text=f"error: no tool {call.name!r}; there are: {', '.join(tools)}", outcome="unknown")
    timeout_s = tool.timeout_s or timeout_s
    try:
        return _to_answer(await with_deadline(tool.call(call.arguments, session_id), timeout_s))
    except DeadlineError:
        return ToolAnswer(text=f"error: {call.name} did not answer within {timeout_s:g} s", outcome="timeout")
    except FailureError:
        raise
    except Exception as error:  # noqa: BLE001 - a tool is a stranger's code: whatever it raises is shown and counted
        said = described(error)
        text = readable(f"error: {error}") if isinstance(error, ToolError) else f"error: {said}"
        return ToolAnswer(text=text, outcome="error", error=readable(f"{call.name}: {said}")[:_MOST_RECORDED])


def _to_answer(result: Any) -> ToolAnswer:
    """Answer from the result of a call.

    Raises:
        ToolError: an image cannot be shown.
    """
    if isinstance(result, ToolResult):
        try:
            images = tuple(data_url(image) for image in result.images)
        except RowError as error:
            raise ToolError(str(error)) from error
        return ToolAnswer(text=well_formed(str(result.text)), images=well_formed(images), outcome="ok")
    return ToolAnswer(text=well_formed(result if isinstance(result, str) else _to_json(result)), outcome="ok")


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


class DeadlineError(Exception):
    """Deadline of foreign code passed. Not a `TimeoutError`, which that code may raise itself."""


async def with_deadline(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Await `work` with a deadline; late work is cancelled and not waited for, as it may refuse to end."""
    task = asyncio.ensure_future(contained(work))
    try:
        done, _ = await asyncio.wait([task], timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if done:
        if task.cancelled():
            raise ForeignError("CancelledError: it cancelled itself")
        return task.result()
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # read, so that nothing is logged
    raise DeadlineError


def in_thread(work: Callable[[], T]) -> Awaitable[T]:
    """Call a blocking function in its own daemon thread, so that one that hangs does not delay the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: object, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(cast("T", result))
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:  # SystemExit and its like would end this process, and a future takes no StopIteration
            future.set_exception(ForeignError(described(error)))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 - it is handed over
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the event loop has ended, and nobody waits

    threading.Thread(target=run, name="rl-agent-tool", daemon=True).start()
    return future
