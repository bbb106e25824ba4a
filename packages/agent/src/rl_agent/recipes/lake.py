"""Frozen lakes of the recipe `gym`: Gymnasium's FrozenLake on maps that are made per row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_agent.environments.gymnasium import GymnasiumEnvironments
from rl_agent.recipes.rows import Chat, Rows, draw_rows, is_held_out, row

if TYPE_CHECKING:
    import random

    from rl_agent.recipes.rows import DataConfig

SIZE = 4
SAFE_SHARE = 0.3
"""Share of the demonstrations that walk around holes; the others run right and down in a straight line."""
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Rows and columns that actions 0 to 3 move by."""
_GAMES = GymnasiumEnvironments("FrozenLake-v1")


def rows(config: DataConfig, *, seed: int) -> Rows:
    """Rows of maps that can be crossed; a fifth of all maps is held out."""
    return draw_rows(config, _row, seed=seed)


def path(lake: tuple[str, ...]) -> list[int]:
    """Actions of a shortest way to the goal; empty if there is none."""
    ways = {(0, 0): list[int]()}
    for at in (waiting := [(0, 0)]):
        for action, (down, right) in enumerate(_MOVES):
            to = (at[0] + down, at[1] + right)
            if min(to) < 0 or max(to) >= SIZE or to in ways or lake[to[0]][to[1]] == "H":
                continue
            ways[to] = [*ways[at], action]
            waiting.append(to)
    return ways.get((SIZE - 1, SIZE - 1), [])


def _row(choose: random.Random, is_eval: bool) -> tuple[str, dict[str, Any], Chat]:
    while True:
        cells = "S" + "".join("FH"[choose.random() < 0.3] for _ in range(SIZE * SIZE - 2)) + "G"
        lake = tuple(cells[index : index + SIZE] for index in range(0, SIZE * SIZE, SIZE))
        if is_held_out(cells) == is_eval and (way := path(lake)):
            break
    if choose.random() >= SAFE_SHARE:
        way = [2] * (SIZE - 1) + [1] * (SIZE - 1)
    arguments = {"desc": [*lake], "is_slippery": False}
    return cells, row("a frozen lake", environment_args=arguments), _played(arguments, way)


def _played(arguments: dict[str, Any], way: list[int]) -> Chat:
    """Chat of a walk, up to its last action."""
    game = _GAMES.make(**arguments)
    shown, _ = game.reset(seed=0)
    chat = Chat()
    for action in way:
        chat += [{"role": "user", "content": shown}, {"role": "assistant", "content": str(action)}]
        shown, _, is_over, _, _ = game.step(str(action))
        if is_over:
            break
    game.close()
    return chat
