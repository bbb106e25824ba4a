"""Self-play loop: the policy plays every seat of a game against itself, and learns as the seat of the row."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rl_agent.base import AgentLoop
from rl_agent.chat_template import TurnTemplate
from rl_agent.errors import RowError
from rl_agent.loops.gym import call_environment, environment_failure, observed_messages
from rl_agent.registry import create_environments
from rl_agent.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_agent.base import Generator
    from rl_agent.types import AgentLoopOutput, Tokenizer


class SelfPlayLoop(AgentLoop):
    """Self-play loop over games with turns.

    A game has the interface of PettingZoo's AEC environments (https://pettingzoo.farama.org/api/aec):
    `possible_agents`, `agents`, `agent_selection`, `reset(seed=)`, `last()` and `step(action)`. An observation is text
    or chat messages, an action is the text of a turn. Each seat has a separate conversation, and the policy that learns
    generates all of them. The trajectory is that of the row's `seat`, and its reward the sum of the seat's.

    Args:
        server: Generator of tokens, such as a rollout server.
        tokenizer: Tokenizer of the served model.
        environment: Games, as `rl_agent.registry.create_environments` takes their name.
        environment_args: Their arguments, for rows that give none in `environment_args`.
        max_turns: Turns of all seats at most.
        step_timeout_s: Deadline of one call of the game, seconds.

    Raises:
        TemplateError: the chat template cannot continue a conversation.
        PluginError: there is no such game.
    """

    def __init__(
        self,
        server: Generator,
        tokenizer: Tokenizer,
        *,
        environment: str,
        environment_args: Mapping[str, Any] | None = None,
        max_turns: int = 64,
        step_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(server, tokenizer)
        if max_turns < 1 or step_timeout_s <= 0:
            raise ValueError(f"max_turns={max_turns} and step_timeout_s={step_timeout_s} must be positive")
        self._source = create_environments(environment, environment_args)
        self._max_turns, self._timeout_s = max_turns, step_timeout_s
        self._template = TurnTemplate(tokenizer)

    async def run(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        """Play one game.

        Raises:
            RowError: the row names no seat of the game, or arguments that it does not take.
            FailureError: the game failed or did not end, or a generation was aborted before its first token.
        """
        game = await self._made(row)
        sessions, rewards = dict[str, Session](), dict.fromkeys(game.possible_agents, 0.0)
        if (own := row.get("seat")) not in rewards:
            raise RowError(f"field 'seat' of the row is {own!r}; it needs one of {', '.join(rewards)}")
        turn, num_turns = await self._call(lambda: _opened(game, row, rewards), "reset"), 0
        while turn is not None:
            if (num_turns := num_turns + 1) > self._max_turns:
                raise environment_failure("step", f"the game did not end in {self._max_turns} turns (max_turns)")
            action = await self._turn(sessions, *turn, sampling_params)
            turn = await self._call(partial(_played, game, action, rewards), "step")
        if own not in sessions:
            raise environment_failure("step", f"seat {own!r} had no turn in the game")
        return sessions[own].finish(reward=rewards[own], metrics={"num_steps": float(num_turns)})

    async def close(self) -> None:
        """End what the source of games has started."""
        await self._source.close()

    async def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids of the game's first observation."""
        game = await self._made(row)
        turn = await self._call(lambda: _opened(game, row, dict.fromkeys(game.possible_agents, 0.0)), "reset")
        if turn is None:
            raise environment_failure("reset", "the game is over before its first turn")
        return self._template.prompt(self._template.escaped(observed_messages(turn[1], "reset"))[0]), ()

    async def _made(self, row: Mapping[str, Any]) -> Any:
        arguments, make = {**self._source.arguments, **(row.get("environment_args") or {})}, self._source.make
        return await self._call(lambda: make(**arguments), "make")

    async def _call(self, method: Callable[[], Any], stage: str) -> Any:
        return await call_environment(method, stage=stage, timeout_s=self._timeout_s)

    async def _turn(self, sessions: dict[str, Session], seat: str, shown: Any, params: Mapping[str, Any]) -> str:
        """Generate the turn of a seat in its conversation."""
        messages, _ = self._template.escaped(observed_messages(shown, "step"))
        if seat in sessions:
            sessions[seat].append(messages)
        else:
            prompt, own = self._template.prompt(messages), dict(params)
            if own.get("seed") is not None:  # with one seed, all seats would draw alike
                own["seed"] = (own["seed"] + 0x85EBCA6B * len(sessions)) % 2**31
            sessions[seat] = Session(self.server, self.tokenizer, prompt, own, template=self._template)
        await sessions[seat].generate()
        return sessions[seat].last_text


def _opened(game: Any, row: Mapping[str, Any], rewards: dict[str, float]) -> tuple[str, Any] | None:
    """Reset a game; returns the first turn as `_next`."""
    game.reset(seed=row.get("seed"))
    return _next(game, rewards)


def _played(game: Any, action: str, rewards: dict[str, float]) -> tuple[str, Any] | None:
    """Play an action; returns the next turn as `_next`."""
    game.step(action)
    return _next(game, rewards)


def _next(game: Any, rewards: dict[str, float]) -> tuple[str, Any] | None:
    """Seat that moves next and what it sees, None at the end; adds up the rewards of the seats on the way."""
    while game.agents:
        seat = game.agent_selection
        shown, reward, is_terminated, is_truncated, _ = game.last()
        rewards[seat] += float(reward)
        if not (is_terminated or is_truncated):
            return seat, shown
        game.step(None)
    return None
