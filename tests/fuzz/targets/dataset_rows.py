"""rl-trainer: rows of a dataset, one JSON object a line."""

from _forms import json_of

from rl_trainer.config.schema import DataConfig
from rl_trainer.data import rows
from rl_trainer.errors import DataError

EXPECTED = (DataError,)
PLAIN = rows.row_maker(DataConfig(path="x"))


def seeds():
    yield b'{"prompt": [{"role": "user", "content": "2+2"}], "data_source": "x", "reward_model": {"ground_truth": "4"}}'
    yield b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "data_source": "x", "reward_model": {"ground_truth": 1}}'


def one(data):
    is_json, record = json_of(data)
    if is_json and isinstance(record, dict):
        rows.shows_images(PLAIN(record, "line 1"))
