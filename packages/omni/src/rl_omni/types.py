"""Types of rl-omni: the output of a picture request, and its queue columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_rollout.types import FinishReason, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rl_rollout.types import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureOutput(TokenOutput):
    """Output of a picture request: S denoising steps, of which `logprobs` and `weight_versions` have one entry each.

    `token_ids` is empty: nothing was generated as tokens.
    """

    latents: torch.Tensor
    """(S + 1, C, H, W) float32 latents before the first step and after each one."""
    timesteps: torch.Tensor
    """(S + 1,) float32 times t of the latents, falling from 1."""
    step_stds: torch.Tensor
    """(S,) float32 standard deviation of the noise that each step added; 0: the step was deterministic."""
    picture: torch.Tensor | None = None
    """(3, H', W') float32 picture, 0 to 1; None if the request ended before its last step."""


def columns_of(requests: Sequence[GenerateRequest], outputs: Sequence[PictureOutput]) -> dict[str, list[torch.Tensor]]:
    """Queue columns of finished pictures, each with a step axis first; what `DiffusionEngine` trains on.

    Returns:
        `prompt_token_ids` (P,), `latents` (S + 1, C, H, W), `timesteps` (S + 1,), `step_stds`, `loss_mask` (1 where
        noise was added), `rollout_logprobs` and `weight_versions`, all (S,), for every row. There is no
        `completion_token_ids`.

    Raises:
        ValueError: an output is unfinished, or of another request.
    """
    import torch

    for request, output in zip(requests, outputs, strict=True):
        if output.picture is None or output.finish_reason != FinishReason.STOP:
            raise ValueError(
                f"request {output.request_id!r} ended after {len(output.logprobs)} steps with reason "
                f"{output.finish_reason}; train on finished pictures alone"
            )
        if request.request_id != output.request_id:
            raise ValueError(f"output {output.request_id!r} is of another request than {request.request_id!r}")
    return {
        "prompt_token_ids": [torch.tensor(r.prompt_token_ids) for r in requests],
        "latents": [o.latents for o in outputs],
        "timesteps": [o.timesteps for o in outputs],
        "step_stds": [o.step_stds for o in outputs],
        "loss_mask": [(o.step_stds > 0).long() for o in outputs],
        "rollout_logprobs": [torch.tensor(o.logprobs, dtype=torch.float32) for o in outputs],
        "weight_versions": [torch.tensor(o.weight_versions) for o in outputs],
    }
