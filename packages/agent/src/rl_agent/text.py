"""Text of foreign code: tools, environments, parsers, dataset rows and clients of the proxy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rl_agent.errors import FailureError, described, is_foreign
from rl_agent.types import Failure, FailureKind, readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_agent.types import ParsedTurn

T = TypeVar("T")


def well_formed(value: T) -> T:
    r"""Replace lone surrogates, which no tokenizer and no wire format takes, by U+FFFD; nested containers included.

    JSON can spell them (`"\ud800"`), and text that was cut inside a UTF-16 pair holds them.
    """
    found: Any = value
    if isinstance(found, str):
        found = readable(found)
    elif isinstance(found, Mapping):
        given = cast("Mapping[Any, Any]", found)
        found = {well_formed(name): well_formed(each) for name, each in given.items()}
    elif type(found) in (list, tuple):
        found = type(found)(well_formed(each) for each in found)
    return cast("T", found)


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
