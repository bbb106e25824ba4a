"""Sequence: the state of one request in the engine, and which sequences of a batch are special."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rl_rollout.backends.embedded.batch_state import RowValues
from rl_rollout.errors import GenerationError
from rl_rollout.types import FinishReason, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from rl_rollout.backends.embedded.multimodal import ImagePrompt
    from rl_rollout.types import GenerateRequest


@dataclass(slots=True)
class Extras:
    """Extras collected for one request. V vocabulary, N MoE layers, K experts per token."""

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


@dataclass(slots=True, eq=False)
class SequenceState:
    """State of a request, beside its row of the batch table."""

    request: GenerateRequest
    told_every: int
    """Tokens after which the new ones are handed out; 1 is each at once, 0 none before the end."""
    limit: int
    """Length at which it ends, tokens."""
    seed: int
    """Its own, or one of the server's stream."""
    arrival: int
    """Serial number; the smaller, the older."""
    seen: ImagePrompt | None = None
    """Images of its prompt."""
    root: Hashable = None
    """Cache key beside the tokens: the weights, the adapter, the images."""
    blocks: list[int] = field(default_factory=list[int])
    """Of the cache, in the order of positions."""
    num_told: int = 0
    """Tokens that were handed out."""
    row: int = -1
    """Its row in the batch; -1 while it waits."""
    since: float = 0.0
    """When it began to wait, or entered the batch, by the engine's clock, seconds."""
    extras: Extras = field(init=False)
    """Extra outputs that it asked for."""

    def __post_init__(self) -> None:
        self.extras = Extras(self.request)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its prompt's token ids."""
        return self.request.prompt_token_ids

    @property
    def reads_prompt(self) -> bool:
        """Whether something is to be told about the prompt, so that it is computed for this request alone."""
        return self.request.returns_prompt_logprobs or self.request.returns_routed_experts

    @property
    def reads_steps(self) -> bool:
        """Whether something beside the token is to be told about every step."""
        return self.request.num_top_logprobs > 0 or self.request.returns_routed_experts

    def due(self, length: int) -> range:
        """Positions of the tokens that are to be handed out now, when its row has `length` tokens.

        The newest waits unless each is handed out at once: what is known of a request that was lost then never ends
        with a token at which it would have stopped.
        """
        start = len(self.request.prompt_token_ids) + self.num_told
        end = length if self.told_every == 1 else length - 1
        return range(start, end) if end - start >= self.told_every else range(0)

    @property
    def truncates(self) -> bool:
        """Whether it asks for top-k or top-p."""
        params = self.request.sampling_params
        return params.top_k > 0 or params.top_p < 1

    def stops(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Ids at which it ends, where the model's are these."""
        params = self.request.sampling_params
        return params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)

    def row_values(self, stop_token_ids: tuple[int, ...], adapter: int) -> RowValues:
        """Row values with which it enters the batch table."""
        params = self.request.sampling_params
        return RowValues(
            token_ids=self.request.prompt_token_ids,
            limit=self.limit,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=self.seed,
            stop_token_ids=stop_token_ids,
            adapter=adapter,
            shift=0 if self.seen is None else self.seen.shift,
        )

    def output(
        self, ids: list[int], logprobs: list[float], versions: list[int], length: int, reason: FinishReason
    ) -> TokenOutput:
        """Cut the completion out of its row's columns, of which the first `length` entries count."""
        completion = slice(len(self.request.prompt_token_ids), length)
        return TokenOutput(
            request_id=self.request.request_id,
            token_ids=tuple(ids[completion]),
            logprobs=tuple(logprobs[completion]),
            weight_versions=tuple(versions[completion]),
            finish_reason=reason,
            **self.extras.columns(),
        )

    def poisoned(self, weight_version: int) -> GenerationError:
        """Error for logits that are not finite."""
        return GenerationError(
            f"request {self.request.request_id!r}: the model's logits are not finite; "
            f"check the weights of version {weight_version}"
        )


@dataclass(slots=True)
class SpecialSequences:
    """Sequences of the batch for which a step does something beside drawing by temperature."""

    streaming: set[SequenceState] = field(default_factory=set[SequenceState])
    """They are told tokens before the end."""
    truncating: set[SequenceState] = field(default_factory=set[SequenceState])
    greedy: set[SequenceState] = field(default_factory=set[SequenceState])
    adapted: set[SequenceState] = field(default_factory=set[SequenceState])
    """They have an adapter."""
    reading: set[SequenceState] = field(default_factory=set[SequenceState])
    """They are told something beside tokens."""

    def add(self, admitted: Sequence[SequenceState]) -> None:
        """They are in the batch now."""
        self.streaming.update(s for s in admitted if s.told_every)
        self.truncating.update(s for s in admitted if s.truncates)
        self.greedy.update(s for s in admitted if s.request.sampling_params.temperature == 0)
        self.adapted.update(s for s in admitted if s.request.adapter is not None)
        self.reading.update(s for s in admitted if s.reads_prompt or s.reads_steps)

    def discard(self, sequence: SequenceState) -> None:
        """It has ended."""
        for each in (self.streaming, self.truncating, self.greedy, self.adapted, self.reading):
            each.discard(sequence)


def finish_reason(verdict: int) -> FinishReason | None:
    """Of a row's verdict: 1 stop token, 2 limit reached, 4 logits not finite, added up. None for the last."""
    if verdict >= 4:
        return None
    return FinishReason.STOP if verdict & 1 else FinishReason.LENGTH
