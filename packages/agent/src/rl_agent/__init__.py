"""Agent loops that produce trainable tokens: what the model emitted is never re-tokenised."""

from rl_agent._chat import tokenize_prompt
from rl_agent._groups import GroupResult, OnFailure
from rl_agent._registry import create_loop
from rl_agent._runner import AgentRunner
from rl_agent._tokenizer import load_tokenizer
from rl_agent._tools import FunctionTool, Tool
from rl_agent._validation import validate_output
from rl_agent.base import AgentLoop, Generator
from rl_agent.errors import (
    AgentError,
    FailureError,
    LoopError,
    OutputError,
    PluginError,
    RowError,
    SandboxError,
    TemplateError,
    TokenizerError,
    ToolDefinitionError,
    ToolError,
)
from rl_agent.sandbox import CodeResult, Grader, SandboxLimits, SandboxReport
from rl_agent.types import (
    AgentLoopOutput,
    Failure,
    FailureKind,
    Message,
    ParsedTurn,
    RolloutResult,
    Tokenizer,
    ToolCall,
    ToolResult,
)

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
    "RolloutResult",
    "RowError",
    "SandboxError",
    "SandboxLimits",
    "SandboxReport",
    "TemplateError",
    "Tokenizer",
    "TokenizerError",
    "Tool",
    "ToolCall",
    "ToolDefinitionError",
    "ToolError",
    "ToolResult",
    "create_loop",
    "load_tokenizer",
    "tokenize_prompt",
    "validate_output",
]
