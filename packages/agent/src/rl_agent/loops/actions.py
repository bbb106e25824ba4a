"""Action loop: plays environments of Gymnasium's interface with a policy that answers with numbers, not with text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rl_agent.errors import FailureError
from rl_agent.loops.gym import GymLoop, call_environment, check_step, environment_failure, system_messages
from rl_agent.types import AgentLoopOutput, Failure, FailureKind
from rl_rollout.types import FinishReason, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_rollout.types import TokenOutput


class ActionLoop(GymLoop):
    """Action loop: `GymLoop` for a policy that sees the newest observation alone and generates actions.

    An observation is an image and a text (content parts), the text the same throughout an episode: the instruction. The
    server's output has a column `action`, (H, D) float32: H actions of D numbers, which the environment plays one after
    another. Its other columns have one entry, and so has its log-prob: each generation is one step of the trajectory,
    whose columns are those of its steps. `max_turns` bounds generations; of the sampling parameters `seed` is used.
    """

    async def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids of the first observation; its image is a column of the trajectory, not an image of the prompt."""
        return (await super().prompt(row))[0], ()

    async def _play(self, environment: Any, params: Mapping[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        prompt, images, info, _ = await self._reset(environment, row)
        outputs: list[TokenOutput] = []
        observation: Any = None
        reward, num_steps, end = 0.0, 0, ""
        while not end:
            outputs.append(await self._generate(prompt, images, params, len(outputs)))
            for action in outputs[-1].columns["action"].numpy():
                step = await call_environment(environment.step, action, timeout_s=self._timeout_s)
                observation, gain, is_terminated, is_truncated, info = check_step(step)
                reward, num_steps = reward + gain, num_steps + 1
                if is_terminated or is_truncated:
                    end = "terminated" if is_terminated else "truncated"
                    break
            if not end and len(outputs) == self._max_turns:
                end = "max_turns"
            if not end:
                messages, images, _ = self._messages(observation, "step")
                if self._template.prompt([*system_messages(row), *messages]) != prompt:
                    raise environment_failure("step", "the text of its observation is not that of the first one")
        import torch

        names = [name for name in outputs[0].columns if name != "action"]
        return AgentLoopOutput(
            prompt_token_ids=prompt,
            completion_token_ids=(),
            loss_mask=(1,) * len(outputs),
            rollout_logprobs=tuple(output.logprobs[0] for output in outputs),
            weight_versions=tuple(output.weight_versions[0] for output in outputs),
            finish_reason=FinishReason.STOP.value,
            text=f"{end} after {num_steps} actions",
            reward=reward,
            num_turns=len(outputs),
            metrics={"num_steps": float(num_steps)},
            extra_fields={"end": end, "info": info},
            columns={name: torch.cat([output.columns[name] for output in outputs]) for name in names},
        )

    async def _generate(
        self, prompt: tuple[int, ...], images: tuple[str, ...], params: Mapping[str, Any], turn: int
    ) -> TokenOutput:
        seed = params.get("seed")
        request = GenerateRequest(
            request_id=uuid4().hex,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(seed=None if seed is None else (seed + 0x9E3779B1 * turn) % 2**31),
            images=images,
        )
        output = await self.server.generate(request)
        if output.finish_reason is not FinishReason.STOP or "action" not in output.columns:
            reason = f"the generation ended with reason {output.finish_reason.value!r} and without an action"
            raise FailureError(
                Failure(kind=FailureKind.GENERATION, stage="generate", message=reason, is_retryable=True)
            )
        return output
