"""Stop strings: those that are one special token end a sample at the server, others are found in the decoded text."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rl_rollout.types import FinishReason, TokenOutput
from rl_tinker.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

    Stop = str | list[str | int] | None


class Stops:
    """Stop conditions of samples, by the tokenizer of the base model.

    Args:
        folder: Folder of the base model; without a `tokenizer.json`, strings are rejected.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        if file.is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))

    def split(self, stop: Stop) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids that end a sample, and strings that end it and are not one special token.

        Raises:
            RequestError: a string is empty, or the base model has no tokenizer here.
        """
        given = [stop] if isinstance(stop, str) else stop or []
        known = [each if isinstance(each, int) else self._single(each) for each in given]
        strings = tuple(str(each) for each, found in zip(given, known, strict=True) if found is None)
        if "" in strings:
            raise RequestError("stop has an empty string")
        if strings and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer.json in the model's folder; give token ids")
        return tuple(each for each in known if each is not None), strings

    def _single(self, text: str) -> int | None:
        if self._tokenizer is None or (found := self._tokenizer.token_to_id(text)) is None:
            return None
        added = self._tokenizer.get_added_tokens_decoder()
        return found if found in added else None

    def cut(self, output: TokenOutput, strings: tuple[str, ...]) -> TokenOutput:
        """The output up to the token in which a string is complete; unchanged without one."""
        assert self._tokenizer is not None, "`split` has checked it"
        if not self._has(output.token_ids, strings):
            return output
        low, high = 1, len(output.token_ids)
        while low < high:  # once complete, a string stays in the text
            middle = (low + high) // 2
            if self._has(output.token_ids[:middle], strings):
                high = middle
            else:
                low = middle + 1
        return replace(
            output,
            token_ids=output.token_ids[:low],
            logprobs=output.logprobs[:low],
            weight_versions=output.weight_versions[:low],
            top_logprobs=output.top_logprobs[:low],
            finish_reason=FinishReason.STOP,
        )

    def _has(self, ids: tuple[int, ...], strings: tuple[str, ...]) -> bool:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return any(each in text for each in strings)
