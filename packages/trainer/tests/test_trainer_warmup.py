"""The supervised training before a run, in a process of its own."""

import sys

import pytest

from rl_trainer.data.warmup import _run
from rl_trainer.errors import TrainerError


def python(code):
    return [sys.executable, "-c", code]


def test_its_lines_are_passed_on_and_the_last_are_told_when_it_fails():
    lines = []
    _run(python("print('a'); print('b')"), 60, lines.append)
    assert lines == ["a", "b"]
    with pytest.raises(TrainerError, match=r"rl-sft failed; its last lines:\n  \| no such data"):
        _run(python("print('no such data'); raise SystemExit(3)"), 60, lines.append)


def test_one_that_hangs_without_a_word_is_ended_at_its_deadline():
    with pytest.raises(TrainerError, match=r"did not finish within 0\.5 s"):
        _run(python("import time; time.sleep(300)"), 0.5, print)
