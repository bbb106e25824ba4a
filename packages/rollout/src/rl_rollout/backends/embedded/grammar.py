"""Grammars of structured outputs: JSON schemas, regular expressions and choices as masks of the next token.

By llguidance (`pip install 'rl-rollout[structured]'`), which takes 0.4 to 0.9 ms a mask with vocabularies of 49k and
262k on one core, and depends on nothing; xgrammar, the other library for this, depends on transformers and tvm-ffi.
"""

# llguidance has no types for some of its values.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_rollout.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rl_rollout.types import GenerateRequest, SamplingParams

_NUM_GRAMMARS = 64
"""Compiled grammars that are kept."""
_WHITESPACE = r"\n? {0,16}"
"""White space between the parts of a JSON text: a new line and its indentation, at most."""


class Grammars:
    """Compiler of a model's grammars, used from any thread.

    Args:
        model_path: Folder of the model, for its tokenizer.
        vocab_size: Number of logits.
        eos_token_ids: Token ids that end a text.
    """

    def __init__(self, model_path: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path, self._vocab_size, self._eos = Path(model_path), vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def matcher(self, request: GenerateRequest) -> Matcher | None:
        """Matcher of a request's structure; None without one.

        A prompt that ends with sampled tokens (`sampled_spans`) is a completion that goes on: they are matched first.

        Raises:
            UnsupportedError: llguidance is not installed.
            RequestError: the structure is none, or the tokens to go on from are not of it.
        """
        grammar = _grammar_of(request.request_id, request.sampling_params)
        if grammar is None:
            return None
        with self._lock:
            found = self._compile(request.request_id, grammar).deep_copy()
        spans, prompt = request.sampled_spans, request.prompt_token_ids
        if spans and spans[-1][1] == len(prompt) and not found.consume_tokens(list(prompt[slice(*spans[-1])])):
            raise RequestError(
                f"request {request.request_id!r}: the sampled tokens at the end of the prompt are not of the structure "
                f"that the request asks for: {found.get_error()}"
            )
        return Matcher(found, self._vocab_size)

    def _compile(self, request_id: str, grammar: str) -> Any:
        from llguidance import LLMatcher

        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar]
        if self._tokenizer is None:
            self._tokenizer = _tokenizer_of(self._path, self._vocab_size, self._eos)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())
            raise RequestError(f"request {request_id!r}: its structure cannot be used: {reason}")
        self._compiled[grammar] = matcher
        if len(self._compiled) > _NUM_GRAMMARS:
            self._compiled.popitem(last=False)
        return matcher


class Matcher:
    """State of one request's structured output.

    Args:
        matcher: llguidance's matcher.
        vocab_size: Number of logits.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def mask(self) -> Tensor:
        """Tokens that may come next, bool [V]. None of them may, where the grammar has become too complex."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        return torch.from_numpy(allowed & (not self._matcher.is_error()))

    @property
    def error(self) -> str:
        """Why no token may come next; empty where some may."""
        return " ".join(self._matcher.get_error().partition("<state>")[0].split())

    def advance(self, token_id: int) -> None:
        """Go on by the token that was sampled."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)


def restricted(logits: Tensor, structured: Sequence[tuple[int, Matcher]]) -> Tensor:
    """Logits [B, V] with minus infinity where a row's matcher allows no token."""
    allowed = torch.stack([matcher.mask() for _, matcher in structured]).to(logits.device)
    rows = torch.tensor([row for row, _ in structured], device=logits.device)
    return logits.index_copy(0, rows, logits[rows].masked_fill(~allowed, float("-inf")))


def _grammar_of(request_id: str, params: SamplingParams) -> str | None:
    if params.json_schema is None and params.regex is None and not params.choice:
        return None
    try:
        from llguidance import LLMatcher, grammar_from
    except ImportError as error:
        raise UnsupportedError(
            f"request {request_id!r}: structured outputs need llguidance: pip install 'rl-rollout[structured]'"
        ) from error
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice:
        return grammar_from("choice", json.dumps(params.choice))
    assert params.json_schema is not None
    try:
        return LLMatcher.grammar_from_json_schema(params.json_schema, defaults={"whitespace_pattern": _WHITESPACE})
    except ValueError as error:
        raise RequestError(f"request {request_id!r}: json_schema is no JSON object: {error}") from error


def _tokenizer_of(folder: Path, vocab_size: int, eos_token_ids: list[int]) -> Any:
    """Llguidance's tokenizer of a model folder. One whose decoder it does not know is read token by token."""
    from llguidance import LLTokenizer, TokenizerWrapper

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedError(f"structured outputs need {file}, which is not there")
    try:
        return LLTokenizer(str(file), n_vocab=vocab_size, eos_token=eos_token_ids)
    except ValueError:
        return LLTokenizer(TokenizerWrapper(_Spelled(file, vocab_size, eos_token_ids)), eos_token=eos_token_ids)


class _Spelled:
    """Tokenizer by the text of each token."""

    bos_token_id = None

    def __init__(self, file: Path, vocab_size: int, eos_token_ids: list[int]) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = [token_id for token_id, token in added.items() if token.special]
        self.eos_token_id = eos_token_ids[0]
        spelled = (self._tokenizer.decode([each], skip_special_tokens=False) for each in range(vocab_size))
        self.tokens = [text.encode() or f"<{number}>".encode() for number, text in enumerate(spelled)]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
