"""Kuhn poker, the game of the recipes `self_play` and `two_policies`, and how much is lost to the best opponent.

The game (Kuhn, 1950): a deck of three cards, one for each seat, an ante of 1, and a bet of 1.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from rl_agent.recipes.rows import Chat, Rows, draw_rows, row, said

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from rl_agent.recipes.rows import DataConfig

CARDS = "JQK"
MOVES = ("pass", "bet")
SEATS = ("first", "second")
DEALS = tuple("".join(deal) for deal in itertools.permutations(CARDS, 2))
SITUATIONS = tuple(card + history for card in CARDS for history in ("", "p", "b", "pb"))
"""All that a seat can know at its turn: its card, and the moves so far by their first letters."""
_DEMONSTRATED = dict(zip(SITUATIONS, (0.7, 0.8, 0.4, 0.3, 0.5, 0.6, 0.4, 0.6, 0.2, 0.3, 0.6, 0.7), strict=True))
"""Probability of a bet of the player that the warm start imitates: one who bluffs too much, and traps too much."""
_EDGE = 1 / 18
"""What the second seat wins at an equilibrium, in antes a game (Kuhn, 1950)."""
FINE = 1.0
"""What a seat loses by an answer that is no move, and counts as a pass."""


def rows(config: DataConfig, *, seed: int) -> Rows:
    """Rows of deals, one for each seat; the held-out ones are all twelve."""
    return draw_rows(config, _row, seed=seed)


class Kuhn:
    """Kuhn poker with the interface of PettingZoo's AEC environments."""

    possible_agents = SEATS

    def __init__(self, deal: str) -> None:
        self._deal = deal

    def reset(self, *, seed: int | None = None) -> None:
        """Deal."""
        del seed  # the deal is given
        self._history, self._gain, self._fines = "", None, [0.0, 0.0]
        self.agents = [*SEATS]
        """Seats that are in the game, or have not seen its end."""
        self.agent_selection = SEATS[0]
        """Seat that moves next."""

    @property
    def situation(self) -> str:
        """What the seat that moves next knows, as in `SITUATIONS`."""
        return self._deal[SEATS.index(self.agent_selection)] + self._history

    def last(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """What the seat sees, its reward since its last move, whether the game is over."""
        seat = SEATS.index(self.agent_selection)
        reward = 0.0 if self._gain is None else (self._gain, -self._gain)[seat] - self._fines[seat]
        return shown(self.situation), reward, self._gain is not None, False, {}

    def step(self, action: str | None) -> None:
        """Pass or bet; None ends the seat's game once it is over."""
        seat = SEATS.index(self.agent_selection)
        if action is None:
            self.agents.remove(self.agent_selection)
        else:
            is_move = action.strip() in MOVES
            self._history += action.strip()[0] if is_move else "p"
            self._fines[seat] += 0.0 if is_move else FINE
            self._gain = gain(self._deal, self._history)
        self.agent_selection = SEATS[1 - seat]


def shown(situation: str) -> str:
    """Text of a situation."""
    moves = ", ".join(MOVES["pb".index(letter)] for letter in situation[1:]) or "none"
    return f"Your card: {situation[0]}. Moves: {moves}. Answer pass or bet."


def gain(deal: str, history: str) -> float | None:
    """What the first seat wins; None before the end."""
    higher = 1.0 if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -1.0
    return {"pp": higher, "bp": 1.0, "pbp": -1.0, "bb": 2 * higher, "pbb": 2 * higher}.get(history)


def exploitability(bets: Mapping[str, float]) -> float:
    """Mean that a best opponent wins from a policy, in antes a game, over both seats; 0 is an equilibrium.

    Args:
        bets: Probability of a bet in each of `SITUATIONS`.
    """
    return sum(seat_exploitability(bets).values()) / 2


def seat_exploitability(bets: Mapping[str, float]) -> dict[str, float]:
    """Antes a game that a best opponent of each seat wins more than it does at an equilibrium.

    Args:
        bets: Probability of a bet in each of `SITUATIONS`; the seats may be two policies.
    """
    best = [-float("inf")] * 2
    for pure in itertools.product((0.0, 1.0), repeat=6):
        for seat, histories in enumerate((("", "pb"), ("p", "b"))):
            own = [card + history for card in CARDS for history in histories]
            played = {**bets, **dict(zip(own, pure, strict=True))}
            best[seat] = max(best[seat], (1, -1)[seat] * _value(played))
    return {SEATS[0]: best[1] - _EDGE, SEATS[1]: best[0] + _EDGE}


def _value(bets: Mapping[str, float]) -> float:
    """What the first seat wins on average, where each seat follows its situations' probabilities."""

    def expected(deal: str, history: str) -> float:
        if (won := gain(deal, history)) is not None:
            return won
        bet = bets[deal[len(history) % 2] + history]
        return (1 - bet) * expected(deal, history + "p") + bet * expected(deal, history + "b")

    return sum(expected(deal, "") for deal in DEALS) / len(DEALS)


def bets_of(folder: str) -> dict[str, float]:
    """Probability of a bet in each situation, of a model whose moves are a token each; other answers are a pass."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    (bet,) = tokenizer.encode("bet", add_special_tokens=False)
    found = dict[str, float]()
    for situation in SITUATIONS:
        chat = [{"role": "user", "content": shown(situation)}]
        if situation.endswith("pb"):
            chat = [{"role": "user", "content": shown(situation[0])}, *said("pass", shown(situation))]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        with torch.inference_mode():
            found[situation] = float(model(ids).logits[0, -1].softmax(-1)[bet])
    return found


def _row(choose: random.Random, is_eval: bool) -> tuple[str, dict[str, Any], Chat]:
    del is_eval
    deal, seat = choose.choice(DEALS), choose.choice(SEATS)
    game, chat = Kuhn(deal), Chat()
    game.reset()
    while len(game.agents) == len(SEATS):
        observation, _, is_over, _, _ = game.last()
        move = None if is_over else MOVES[choose.random() < _DEMONSTRATED[game.situation]]
        if move and game.agent_selection == seat:
            chat += [{"role": "user", "content": observation}, {"role": "assistant", "content": move}]
        game.step(move)
    return f"{deal} {seat}", row("Kuhn poker", environment_args={"deal": deal}, seat=seat), chat
