"""Resume of a partial completion on another replica: what is left to ask for, of its time too, and both joined."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from rl_rollout.errors import RequestTimeoutError

if TYPE_CHECKING:
    from rl_rollout.errors import ServerLostError
    from rl_rollout.types import GenerateRequest, TokenOutput


def deadline_of(request: GenerateRequest) -> float | None:
    """When its time is over, by the running loop's clock; None where it brings none."""
    return None if request.timeout_s is None else asyncio.get_running_loop().time() + request.timeout_s


def due(request: GenerateRequest, deadline: float | None) -> GenerateRequest:
    """The request with what is left of its time."""
    if deadline is None:
        return request
    return replace(request, timeout_s=max(round(deadline - asyncio.get_running_loop().time(), 3), 0.001))


def check_due(request: GenerateRequest, deadline: float | None, loss: ServerLostError) -> None:
    """See that there is time left to go on elsewhere after a loss.

    Raises:
        RequestTimeoutError: there is none; tells the loss.
    """
    if deadline is not None and asyncio.get_running_loop().time() >= deadline:
        raise RequestTimeoutError(
            f"request {request.request_id!r} was not done when its time was over, and its server was lost: {loss}"
        ) from loss


def rest_of(request: GenerateRequest, done: TokenOutput) -> GenerateRequest | None:
    """The request that goes on where `done` ended; None if there is nothing left to generate.

    Its prompt is the old one and the tokens that there are, each of which is generated, counted, and scored once.
    What is asked about the prompt was told with the first part.
    """
    left = request.sampling_params.max_new_tokens - len(done.token_ids)
    if left <= 0:
        return None
    num_known = len(request.prompt_token_ids) + len(done.token_ids)
    return replace(
        request,
        prompt_token_ids=request.prompt_token_ids + done.token_ids,
        sampled_spans=(*request.sampled_spans, (len(request.prompt_token_ids), num_known)),
        sampling_params=replace(request.sampling_params, max_new_tokens=left),
        returns_prompt_logprobs=request.returns_prompt_logprobs and not done.prompt_logprobs,
    )


def joined(done: TokenOutput, rest: TokenOutput, *, num_prompt_tokens: int) -> TokenOutput:
    """Two parts as one; the reason is that of the second.

    Args:
        done: The first part.
        rest: What `rest_of` brought.
        num_prompt_tokens: Of the first request.
    """
    # If the first part came without any, the second's are of the first's tokens too.
    prompt_logprobs = done.prompt_logprobs or rest.prompt_logprobs[: max(num_prompt_tokens - 1, 0)]
    return replace(
        rest,
        token_ids=done.token_ids + rest.token_ids,
        logprobs=done.logprobs + rest.logprobs,
        weight_versions=done.weight_versions + rest.weight_versions,
        top_logprobs=done.top_logprobs + rest.top_logprobs,
        prompt_logprobs=prompt_logprobs,
        # The second part tells the experts of all tokens that it was given, those of the first included.
        routed_experts=done.routed_experts + rest.routed_experts[len(done.routed_experts) :],
    )
