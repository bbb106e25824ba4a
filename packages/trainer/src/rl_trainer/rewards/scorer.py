"""Applies reward rules, the risky ones in a process of their own that is killed when it gets stuck."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from rl_trainer.rewards.rules import ISOLATED, resolve_reward

if TYPE_CHECKING:
    from collections.abc import Mapping


class Scorer:
    """Scores texts; several at a time are fine on one event loop.

    Args:
        timeout_s: Deadline of one score in the separate process, seconds, its first start included.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._pool: ProcessPoolExecutor | None = None

    async def score(self, text: str, row: Mapping[str, Any]) -> float:
        """Reward of a completion.

        Raises:
            TimeoutError: the rule did not end before the deadline; its process was killed.
        """
        rule = resolve_reward(row["data_source"])
        if rule not in ISOLATED:
            return rule(text, row)
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        pool = self._pool
        answer = asyncio.get_running_loop().run_in_executor(pool, rule, text, {"reward_model": row["reward_model"]})
        try:
            return await asyncio.wait_for(answer, self._timeout_s)
        except TimeoutError:
            if self._pool is pool:
                self.close()
            raise TimeoutError(
                f"{rule.__name__} did not score a text of {len(text)} characters within {self._timeout_s:g} s"
            ) from None

    def close(self) -> None:
        """Kill the process. Idempotent."""
        if self._pool is None:
            return
        for process in list((self._pool._processes or {}).values()):  # pyright: ignore[reportPrivateUsage] - no public way to kill before Python 3.14
            process.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None
