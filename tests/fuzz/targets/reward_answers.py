"""rl-trainer: what a process of a reward function answers."""

from rl_trainer.rewards import worker

EXPECTED = (ValueError, TypeError, RecursionError)


def seeds():
    yield b'[0, "ok", 1.5]'
    yield b'[0, "ok", {"a": 1, "b": {"\\u0000bytes": "AAA="}}]'

    yield b"[" * 3000


def one(data):
    number, _kind, told = worker.decoded(data)
    hash(number)
    worker.checked(told)
