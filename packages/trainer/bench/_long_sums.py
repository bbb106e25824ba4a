"""Two-digit additions whose answers are right-aligned to 31 characters: with the end, completions of 32 tokens."""

import random

WIDTH = 31


class LongSums:
    """A dataset for `data.format`."""

    def __init__(self, config, *, seed):
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        random.Random(seed).shuffle(pairs)
        rows = [row(a, b) for a, b in pairs]
        self.train, self.eval = rows[config.eval_size :], rows[: config.eval_size]


def row(a, b):
    return {
        "prompt": [{"role": "user", "content": f"{a} + {b} ="}],
        "data_source": "reasoning_gym/long_sums",  # whose rule is the exact match
        "reward_model": {"style": "rule", "ground_truth": f"{a + b:>{WIDTH}}"},
        "extra_info": {},
    }
