"""Prompts of drawn letters and a reward that a random model earns by luck: only the time of such steps matters."""

import random
import string

LENGTH = 64


class Letters:
    """A dataset for `data.format`."""

    def __init__(self, config, *, seed):
        draw = random.Random(seed)
        rows = [row("".join(draw.choices(string.ascii_lowercase, k=LENGTH))) for _ in range(4096)]
        self.train, self.eval = rows[config.eval_size :], rows[: config.eval_size]


def row(text):
    return {
        "prompt": [{"role": "user", "content": text}],
        "data_source": "letters",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {},
    }


def share_of_even(text, row):
    del row
    return sum(ord(letter) % 2 == 0 for letter in text) / max(1, len(text))
