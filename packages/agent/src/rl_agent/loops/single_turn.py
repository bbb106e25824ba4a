"""Single-turn loop: one prompt, one generation, one trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_agent.base import AgentLoop
from rl_agent.chat_template import tokenize_prompt
from rl_agent.session import Session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_agent.types import AgentLoopOutput


class SingleTurnLoop(AgentLoop):
    """Single-turn loop: renders a row's `prompt` by the chat template, and generates once."""

    async def run(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        """Run one row.

        Args:
            sampling_params: Fields of `rl_rollout.types.SamplingParams`.
            row: The row; `prompt` (chat messages), and `images` and `videos`, for places in them that bring none,
                are used.

        Raises:
            RowError: the row has no `prompt`, or it cannot be rendered.
            TemplateError: the tokenizer has no chat template.
            FailureError: the generation was aborted before its first token.
            OutputError: the server reported the experts of another number of tokens than there are.
        """
        prompt_token_ids, images = tokenize_prompt(self.tokenizer, row)
        session = Session(self.server, self.tokenizer, prompt_token_ids, sampling_params, images=images)
        await session.generate()
        return session.finish()
