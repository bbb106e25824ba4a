"""Tasks of reasoning-gym by name; the loop `reasoning_gym` asks them."""

from __future__ import annotations

from typing import Any

from rl_agent.environments.base import SEEDS_APART, EnvironmentSource


class ReasoningGymTasks(EnvironmentSource):
    """Questions of one dataset of reasoning-gym, such as `basic_arithmetic`, with answers of its own verifier."""

    is_endless = False

    def rows(self, *, seed: int, num_train: int, num_eval: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Questions by index, of one seed for training and another for held-out rows."""
        sizes = {seed: num_train, SEEDS_APART: num_eval}
        train, held_out = (
            [{"task": self.name, "index": index, "task_args": {"seed": own, "size": size}} for index in range(size)]
            for own, size in sizes.items()
        )
        return train, held_out
