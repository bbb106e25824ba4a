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

    def wants_logits(self, start: int) -> bool:
        """Whether the logits of tokens from `start` on tell something that is not known yet."""
        wanted = len(self.request.prompt_token_ids) - 1 if self.request.returns_prompt_logprobs else 0
        return max(start, len(self.prompt_logprobs)) < wanted

    def note_tokens(self, start: int, logits: Tensor | None, experts: Tensor | None) -> None:
        """Logits [T, V] and experts [T, N, K] of tokens from `start` on. What is computed again is not noted again."""
        if logits is not None:
            first = len(self.prompt_logprobs)
            following = self.request.prompt_token_ids[first + 1 : start + logits.shape[0] + 1]
            index = torch.tensor(following, dtype=torch.int64, device=logits.device)
            told = logits[first - start :][: len(following)].log_softmax(dim=-1)
            self.prompt_logprobs += tuple(told.gather(-1, index[:, None])[:, 0].tolist())
        if experts is not None and self.request.returns_routed_experts:
            self.experts.extend(experts[len(self.experts) - start :].tolist())

    def note_draw(self, scaled: Tensor) -> None:
        """Logits [V] over temperature that the newest token was drawn from."""
        if self.request.num_top_logprobs:
            values, ids = scaled.log_softmax(dim=-1).topk(min(self.request.num_top_logprobs, scaled.shape[-1]))
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            # What top-k and top-p have cut off has no log-prob.
            self.top_logprobs.append(tuple(pair for pair in pairs if pair[1] > float("-inf")))

    def forget_prompt(self) -> None:
        """Forget what was told of a prompt that is not computed to its end."""
        self.prompt_logprobs = ()
        self.experts.clear()

    def columns(self) -> dict[str, Any]:
        """The fields of the output."""
        return {
            "top_logprobs": tuple(self.top_logprobs),
            "prompt_logprobs": self.prompt_logprobs,
            "routed_experts": tuple(tuple(map(tuple, token)) for token in self.experts),
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
        self.num_routers = len(routers)

    def _record(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        del module, arguments
        chosen = output[-1] if isinstance(output, tuple) else output
        if self.is_on and not chosen.is_floating_point():
            self._found.append(chosen)

    def take(self) -> Tensor | None:
        """[T, N, K] of the forward pass since the last call; None if it was off, or a router did not tell."""
        found, self._found = self._found, []
        return torch.stack(found, dim=1) if found and len(found) == self.num_routers else None
