"""Sequence: state of one request in the engine, its extra outputs, and the sequences that need special treatment."""

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

    from rl_rollout.backends.embedded.grammar import Matcher
    from rl_rollout.backends.embedded.image_prompt import ImagePrompt
    from rl_rollout.types import GenerateRequest


@dataclass(slots=True)
class Extras:
    """Extra outputs of one request: top and prompt log-probs, routed experts.

    Shapes: V vocabulary, N MoE layers, K experts per token.
    """

    request: GenerateRequest
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list[tuple[tuple[int, float], ...]])
    prompt_logprobs: tuple[float, ...] = ()
    experts: list[Any] = field(default_factory=list[Any])
    """Expert ids of each token fed so far: N lists of K."""

    def wants_logits(self, start: int) -> bool:
        """Whether prompt log-probs are still needed from the logits of tokens from `start` on."""
        wanted = len(self.request.prompt_token_ids) - 1 if self.request.returns_prompt_logprobs else 0
        return max(start, len(self.prompt_logprobs)) < wanted

    def note_tokens(self, start: int, logits: Tensor | None, experts: Tensor | None) -> None:
        """Record logits [T, V] and experts [T, N, K] of tokens from `start` on; recomputed tokens are skipped."""
        if logits is not None:
            first = len(self.prompt_logprobs)
            following = self.request.prompt_token_ids[first + 1 : start + logits.shape[0] + 1]
            index = torch.tensor(following, dtype=torch.int64, device=logits.device)
            logprobs = logits[first - start :][: len(following)].log_softmax(dim=-1)
            self.prompt_logprobs += tuple(logprobs.gather(-1, index[:, None])[:, 0].tolist())
        if experts is not None and self.request.returns_routed_experts:
            self.experts.extend(experts[len(self.experts) - start :].tolist())

    def note_draw(self, scaled: Tensor) -> None:
        """Record the top log-probs of the newest token, from the logits [V] over temperature that it was drawn from."""
        if self.request.num_top_logprobs:
            values, ids = scaled.log_softmax(dim=-1).topk(min(self.request.num_top_logprobs, scaled.shape[-1]))
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            # Tokens that top-k or top-p removed have no log-prob.
            self.top_logprobs.append(tuple(pair for pair in pairs if pair[1] > float("-inf")))

    def forget_prompt(self) -> None:
        """Drop what was recorded of a prompt that has to be computed again."""
        self.prompt_logprobs = ()
        self.experts.clear()

    def columns(self) -> dict[str, Any]:
        """Fields of `TokenOutput`, by name."""
        return {
            "top_logprobs": tuple(self.top_logprobs),
            "prompt_logprobs": self.prompt_logprobs,
            "routed_experts": tuple(tuple(map(tuple, token)) for token in self.experts),
        }


class ExpertRecorder:
    """Recorder of routed experts: hooks on the routers of a model, which record their choice while `is_on`.

    Transformers' top-k routers return the chosen ids, int64 [T, K], as their last value.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.is_on = False
        self.reports_choice = False
        """Whether the model has routers, and all of them return their choice; determined when it is loaded."""
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
        """Experts [T, N, K] of the forward pass since the last call; None if it was off or a router returned none."""
        found, self._found = self._found, []
        return torch.stack(found, dim=1) if found and len(found) == self.num_routers else None


@dataclass(slots=True, eq=False)
class SequenceState:
    """State of one request, in addition to its row of the batch state."""

    request: GenerateRequest
    report_every: int
    """New tokens per streamed chunk: 1 streams every token, 0 nothing before the end."""
    limit: int
    """Length of prompt and completion at which it ends, tokens."""
    seed: int
    """Seed of the request, or the server's if it brought none."""
    arrival: int
    """Serial number of its arrival."""
    seen: ImagePrompt | None = None
    """Images of its prompt."""
    matcher: Matcher | None = None
    """Matcher of its structured output."""
    root: Hashable = None
    """Key of its prefix in the cache: number of weight updates, adapter, images."""
    blocks: list[int] = field(default_factory=list[int])
    """Blocks of the cache that it holds, in the order of positions."""
    num_reported: int = 0
    """Completion tokens that were streamed."""
    row: int = -1
    """Row in the batch; -1 while it waits."""
    expected: int = 0
    """Tokens of the longest completion that is remembered of its prompt; longer ones are admitted first."""
    since: float = 0.0
    """Time at which it began to wait, or entered the batch, by the engine's clock, seconds."""
    extras: Extras = field(init=False)
    """Extra outputs that it asked for."""

    def __post_init__(self) -> None:
        self.extras = Extras(self.request)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Prompt token ids."""
        return self.request.prompt_token_ids

    @property
    def reads_prompt(self) -> bool:
        """Whether outputs about the prompt are asked for, so that its prefill cannot be shared."""
        return self.request.returns_prompt_logprobs or self.request.returns_routed_experts

    @property
    def reads_steps(self) -> bool:
        """Whether outputs in addition to the token are requested at every decode step."""
        return self.request.num_top_logprobs > 0 or self.request.returns_routed_experts

    def due(self, length: int) -> range:
        """Positions of the tokens to stream now, when its row has `length` tokens.

        Unless every token is streamed, the newest is held back: a request that is resumed elsewhere from its chunks
        then never continues behind a token at which it would have stopped.
        """
        start = len(self.request.prompt_token_ids) + self.num_reported
        end = length if self.report_every == 1 else length - 1
        return range(start, end) if end - start >= self.report_every else range(0)

    @property
    def completion_start(self) -> int:
        """Position of its first completion token; one of the prompt where it resumes what was begun elsewhere."""
        spans, end = self.request.sampled_spans, len(self.prompt)
        return spans[-1][0] if spans and spans[-1][1] == end else end

    @property
    def draft_key(self) -> tuple[int, ...]:
        """Prompt of its completion, by which earlier ones are remembered."""
        return self.prompt[: self.completion_start]

    @property
    def truncates(self) -> bool:
        """Whether it asks for top-k or top-p sampling."""
        params = self.request.sampling_params
        return params.top_k > 0 or params.top_p < 1

    def stops(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Token ids at which it ends, given the model's end-of-sequence ids."""
        params = self.request.sampling_params
        return params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)

    def row_values(self, stop_token_ids: tuple[int, ...], adapter: int) -> RowValues:
        """Values of its row when it enters the batch state."""
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
        """Output of the request, from the first `length` entries of its row's columns."""
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
        """Error of a request whose logits are not finite."""
        if self.matcher is not None and (reason := self.matcher.error):
            return GenerationError(f"request {self.request.request_id!r}: its structured output ended: {reason}")
        return GenerationError(
            f"request {self.request.request_id!r}: the model's logits are not finite; "
            f"check the weights of version {weight_version}"
        )


@dataclass(slots=True)
class SpecialSequences:
    """Sequences of the batch that need more of a step than sampling at a temperature."""

    streaming: set[SequenceState] = field(default_factory=set[SequenceState])
    """Sequences that stream tokens before their end."""
    truncating: set[SequenceState] = field(default_factory=set[SequenceState])
    """Sequences with top-k or top-p."""
    greedy: set[SequenceState] = field(default_factory=set[SequenceState])
    """Sequences at temperature 0."""
    adapted: set[SequenceState] = field(default_factory=set[SequenceState])
    """Sequences with a LoRA adapter."""
    reading: set[SequenceState] = field(default_factory=set[SequenceState])
    """Sequences that asked for extra outputs."""
    shaped: set[SequenceState] = field(default_factory=set[SequenceState])
    """Sequences with penalties or min-p."""
    structured: dict[SequenceState, Matcher] = field(default_factory=dict["SequenceState", "Matcher"])
    """Sequences with a structured output, and their matchers."""

    @property
    def are_plain(self) -> bool:
        """Whether a step has nothing to do for them but sampling at a temperature."""
        return not self.truncating and self.take_drafts

    @property
    def take_drafts(self) -> bool:
        """Whether several tokens of a sequence may be sampled from one pass."""
        return not (self.reading or self.structured or self.shaped)

    def add(self, admitted: Sequence[SequenceState]) -> None:
        """Sort sequences that have entered the batch."""
        self.streaming.update(s for s in admitted if s.report_every)
        self.truncating.update(s for s in admitted if s.truncates)
        self.greedy.update(s for s in admitted if s.request.sampling_params.temperature == 0)
        self.adapted.update(s for s in admitted if s.request.adapter is not None)
        self.reading.update(s for s in admitted if s.reads_prompt or s.reads_steps)
        self.shaped.update(s for s in admitted if s.request.sampling_params.shapes_logits)
        self.structured.update((s, s.matcher) for s in admitted if s.matcher is not None)

    def discard(self, sequence: SequenceState) -> None:
        """Remove a sequence that has ended."""
        for each in (self.streaming, self.truncating, self.greedy, self.adapted, self.reading, self.shaped):
            each.discard(sequence)
        self.structured.pop(sequence, None)


def finish_reason(verdict: int) -> FinishReason | None:
    """Finish reason of a verdict: the sum of 1 (stop token), 2 (limit reached), 4 (logits not finite: None)."""
    if verdict >= 4:
        return None
    return FinishReason.STOP if verdict & 1 else FinishReason.LENGTH
