"""The tokenizer of a Hugging Face model folder, and its special tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_agent.errors import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        return AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"no tokenizer can be loaded from {model_path!r}: {error}") from error


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Every special token and its id.

    `all_special_tokens` names those that have a role, such as the end of a sequence. Many model folders (Llama 3,
    gpt-oss) only flag the others, headers of turns among them, which text can spell out all the same.
    """
    named: tuple[Any, Any] = (getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ()))
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return dict(zip(*named, strict=True)) | {each.content: i for i, each in added.items() if each.special}
