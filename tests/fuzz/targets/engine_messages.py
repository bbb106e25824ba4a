"""rl-engine: what ranks tell each other, JSON and tensors' bytes."""

import torch

from rl_engine.distributed import world as _serial
from rl_engine.errors import EngineError

EXPECTED = (EngineError,)


def seeds():
    yield _serial.encode({"a": [1, 2.5, None, "x", (True,)], 3: torch.arange(4)})
    yield _serial.encode([torch.zeros(2, 2, dtype=torch.bfloat16)])


def one(data):
    _serial.decode(data)
