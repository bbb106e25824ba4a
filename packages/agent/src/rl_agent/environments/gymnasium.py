"""Environments of Gymnasium by id (https://gymnasium.farama.org), with observations and actions as text."""

# Gymnasium is there where its tests run, and not where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import io
import json
import math
import re
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy
from gymnasium import spaces

from rl_agent.environments.base import EnvironmentSource, observation_text
from rl_agent.errors import PluginError, RowError
from rl_agent.media import data_url

if TYPE_CHECKING:
    from collections.abc import Mapping

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_HIGHLIGHTED = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:4|10)[0-7]m(.*?)\x1b\[0?m")
"""Text on a background of another colour, which often is all that shows where the player is."""


class GymnasiumEnvironments(EnvironmentSource):
    """Environments of one id, such as `FrozenLake-v1`, or `minigrid:MiniGrid-Empty-5x5-v0` with the module first.

    Raises:
        PluginError: no such id is registered.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, arguments)
        package, _, name_there = name.rpartition(":")
        if package:
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise PluginError(f"environment gymnasium:{name} needs {package}: pip install {package}") from error
        try:
            self._spec = gymnasium.spec(name_there)
        except gymnasium.error.Error as error:
            raise PluginError(f"environment gymnasium:{name} cannot be found: {error}") from error

    def make(self, **arguments: Any) -> TextGame:
        """Create one, by `gymnasium.make`; `render_mode` is `ansi` if the environment has it.

        Raises:
            RowError: it does not take these arguments.
        """
        try:
            game = gymnasium.make(self._spec, **arguments)
            if "render_mode" not in arguments and "ansi" in game.metadata.get("render_modes", ()):
                game.close()
                game = gymnasium.make(self._spec, render_mode="ansi", **arguments)
        except TypeError as error:
            raise RowError(f"field 'environment_args' does not suit gymnasium:{self.name}: {error}") from error
        return TextGame(game)


class TextGame:
    """Environment of Gymnasium as text: what it renders or observes goes out, the model's turn comes in as an action.

    An observation is, of the first that the environment has: its rendering in `ansi` with brackets around what is
    highlighted, text, a picture (an image of uint8 [H, W, 3]), MiniGrid's grid below its mission, or its fields. The
    first observation adds which actions there are. An action is the last in the turn that is spelled as the space has
    it: a number or, where the environment names its actions, a name; a list of numbers for `Box`, `MultiDiscrete` and
    `MultiBinary`; anything for `Text`. A turn without one is answered with what is needed, costs nothing, and does not
    count as a step of the environment.

    Raises:
        PluginError: its actions cannot be written.
    """

    def __init__(self, game: gymnasium.Env[Any, Any]) -> None:
        self._game, self._space = game, game.action_space
        self._names = _action_names(game)
        self._needed = _needed(self._space, self._names)

    def reset(self, *, seed: int | None) -> tuple[Any, dict[str, Any]]:
        """See `GymLoop`."""
        observation, info = self._game.reset(seed=seed)
        return self._shown(observation, f"\n\n{self._needed}"), info

    def step(self, turn: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See `GymLoop`."""
        action = read_action(turn, self._space, self._names)
        if action is None:
            return f"That is no action. {self._needed}", 0.0, False, False, {"is_invalid": True}
        observation, reward, is_terminated, is_truncated, info = self._game.step(action)
        return self._shown(observation, ""), float(reward), bool(is_terminated), bool(is_truncated), info

    def close(self) -> None:
        """Close the environment."""
        self._game.close()

    def _shown(self, observation: Any, below: str) -> Any:
        if self._game.render_mode == "ansi":
            shown = _HIGHLIGHTED.sub(r"[\1]", str(self._game.render()))
            return _ESCAPES.sub("", shown).strip() + below
        if _is_picture(self._game.observation_space):
            return [{"type": "image", "image": data_url(_png(observation))}, {"type": "text", "text": below.strip()}]
        own: Any = self._game.unwrapped
        if hasattr(own, "pprint_grid"):
            return f"{observation['mission']}\n\n{own.pprint_grid()}{below}"
        return observation_text(observation) + below


def read_action(turn: str, space: spaces.Space[Any], names: Mapping[str, int]) -> Any:
    """The last action in a turn of the model; None if there is none."""
    if isinstance(space, spaces.Text):
        return turn.strip()
    if isinstance(space, spaces.Discrete):
        words = re.findall(r"-?\d+|[^\W\d]+(?:_[^\W\d]+)*", turn.lower())
        known = {**names, **{str(number): number for number in range(space.start, space.start + space.n)}}
        return next((known[word] for word in reversed(words) if word in known), None)
    for text in reversed(re.findall(r"\[[^\[\]]*\]", turn)):
        try:
            action = numpy.array(json.loads(text), space.dtype).reshape(space.shape)
        except (ValueError, TypeError, OverflowError):
            continue
        if space.contains(action):
            return action
    return None


def _action_names(game: gymnasium.Env[Any, Any]) -> dict[str, int]:
    """Numbers of actions by name, where an environment has them: MiniGrid's enumeration, Atari's meanings."""
    own: Any = game.unwrapped
    if hasattr(own, "get_action_meanings"):
        return {str(name).lower(): number for number, name in enumerate(own.get_action_meanings())}
    members = getattr(getattr(own, "actions", None), "__members__", None) or {}
    return {str(name).lower(): int(member) for name, member in members.items()}


def _needed(space: spaces.Space[Any], names: Mapping[str, int]) -> str:
    """Sentence that says which actions there are."""
    if isinstance(space, spaces.Text):
        return "Answer with the text of your action."
    if isinstance(space, spaces.Discrete):
        last = space.start + space.n - 1
        return f"Answer with one action: {', '.join(names) if names else f'a number from {space.start} to {last}'}."
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        bounds = f" from {space.low.tolist()} to {space.high.tolist()}" if isinstance(space, spaces.Box) else ""
        example = json.dumps(space.sample().tolist())
        return f"Answer with a list of {math.prod(space.shape)} numbers{bounds}, such as {example}."
    raise PluginError(
        f"actions of {space} cannot be written as text; wrap the environment, and give it as FILE.py:NAME"
    )


def _is_picture(space: Any) -> bool:
    return isinstance(space, spaces.Box) and len(space.shape) == 3 and space.shape[2] == 3 and space.dtype == "uint8"


def _png(pixels: Any) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()
