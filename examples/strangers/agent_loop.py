"""Agent loop of a stranger: asks the row's prompt once, and returns what the model wrote."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from rl_agent.base import AgentLoop
from rl_agent.errors import RowError
from rl_agent.types import AgentLoopOutput
from rl_rollout.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping


class Loop(AgentLoop):
    """One question, one answer."""

    async def run(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        if not row.get("prompt"):
            raise RowError("the row has no `prompt`; give it chat messages")
        ids = self.tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(ids),
            sampling_params=SamplingParams(**sampling_params),
        )
        output = await self.server.generate(request)
        return AgentLoopOutput(
            prompt_token_ids=request.prompt_token_ids,
            completion_token_ids=output.token_ids,
            loss_mask=(1,) * len(output.token_ids),
            rollout_logprobs=output.logprobs,
            weight_versions=output.weight_versions,
            finish_reason=output.finish_reason,
            text=self.tokenizer.decode(output.token_ids, skip_special_tokens=True),
        )
