"""rl-trainer: recipes, YAML files that a run is started with."""

from _forms import files

from rl_trainer.config import load_config
from rl_trainer.errors import InputError

EXPECTED = (InputError,)


def seeds():
    yield b"name: x\nsteps: 3\nmodel: {path: null}\nreward: {parts: {a: {kind: rule, rule: math}}}\n"
    yield b"data:\n  format: gsm8k\n  path: hf:gsm8k\nalgorithm: {loss: ppo}\n"

    yield b"extends: recipe.yaml\nsteps: 3\n"
    yield b"[" * 3000
    yield b"name: \xf8"


def one(data):
    with files(**{"recipe.yaml": data}) as root:
        load_config(str(root / "recipe.yaml"))
