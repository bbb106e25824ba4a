"""Agent loop `picture`: a prompt in, the denoising steps of one picture out."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from rl_agent.base import AgentLoop
from rl_agent.errors import RowError
from rl_agent.types import AgentLoopOutput
from rl_omni.pictures import data_url
from rl_rollout.errors import GenerationError
from rl_rollout.types import FinishReason, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping


class PictureLoop(AgentLoop):
    """Picture loop: the last message of a row's `prompt` is the prompt; of the sampling parameters it uses `seed`.

    The trajectory's text, which rewards are given, is the picture as a data URL of a PNG.
    """

    async def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids of the prompt by the pipeline's tokenizer, without special tokens.

        Raises:
            RowError: the row has no prompt of text.
        """
        messages = row.get("prompt") or [{}]
        text = messages if isinstance(messages, str) else messages[-1].get("content")
        if not isinstance(text, str) or not text:
            raise RowError(f"the prompt of a picture is the text of a row's last message; this one has {text!r:.80}")
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)), ()

    async def run(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        """Run one row.

        Raises:
            RowError: as `prompt`.
            GenerationError: the picture was aborted before its last step.
        """
        prompt, _ = await self.prompt(row)
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(seed=sampling_params.get("seed")),
        )
        output = await self.server.generate(request)
        if output.finish_reason != FinishReason.STOP:
            raise GenerationError(f"the picture ended after {len(output.logprobs)} steps: {output.finish_reason}")
        columns = {**output.columns}
        picture = columns.pop("picture")
        mask = [int(std > 0) for std in columns["step_stds"].tolist()]
        return AgentLoopOutput(
            prompt_token_ids=prompt,
            completion_token_ids=(),
            loss_mask=tuple(mask),
            rollout_logprobs=tuple(
                logprob if flag else 0.0 for logprob, flag in zip(output.logprobs, mask, strict=True)
            ),
            weight_versions=tuple(v if flag else -1 for v, flag in zip(output.weight_versions, mask, strict=True)),
            finish_reason=str(output.finish_reason),
            text=data_url(picture),
            columns=columns,
        )
