"""One prompt, one generation, one trajectory."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from rl_agent.base import AgentLoop
from rl_agent.chat_template import tokenize_prompt
from rl_agent.errors import FailureError
from rl_agent.session import add_experts
from rl_agent.types import AgentLoopOutput, Failure, FailureKind, RoutedToken
from rl_rollout.types import GenerateRequest, SamplingParams


class SingleTurnLoop(AgentLoop):
    """Answers a row's `prompt` once: the prompt's ids are the chat template's, the completion's the sampler's own."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run one row.

        Args:
            sampling_params: Fields of `rl_rollout.types.SamplingParams`.
            **kwargs: The row; `prompt` (chat messages), and `images` and `videos`, for places in them that bring none,
                are used.

        Raises:
            RowError: the row has no `prompt`, or it cannot be rendered.
            TemplateError: the tokenizer has no chat template.
            FailureError: the generation was aborted before its first token.
            OutputError: the server told the experts of another number of tokens than there are.
        """
        prompt_token_ids, images = tokenize_prompt(self.tokenizer, kwargs)
        request_id = uuid4().hex
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=SamplingParams(**sampling_params),
            session_id=request_id,
            images=images,
        )
        start = time.perf_counter()
        output = await self.server.generate(request)
        generate_s = time.perf_counter() - start
        if not output.token_ids:
            reason = f"the generation ended with reason {output.finish_reason.value!r} before its first token"
            raise FailureError(
                Failure(kind=FailureKind.GENERATION, stage="generate", message=reason, is_retryable=True)
            )
        experts: list[RoutedToken] = []
        add_experts(experts, len(prompt_token_ids), output)
        return AgentLoopOutput(
            prompt_token_ids=prompt_token_ids,
            completion_token_ids=output.token_ids,
            loss_mask=(1,) * len(output.token_ids),
            rollout_logprobs=output.logprobs,
            weight_versions=output.weight_versions,
            finish_reason=output.finish_reason.value,
            text=self.tokenizer.decode(output.token_ids, skip_special_tokens=True),
            routed_experts=tuple(experts),
            images=images,
            metrics={"generate_s": generate_s},
        )
