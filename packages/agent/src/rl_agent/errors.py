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
└── FailureError (RuntimeError)           raised inside a loop to end its rollout; carries the Failure it ends as
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_agent.types import Failure


class AgentError(Exception):
    """Base class of the errors of rl-agent."""


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


class FailureError(AgentError, RuntimeError):
    """Exception by which a loop ends a rollout as a failure; the runner returns the `Failure` that it carries."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.stage}: {failure.message}")
        self.failure = failure
        """Failure that the rollout ends with."""
