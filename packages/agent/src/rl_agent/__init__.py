"""Agent loops that return trainable trajectories: tokens that the model emitted are never re-tokenised."""

from importlib import import_module
from typing import TYPE_CHECKING

from rl_agent.base import AgentLoop, Generator, Policy
from rl_agent.errors import (
    AgentError,
    FailureError,
    LoopError,
    OutputError,
    PluginError,
    RowError,
    SandboxError,
    ScriptError,
    TemplateError,
    TokenizerError,
    ToolDefinitionError,
    ToolError,
)
from rl_agent.types import (
    AgentLoopOutput,
    CodeResult,
    Failure,
    FailureKind,
    GroupResult,
    Message,
    OnFailure,
    ParsedTurn,
    RolloutResult,
    SandboxLimits,
    SandboxReport,
    Tokenizer,
    ToolCall,
    ToolResult,
)

if TYPE_CHECKING:
    from rl_agent.chat_template import load_tokenizer, tokenize_prompt, tokenize_prompts
    from rl_agent.registry import create_loop, create_script_reader
    from rl_agent.runner import AgentRunner
    from rl_agent.sandbox import Grader
    from rl_agent.tools.base import FunctionTool, Tool
    from rl_agent.validation import validate_output

__all__ = [
    "AgentError",
    "AgentLoop",
    "AgentLoopOutput",
    "AgentRunner",
    "CodeResult",
    "Failure",
    "FailureError",
    "FailureKind",
    "FunctionTool",
    "Generator",
    "Grader",
    "GroupResult",
    "LoopError",
    "Message",
    "OnFailure",
    "OutputError",
    "ParsedTurn",
    "PluginError",
    "Policy",
    "RolloutResult",
    "RowError",
    "SandboxError",
    "SandboxLimits",
    "SandboxReport",
    "ScriptError",
    "TemplateError",
    "Tokenizer",
    "TokenizerError",
    "Tool",
    "ToolCall",
    "ToolDefinitionError",
    "ToolError",
    "ToolResult",
    "create_loop",
    "create_script_reader",
    "load_tokenizer",
    "tokenize_prompt",
    "tokenize_prompts",
    "validate_output",
]

_HOMES = {
    "AgentRunner": "runner",
    "FunctionTool": "tools.base",
    "Grader": "sandbox",
    "Tool": "tools.base",
    "create_loop": "registry",
    "create_script_reader": "registry",
    "load_tokenizer": "chat_template",
    "tokenize_prompt": "chat_template",
    "tokenize_prompts": "chat_template",
    "validate_output": "validation",
}
"""Names that importing `rl_agent.base` does not need, by module."""


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"rl_agent.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
