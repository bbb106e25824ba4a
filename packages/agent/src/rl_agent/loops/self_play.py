"""Self-play loop: one policy plays every seat of a game and learns as the row's, or several play and learn."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rl_agent.base import AgentLoop
from rl_agent.chat_template import TurnTemplate
from rl_agent.errors import LoopError, RowError
from rl_agent.loops.gym import call_environment, environment_failure, observed_messages
from rl_agent.registry import create_environments
from rl_agent.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from rl_agent.base import Generator
    from rl_agent.types import AgentLoopOutput, Tokenizer


class SelfPlayLoop(AgentLoop):
    """Self-play loop over games with turns.

    A game has the interface of PettingZoo's AEC environments (https://pettingzoo.farama.org/api/aec):
    `possible_agents`, `agents`, `agent_selection`, `reset(seed=)`, `last()` and `step(action)`. An observation is text
    or chat messages, an action is the text of a turn. Each seat has a separate conversation. One policy generates all
    of them, and the trajectory is that of the row's `seat`; or with `seats` several do, and there is a trajectory of
    each seat that moved, for the policy that plays it. A trajectory's reward is the sum of its seat's.

    Args:
        server: Generator of tokens, such as a rollout server.
        tokenizer: Tokenizer of the served model.
        environment: Games, as `rl_agent.registry.create_environments` takes their name.
        environment_args: Their arguments, for rows that give none in `environment_args`.
        seats: Name of the policy of every seat, such as `{white: a, black: b}`, where several policies play.
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
        seats: Mapping[str, str] | None = None,
        max_turns: int = 64,
        step_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(server, tokenizer)
        if max_turns < 1 or step_timeout_s <= 0:
            raise ValueError(f"max_turns={max_turns} and step_timeout_s={step_timeout_s} must be positive")
        self._source = create_environments(environment, environment_args)
        self._max_turns, self._timeout_s = max_turns, step_timeout_s
        self._policy_of = dict(seats or {})
        self._templates = {"": TurnTemplate(tokenizer)}

    async def run(
        self, sampling_params: dict[str, Any], row: Mapping[str, Any]
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Play one game.

        Raises:
            RowError: the row names no seat of the game, or arguments that it does not take.
            LoopError: `seats` are not those of the game, or name a policy that there is not.
            FailureError: the game failed or did not end, or a generation was aborted before its first token.
        """
        game = await self._made(row)
        sessions, rewards = dict[str, Session](), dict.fromkeys(game.possible_agents, 0.0)
        learning = self._learning(row, rewards)
        turn, num_turns = await self._call(lambda: _opened(game, row, rewards), "reset"), 0
        while turn is not None:
            if (num_turns := num_turns + 1) > self._max_turns:
                raise environment_failure("step", f"the game did not end in {self._max_turns} turns (max_turns)")
            action = await self._turn(sessions, *turn, sampling_params)
            turn = await self._call(partial(_played, game, action, rewards), "step")
        if not (moved := [seat for seat in learning if seat in sessions]):
            raise environment_failure("step", f"seat {' or '.join(map(repr, learning))} had no turn in the game")
        metrics = {"num_steps": float(num_turns)}
        made = [sessions[seat].finish(reward=rewards[seat], metrics=metrics) for seat in moved]
        return made if self._policy_of else made[0]

    def _learning(self, row: Mapping[str, Any], seats: Collection[str]) -> list[str]:
        """Seats whose trajectories are learned from: with several policies all of them, else the row's."""
        if self._policy_of:
            if set(self._policy_of) != set(seats):
                given = ", ".join(self._policy_of)
                raise LoopError(f"option seats has {given}; it needs those of the game: {', '.join(seats)}")
            for name in self._policy_of.values():
                self.policy(name)
            return [*seats]
        own = row.get("seat")
        if not isinstance(own, str) or own not in seats:
            raise RowError(f"field 'seat' of the row is {own!r}; it needs one of {', '.join(seats)}")
        return [own]

    async def close(self) -> None:
        """End what the source of games has started."""
        await self._source.close()

    async def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids of the game's first observation."""
        game = await self._made(row)
        rewards = dict.fromkeys(game.possible_agents, 0.0)
        self._learning(row, rewards)
        turn = await self._call(lambda: _opened(game, row, rewards), "reset")
        if turn is None:
            raise environment_failure("reset", "the game is over before its first turn")
        template = self._template(self._policy_of.get(turn[0], ""))
        return template.prompt(template.escaped(observed_messages(turn[1], "reset"))[0]), ()

    def _template(self, policy: str) -> TurnTemplate:
        if policy not in self._templates:
            self._templates[policy] = TurnTemplate(self.policy(policy).tokenizer)
        return self._templates[policy]

    async def _made(self, row: Mapping[str, Any]) -> Any:
        arguments, make = {**self._source.arguments, **(row.get("environment_args") or {})}, self._source.make
        return await self._call(lambda: make(**arguments), "make")

    async def _call(self, method: Callable[[], Any], stage: str) -> Any:
        return await call_environment(method, stage=stage, timeout_s=self._timeout_s)

    async def _turn(self, sessions: dict[str, Session], seat: str, shown: Any, params: Mapping[str, Any]) -> str:
        """Generate the turn of a seat in its conversation."""
        template = self._template(name := self._policy_of.get(seat, ""))
        messages, _ = template.escaped(observed_messages(shown, "step"))
        if seat in sessions:
            sessions[seat].append(messages)
        else:
            prompt, own, policy = template.prompt(messages), dict(params), self.policy(name)
            if own.get("seed") is not None:  # with one seed, all seats would draw alike
                own["seed"] = (own["seed"] + 0x85EBCA6B * len(sessions)) % 2**31
            sessions[seat] = Session(policy.server, policy.tokenizer, prompt, own, template=template, policy=name)
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
