"""Loads the tokenizer of a Hugging Face model folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_agent.errors import TokenizerError

if TYPE_CHECKING:
    from rl_agent.types import Tokenizer


def load_tokenizer(model_path: str) -> Tokenizer:
    """The tokenizer of a model folder or hub name, by transformers (`pip install 'rl-agent[hf]'`).

    Raises:
        TokenizerError: transformers is not installed, or the folder holds no tokenizer that it can load.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerError("loading a tokenizer needs transformers: pip install 'rl-agent[hf]'") from error
    try:
        return AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"no tokenizer can be loaded from {model_path!r}: {error}") from error
