"""Interface of environment sources, and what their adapters share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from rl_agent.errors import PluginError

SEEDS_APART = 1 << 30
"""First seed of held-out episodes: training seeds are below it."""


class EnvironmentSource:
    """Source of environments: what `HUB:NAME`, `FILE.py:NAME` or `MODULE:NAME` leads to.

    An environment has the interface that `rl_agent.loops.gym.GymLoop` describes. A hub whose name is that of an
    installed agent loop is played by that loop, every other one by `loop`.

    Args:
        name: What follows the hub's name and its colon.
        arguments: Arguments of the environments, for rows that give no others.
    """

    loop: ClassVar[str] = "gym"
    """Agent loop that plays them, unless there is one of the hub's name."""
    is_endless: ClassVar[bool] = True
    """Whether there are any number of training rows, which cost a start of the environment each to look at."""

    def __init__(self, name: str, arguments: Mapping[str, Any] | None = None) -> None:
        self.name, self.arguments = name, dict(arguments or {})

    def make(self, **arguments: Any) -> Any:
        """Create one environment.

        Raises:
            PluginError: the loop of the hub's name runs the episodes itself (the default).
        """
        del arguments
        raise PluginError(f"{type(self).__name__} have a loop of their own; leave agent.loop out")

    def rows(self, *, seed: int, num_train: int, num_eval: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Dataset rows to play, for training and held out, without their prompts, which the environment writes.

        The default gives seeds, of which the two have none in common.

        Args:
            seed: Seed of the run.
            num_train: Training rows at most.
            num_eval: Held-out rows at most.
        """
        first = seed * num_train % (SEEDS_APART - num_train)
        train = [{"seed": first + index} for index in range(num_train)]
        return train, [{"seed": SEEDS_APART + index} for index in range(num_eval)]

    async def close(self) -> None:
        """End what the source has started. The default has started nothing."""
        return


def observation_text(observation: Any) -> str:
    """Text of an observation of no known form: fields by line, anything else as JSON."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        fields = cast("Mapping[Any, Any]", observation)
        return "\n".join(f"{name}: {observation_text(value)}" for name, value in fields.items())
    return json.dumps(observation, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Numpy's arrays and scalars as lists and numbers, anything else as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
