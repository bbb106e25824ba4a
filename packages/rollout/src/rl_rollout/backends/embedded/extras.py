"""What some requests ask for beside their tokens: top-k and prompt log-probs, and the experts that tokens went to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from rl_rollout.types import GenerateRequest


@dataclass(slots=True)
class Extras:
    """What was gathered for one request. V vocabulary, N MoE layers, K experts per token."""

    request: GenerateRequest
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list[tuple[tuple[int, float], ...]])
    prompt_logprobs: tuple[float, ...] = ()
    experts: list[Any] = field(default_factory=list[Any])
    """Per token that was fed, in order: N lists of K expert ids."""

    def note_prompt(self, logits: Tensor, experts: Tensor | None) -> None:
        """Logits [P - 1, V] and experts [P - 1, N, K] of the prompt's tokens but the last."""
        if self.request.returns_prompt_logprobs:
            following = torch.tensor(self.request.prompt_token_ids[1:], device=logits.device)
            logprobs = logits.log_softmax(dim=-1).gather(-1, following[:, None])[:, 0]
            self.prompt_logprobs = tuple(logprobs.tolist())
        if experts is not None:
            self.experts.extend(experts.tolist())

    def note_step(self, distribution: Tensor, experts: Tensor | None) -> None:
        """Log-probs [V] that the newest token was drawn from, and experts [N, K] of the token that was fed."""
        if self.request.num_top_logprobs:
            values, ids = distribution.topk(min(self.request.num_top_logprobs, distribution.shape[-1]))
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            # What top-k and top-p have cut off has no log-prob.
            self.top_logprobs.append(tuple(pair for pair in pairs if pair[1] > float("-inf")))
        if experts is not None:
            self.experts.append(experts.tolist())

    def columns(self) -> dict[str, Any]:
        """The fields of the output."""
        experts = tuple(tuple(map(tuple, token)) for token in self.experts)
        return {
            "top_logprobs": tuple(self.top_logprobs),
            "prompt_logprobs": self.prompt_logprobs,
            "routed_experts": experts if self.request.returns_routed_experts else (),
        }


class ExpertRecorder:
    """Writes down which experts the routers of a model chose, while it is on.

    Transformers' top-k routers return the chosen ids, int64 [T, K], as their last value.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.is_on = False
        self.does_tell = False
        """Whether there are routers, and all of them tell; found out when a model is loaded."""
        self._found: list[Tensor] = []
        routers = [each for each in module.modules() if "Router" in type(each).__name__]
        for router in routers:
            router.register_forward_hook(self._record)
        self._num_routers = len(routers)

    def _record(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        del module, arguments
        chosen = output[-1] if isinstance(output, tuple) else output
        if self.is_on and not chosen.is_floating_point():
            self._found.append(chosen)

    def take(self) -> Tensor | None:
        """[T, N, K] of the forward pass since the last call; None if it was off, or a router did not tell."""
        found, self._found = self._found, []
        return torch.stack(found, dim=1) if found and len(found) == self._num_routers else None
