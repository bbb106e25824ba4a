"""Agent loops that produce trainable tokens: what the model emitted is never re-tokenised."""

from rl_agent._registry import create_loop
from rl_agent._runner import AgentRunner
from rl_agent._tokenizer import load_tokenizer
from rl_agent._validation import validate_output
from rl_agent.base import AgentLoop, Generator
from rl_agent.errors import (
    AgentError,
    FailureError,
    LoopError,
    OutputError,
    RowError,
    TemplateError,
    TokenizerError,
)
from rl_agent.types import AgentLoopOutput, Failure, FailureKind, Message, RolloutResult, Tokenizer

__all__ = [
    "AgentError",
    "AgentLoop",
    "AgentLoopOutput",
    "AgentRunner",
    "Failure",
    "FailureError",
    "FailureKind",
    "Generator",
    "LoopError",
    "Message",
    "OutputError",
    "RolloutResult",
    "RowError",
    "TemplateError",
    "Tokenizer",
    "TokenizerError",
    "create_loop",
    "load_tokenizer",
    "validate_output",
]
