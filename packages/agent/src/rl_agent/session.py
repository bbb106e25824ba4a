"""Session: one conversation that grows by generations and context, appended token by token."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rl_agent.errors import FailureError, OutputError, TemplateError
from rl_agent.types import AgentLoopOutput, Failure, FailureKind, readable
from rl_rollout.types import FinishReason, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_agent.base import Generator
    from rl_agent.chat_template import TurnTemplate
    from rl_agent.types import Message, RoutedToken, Tokenizer
    from rl_rollout.types import TokenOutput


class Session:
    """Session: one trajectory in progress. Tokens of the model stay unchanged; everything else is appended.

    Args:
        server: Generator of tokens, such as a rollout server.
        tokenizer: Tokenizer of the served model.
        prompt_token_ids: Token ids of the prompt.
        sampling_params: Fields of `SamplingParams`; `max_new_tokens` bounds each generation.
        max_completion_tokens: Most tokens after the prompt, context included; None leaves it to the server.
        images: Data URLs of the prompt's images.
        template: Turn template of the tokenizer; None for a session of one turn.
        policy: Name of the policy of server and tokenizer, where there are several.
    """

    def __init__(
        self,
        server: Generator,
        tokenizer: Tokenizer,
        prompt_token_ids: tuple[int, ...],
        sampling_params: Mapping[str, Any],
        *,
        max_completion_tokens: int | None = None,
        images: Sequence[str] = (),
        template: TurnTemplate | None = None,
        policy: str = "",
    ) -> None:
        self._policy = policy
        self._server = server
        self._tokenizer = tokenizer
        self._template = template
        self._params = SamplingParams(**sampling_params)
        self._max_tokens = max_completion_tokens
        self._id = uuid4().hex
        self._prompt_token_ids = prompt_token_ids
        self._images = list(images)
        self._token_ids: tuple[int, ...] = ()
        self._mask: tuple[int, ...] = ()
        self._sampled_spans: list[tuple[int, int]] = []
        self._logprobs: tuple[float, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._experts: list[RoutedToken] = []
        self._num_added = 0
        """Tokens that images have in addition to their placeholder ids, as far as the server reported experts."""
        self._generate_s = 0.0
        self._last: TokenOutput | None = None
        self.num_turns = 0
        """Number of generations so far."""

    async def generate(self) -> None:
        """Generate the next turn.

        Raises:
            FailureError: the generation was aborted before its first token.
            OutputError: the server reported the experts of another number of tokens than there are.
        """
        params = self._params
        if self._max_tokens is not None:
            params = replace(params, max_new_tokens=min(params.max_new_tokens, self._max_tokens - self.num_tokens))
        if params.seed is not None and self.num_turns:  # with one seed, all turns would repeat the draws of the first
            params = replace(params, seed=(params.seed + 0x9E3779B1 * self.num_turns) % 2**31)
        request = GenerateRequest(
            request_id=f"{self._id}-{self.num_turns}",
            prompt_token_ids=self._prompt_token_ids + self._token_ids,
            sampling_params=params,
            session_id=self._id,
            images=tuple(self._images),
            sampled_spans=tuple(self._sampled_spans),
        )
        start = time.perf_counter()
        output = await self._server.generate(request)
        self._generate_s += time.perf_counter() - start
        if not output.token_ids:
            reason = f"the generation ended with reason {output.finish_reason.value!r} before its first token"
            raise FailureError(
                Failure(kind=FailureKind.GENERATION, stage="generate", message=reason, is_retryable=True)
            )
        if output.routed_experts and request.images:  # one entry for each token of an image, which is one id here
            num_fed = len(request.prompt_token_ids) + len(output.token_ids) - 1
            self._num_added = max(0, len(output.routed_experts) - num_fed)
        add_experts(self._experts, len(request.prompt_token_ids) + self._num_added, output)
        start_at = len(request.prompt_token_ids)
        self._sampled_spans.append((start_at, start_at + len(output.token_ids)))
        self._token_ids += tuple(output.token_ids)
        self._mask += (1,) * len(output.token_ids)
        self._logprobs += tuple(output.logprobs)
        self._versions += tuple(output.weight_versions)
        self._last = output
        self.num_turns += 1

    def append(self, messages: Sequence[Message], images: Sequence[str] = ()) -> bool:
        """Append tool answers or user messages; returns False, and appends nothing, if no room for a turn is left.

        Raises:
            FailureError: the chat template refuses these messages.
        """
        assert self._last is not None, "the model writes first"
        assert self._template is not None, "a session of several turns has a template"
        last = self._last.token_ids[-1]
        try:
            ids = self._template.continuation(messages, last_token_id=last, is_stopped=self.is_stopped)
        except TemplateError as error:
            failure = Failure(kind=FailureKind.LOOP, stage="template", message=str(error), is_retryable=False)
            raise FailureError(failure) from error
        if self._max_tokens is not None and self.num_tokens + len(ids) >= self._max_tokens:
            return False
        self._images += images
        self._token_ids += tuple(ids)
        self._mask += (0,) * len(ids)
        self._logprobs += (0.0,) * len(ids)
        self._versions += (-1,) * len(ids)
        return True

    @property
    def is_stopped(self) -> bool:
        """Whether the last generation ended at a stop token."""
        return self._last is not None and self._last.finish_reason is FinishReason.STOP

    @property
    def last_text(self) -> str:
        """Text of the last turn, without special tokens."""
        assert self._last is not None, "the model writes first"
        return readable(self._tokenizer.decode(self._last.token_ids, skip_special_tokens=True))

    @property
    def last_marked_text(self) -> str:
        """Text of the last turn for a parser: with special tokens, but without the stop token."""
        assert self._last is not None, "the model writes first"
        ids = self._last.token_ids[:-1] if self.is_stopped else self._last.token_ids
        return readable(self._tokenizer.decode(ids, skip_special_tokens=False))

    @property
    def num_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return len(self._token_ids)

    def finish(
        self,
        *,
        reward: float | None = None,
        turn_rewards: Sequence[float] = (),
        metrics: Mapping[str, float] | None = None,
        extra_fields: Mapping[str, Any] | None = None,
    ) -> AgentLoopOutput:
        """Finish the session as a trajectory, which ends with a turn of the model; its text is that turn's."""
        assert self._last is not None, "the model writes first"
        return AgentLoopOutput(
            prompt_token_ids=self._prompt_token_ids,
            completion_token_ids=self._token_ids,
            loss_mask=self._mask,
            rollout_logprobs=self._logprobs,
            weight_versions=self._versions,
            finish_reason=self._last.finish_reason.value,
            text=self.last_text,
            reward=reward,
            turn_rewards=tuple(turn_rewards),
            num_turns=self.num_turns,
            routed_experts=finished(self._experts, len(self._prompt_token_ids) + self._num_added + self.num_tokens),
            images=tuple(self._images),
            metrics={"generate_s": self._generate_s, **(metrics or {})},
            extra_fields=dict(extra_fields or {}),
            policy=self._policy,
        )


def add_experts(known: list[RoutedToken], num_prompt_tokens: int, output: TokenOutput) -> None:
    """Extend the routed experts of a trajectory by those of its newest generation.

    A server that feeds a prompt again reports its tokens again. The first report stays: the token was sampled with
    those experts. A token without a report has an empty entry.

    Args:
        known: Per token from the prompt's first on; grows.
        num_prompt_tokens: Length of the request's prompt.
        output: Its answer.

    Raises:
        OutputError: the server reported another number of tokens than it was fed.
    """
    reported, num_fed = output.routed_experts, num_prompt_tokens + len(output.token_ids) - 1
    if not reported:
        return
    if len(reported) != num_fed:
        raise OutputError(
            f"the server reported the experts of {len(reported)} tokens, and was fed {num_fed} ({num_prompt_tokens} of "
            f"the prompt, {len(output.token_ids)} generated, the last never fed); which tokens they are of is unknown"
        )
    known += [()] * (num_fed - len(known))
    known[:] = [first or new for first, new in zip(known, reported, strict=True)]


def finished(known: Sequence[RoutedToken], num_tokens: int) -> tuple[RoutedToken, ...]:
    """Routed experts of `num_tokens` tokens but the last; empty if no generation returned any."""
    if not any(known):
        return ()
    return (*known[: num_tokens - 1], *[()] * (num_tokens - 1 - len(known)))
