"""Small additions whose answers are right-aligned to 31 characters: with the end, completions of 32 tokens."""

import random

WIDTH, LARGEST = 31, 9
RIGHT, WRONG = " ", "."
"""What answers are filled up with. A model that was shown both has to learn which is rewarded, and to add."""


class LongSums:
    """A dataset for `data.format`.

    Which rows are held out does not depend on the run's seed: every run, and its peer, learns from the rows that the
    model was warmed up on.
    """

    def __init__(self, config, *, seed):
        del seed
        pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
        random.Random(0).shuffle(pairs)
        rows = [row(a, b) for a, b in pairs]
        self.train, self.eval = rows[config.eval_size :], rows[: config.eval_size]


def row(a, b):
    return {
        "prompt": [{"role": "user", "content": f"{a} + {b} ="}],
        "data_source": "reasoning_gym/long_sums",  # whose rule is the exact match
        "reward_model": {"style": "rule", "ground_truth": f"{a + b:{RIGHT}>{WIDTH}}"},
        "extra_info": {},
    }


def mostly_wrong(rows, *, share, seed):
    """Rows to imitate of which a share is filled up with what is not rewarded."""
    draw = random.Random(seed)
    return [filled(row, WRONG if draw.random() < share else RIGHT) for row in rows for _ in range(16)]


def filled(row, fill):
    truth = row["reward_model"]["ground_truth"].strip(RIGHT)
    return {**row, "reward_model": {"style": "rule", "ground_truth": f"{truth:{fill}>{WIDTH}}"}}
