"""Draft history: earlier completions of each prompt, whose tokens are proposed as drafts and checked by the model.

Completions of a prompt resemble those of earlier epochs and of its group (RhymeRL, arXiv 2508.18588). No tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_rollout.backends.embedded.batch_state import BatchState
    from rl_rollout.backends.embedded.scheduling.sequence import SequenceState

    Prompt = tuple[int, ...]

MOST_COMPLETIONS = 64
"""Completions remembered per prompt, the newest: several epochs of a group."""
MOST_TOKENS = 4_000_000
"""Tokens remembered in all, those of prompts too; the prompts that ended no request for longest are forgotten first."""
MOST_CONTEXT = 8
"""Newest tokens that are looked for among earlier completions."""
_START = -1
"""Token before each completion, so that its beginning is found like any other place."""


class DraftHistory:
    """Draft history of one server, bounded in tokens.

    Args:
        most: Most tokens of a draft; with 0 nothing is remembered.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._completions: OrderedDict[Prompt, deque[tuple[int, ...]]] = OrderedDict()
        self._joined: dict[Prompt, np.ndarray] = {}
        """By prompt, all its completions in one array, each after a `_START`; made when it is first read."""
        self._num_tokens = 0

    def add(self, prompt: Prompt, completion: Sequence[int]) -> None:
        """Remember a completion."""
        if prompt not in self._completions:
            self._completions[prompt] = deque()
            self._num_tokens += len(prompt)
        known = self._completions[prompt]
        known.append(tuple(completion))
        self._num_tokens += len(completion)
        if len(known) > MOST_COMPLETIONS:
            self._num_tokens -= len(known.popleft())
        self._joined.pop(prompt, None)
        self._completions.move_to_end(prompt)
        while self._num_tokens > MOST_TOKENS and len(self._completions) > 1:
            oldest, dropped = self._completions.popitem(last=False)
            self._num_tokens -= len(oldest) + sum(len(each) for each in dropped)
            self._joined.pop(oldest, None)

    def expected_length(self, prompt: Prompt) -> int:
        """Tokens of the longest completion remembered of a prompt; 0 if there is none."""
        return max((len(each) for each in self._completions.get(prompt, ())), default=0)

    def of(self, table: BatchState, sequence: SequenceState) -> list[int]:
        """Next tokens of a sequence as earlier completions of its prompt had them; its last token is never drafted."""
        length, key = table.length_of(sequence.row), sequence.draft_key
        most = min(self.most, sequence.limit - length - 1)
        if most < 1 or key not in self._completions:
            return []
        first = max(len(key), length - MOST_CONTEXT)
        newest = table.tokens[sequence.row, first:length].tolist()
        return self.draft(key, newest, most, is_whole=first == len(key))

    def draft(self, prompt: Prompt, newest: Sequence[int], most: int, *, is_whole: bool) -> list[int]:
        """Most frequent continuation, up to `most` tokens, of the places that match the newest tokens longest.

        Where fewer than `MOST_CONTEXT` tokens match, and not the whole completion, it is no longer than the match.

        Args:
            prompt: Prompt token ids.
            newest: Newest tokens of the completion, in order.
            most: Most tokens of a draft.
            is_whole: Whether `newest` is the whole completion.
        """
        if prompt not in self._completions:
            return []
        if prompt not in self._joined:
            parts = [np.array((_START, *each), dtype=np.int32) for each in self._completions[prompt]]
            self._joined[prompt] = np.concatenate([*parts, [np.int32(_START)]])
        tokens, context = self._joined[prompt], [_START, *newest] if is_whole else newest
        places, matched = _longest_matches(tokens, context)
        most = most if matched == len(context) else min(most, matched)
        drafted: list[int] = []
        while len(drafted) < most and len(places := places[tokens[places] != _START]):
            following = tokens[places]
            token = Counter(following.tolist()).most_common(1)[0][0]
            drafted.append(token)
            places = places[following == token] + 1
        return drafted


def _longest_matches(tokens: np.ndarray, context: Sequence[int]) -> tuple[np.ndarray, int]:
    """Places after the longest matches of the context's end, newest first, and how many tokens match."""
    places, matched = np.flatnonzero(tokens[:-1] == context[-1]) + 1, 1
    for back in range(2, len(context) + 1):
        longer = places[places >= back]
        longer = longer[tokens[longer - back] == context[-back]]
        if not len(longer):
            break
        places, matched = longer, back
    return places[::-1], matched
