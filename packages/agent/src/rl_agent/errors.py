"""Errors of rl-agent.

AgentError
├── LoopError (ValueError)                no such agent loop, or it cannot be imported here
├── PluginError (ValueError)              the same of a tool-call parser, a tool or an environment
├── ToolDefinitionError (ValueError)      a function that cannot be offered as a tool
├── ToolError (RuntimeError)              raised by a tool to tell the model what went wrong
├── SandboxError (RuntimeError)           no subprocess for code can be started, or it cannot be shut off as asked
├── ScriptError (ValueError)              a launch script that cannot be read, exceeds a limit or reaches outside
├── RowError (ValueError)                 a dataset row lacks what the loop needs, or holds what the template refuses
├── TokenizerError (ValueError)           a model folder holds no tokenizer that can be loaded
├── TemplateError (ValueError)            the tokenizer has no chat template that can be used
├── OutputError (ValueError)              a trajectory that could not be trained on; says which field and why
├── ForeignError (RuntimeError)           foreign code raised no `Exception`: SystemExit, a panic of Rust code
└── FailureError (RuntimeError)           raised inside a loop to end its rollout; carries the Failure it ends as
"""

from __future__ import annotations

import asyncio
import signal
import threading
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

from rl_agent.types import readable

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from rl_agent.types import Failure

T = TypeVar("T")


class AgentError(Exception):
    """Base class of the errors of rl-agent."""

    row_index: int | None = None
    """Index in its batch of the row whose rollout raised it, set by the runner."""


class LoopError(AgentError, ValueError):
    """Unknown agent loop, or one that cannot be imported."""


class PluginError(AgentError, ValueError):
    """Unknown tool-call parser, tool or environment, or one that cannot be imported."""


class ToolDefinitionError(AgentError, ValueError):
    """Function that cannot be offered as a tool: its signature gives no schema."""


class ToolError(AgentError, RuntimeError):
    """Error of a tool, whose message goes to the model; of other exceptions the type goes to it as well."""


class SandboxError(AgentError, RuntimeError):
    """Sandbox that cannot run code as asked on this machine."""


class ScriptError(AgentError, ValueError):
    """Launch script that cannot be read."""


class RowError(AgentError, ValueError):
    """Dataset row that cannot be run."""


class TokenizerError(AgentError, ValueError):
    """Tokenizer that cannot be loaded."""


class TemplateError(AgentError, ValueError):
    """Chat template that is missing or unusable."""


class OutputError(AgentError, ValueError):
    """Invalid trajectory."""


class ForeignError(AgentError, RuntimeError):
    """Stand-in for an exception of foreign code that is no `Exception`; its message has the type."""


class FailureError(AgentError, RuntimeError):
    """Exception by which a loop ends a rollout as a failure; the runner returns the `Failure` that it carries."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.stage}: {failure.message}")
        self.failure = failure
        """Failure that the rollout ends with."""


def is_foreign(error: BaseException) -> bool:
    """Whether an exception is a failure of the code that raised it.

    False for the cancellation of the current task, Ctrl-C and the closing of a generator, which must go on. True for
    all else, `SystemExit`, the panics of Rust extensions and a `CancelledError` that nobody asked for included.
    """
    if isinstance(error, BaseExceptionGroup):
        group: BaseExceptionGroup[Any] = error
        return all(is_foreign(each) for each in group.exceptions)
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop
            return True
        return task is None or not task.cancelling()
    if isinstance(error, KeyboardInterrupt):
        return not _is_ctrl_c(error)
    return not isinstance(error, GeneratorExit)


def _is_ctrl_c(error: KeyboardInterrupt) -> bool:
    """Whether the handler of SIGINT raised it: Python's own, which leaves no frame, or one that is in its traceback."""
    if threading.current_thread() is not threading.main_thread():
        return False  # handlers run in the main thread
    handler: Any = signal.getsignal(signal.SIGINT)
    code = getattr(getattr(handler, "func", handler), "__code__", None)
    frames = traceback.walk_tb(error.__traceback__)
    return handler is signal.default_int_handler or any(frame.f_code is code for frame, _ in frames)


def described(error: BaseException) -> str:
    """Type and message of an exception of foreign code, whose `__str__` may raise as well."""
    try:
        text = str(error)
    except BaseException as raised:
        if not is_foreign(raised):
            raise
        text = ""
    text = text if isinstance(error, ForeignError) else f"{type(error).__name__}: {text}".removesuffix(": ")
    return readable(text)


async def contained(work: Awaitable[T]) -> T:
    """Await foreign code.

    Raises:
        ForeignError: it raised what is no `Exception`, which would end the event loop or look like a cancellation.
    """
    try:
        return await work
    except Exception:
        raise
    except BaseException as error:
        if not is_foreign(error):
            raise
        raise ForeignError(described(error)) from error
