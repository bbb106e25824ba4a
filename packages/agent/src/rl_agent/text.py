"""Parsing of what the policy wrote; its text, and any other of foreign code, is made well formed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rl_agent.errors import FailureError, described, is_foreign
from rl_agent.types import Failure, FailureKind, well_formed

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_agent.types import ParsedTurn


def parse_turn(parse: Callable[[str], ParsedTurn], text: str) -> ParsedTurn:
    """Parse a turn of the model, whose JSON may spell lone surrogates.

    Raises:
        FailureError: the parser raised, or returned something else than a `ParsedTurn`.
    """
    try:
        turn = parse(text)
        calls = [
            replace(call, name=well_formed(call.name), arguments=well_formed(call.arguments)) for call in turn.calls
        ]
        return replace(
            turn, content=well_formed(turn.content), reasoning=well_formed(turn.reasoning), calls=tuple(calls)
        )
    except BaseException as error:
        if not is_foreign(error):
            raise
        message = f"the tool-call parser raised {described(error)}"
        raise FailureError(
            Failure(kind=FailureKind.TOOL, stage="parser", message=message, is_retryable=False)
        ) from error
