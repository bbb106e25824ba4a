"""The errors of rl-agent.

AgentError
├── LoopError (ValueError)                no such agent loop, or it cannot be imported here
├── PluginError (ValueError)              the same of a tool-call parser, a tool or an environment
├── ToolDefinitionError (ValueError)      a function that cannot be offered as a tool
├── ToolError (RuntimeError)              raised by a tool to tell the model what went wrong
├── SandboxError (RuntimeError)           no subprocess for code can be started, or it cannot be shut off as asked
├── RowError (ValueError)                 a dataset row lacks what the loop needs, or holds what the template refuses
├── TokenizerError (ValueError)           a model folder holds no tokenizer that can be loaded
├── TemplateError (ValueError)            the tokenizer has no chat template that can be used
├── OutputError (ValueError)              a trajectory that could not be trained on; says which field and why
└── FailureError (RuntimeError)           raised inside a loop to end its rollout; carries the Failure it ends as
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_agent.types import Failure


class AgentError(Exception):
    """Base of every error that rl-agent raises on purpose."""


class LoopError(AgentError, ValueError):
    """An agent loop is unknown, or is known and cannot be imported."""


class PluginError(AgentError, ValueError):
    """A tool-call parser, a tool or an environment is unknown, or is known and cannot be imported."""


class ToolDefinitionError(AgentError, ValueError):
    """A function cannot be offered as a tool: its signature gives no schema."""


class ToolError(AgentError, RuntimeError):
    """How a tool tells the model what went wrong; any other exception of a tool tells its type as well."""


class SandboxError(AgentError, RuntimeError):
    """Code cannot be run as asked on this machine."""


class RowError(AgentError, ValueError):
    """A dataset row cannot be run."""


class TokenizerError(AgentError, ValueError):
    """A tokenizer cannot be loaded."""


class TemplateError(AgentError, ValueError):
    """The tokenizer has no usable chat template."""


class OutputError(AgentError, ValueError):
    """A trajectory is not valid."""


class FailureError(AgentError, RuntimeError):
    """How a loop ends a rollout that cannot go on; the runner turns it into the value it carries."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.stage}: {failure.message}")
        self.failure = failure
        """What the rollout ends as."""
