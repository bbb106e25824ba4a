"""The experts that tokens were routed to, put together from what the generations of one trajectory told. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_agent.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_agent.types import RoutedToken
    from rl_rollout.types import TokenOutput


def add_experts(known: list[RoutedToken], num_prompt_tokens: int, output: TokenOutput) -> None:
    """Add what a generation told to what is known of the tokens before.

    A server feeds a prompt anew and tells of its tokens again; what was told first stays, for with those experts a
    token was sampled. What nobody told is an empty entry until somebody does.

    Args:
        known: Per token from the prompt's first on; grows.
        num_prompt_tokens: Of the request.
        output: Its answer.

    Raises:
        OutputError: the server told of another number of tokens than it was fed.
    """
    told, num_fed = output.routed_experts, num_prompt_tokens + len(output.token_ids) - 1
    if not told:
        return
    if len(told) != num_fed:
        raise OutputError(
            f"the server told the experts of {len(told)} tokens, and was fed {num_fed} ({num_prompt_tokens} of the "
            f"prompt, {len(output.token_ids)} generated, the last never fed); it is not known which tokens they are of"
        )
    known += [()] * (num_fed - len(known))
    known[:] = [before or now for before, now in zip(known, told, strict=True)]


def finished(known: Sequence[RoutedToken], num_tokens: int) -> tuple[RoutedToken, ...]:
    """Of a trajectory of `num_tokens` tokens, the last one left out; empty if nothing was told at all."""
    if not any(known):
        return ()
    return (*known[: num_tokens - 1], *[()] * (num_tokens - 1 - len(known)))
