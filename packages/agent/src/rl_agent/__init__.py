"""Agent loops that return trainable trajectories: tokens that the model emitted are never re-tokenised."""

from rl_agent.base import AgentLoop, Generator
from rl_agent.chat_template import load_tokenizer, tokenize_prompt, tokenize_prompts
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
from rl_agent.registry import create_loop, create_script_reader
from rl_agent.runner import AgentRunner, OnFailure
from rl_agent.sandbox import CodeResult, Grader, SandboxLimits, SandboxReport
from rl_agent.tools.base import FunctionTool, Tool
from rl_agent.types import (
    AgentLoopOutput,
    Failure,
    FailureKind,
    GroupResult,
    Message,
    ParsedTurn,
    RolloutResult,
    Tokenizer,
    ToolCall,
    ToolResult,
)
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
