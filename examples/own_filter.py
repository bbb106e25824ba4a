"""A filter of one's own: groups that are too hard or too easy are replaced by other prompts.

`rl-train quickstart batch.filter=own_filter.py:is_mixed`
"""


def is_mixed(samples):
    """Between a tenth and nine tenths of the completions are right."""
    return 0.1 < sum(sample["reward"] for sample in samples) / len(samples) < 0.9
