"""rl-csrc: differences of weights, applied to a tensor whatever they say."""

import numpy as np
import torch

from rl_csrc import delta

EXPECTED = (ValueError,)


def seeds():
    base = torch.arange(300, dtype=torch.int16)
    fresh = base.clone()
    fresh[::7] += 1
    found = delta.encode(fresh, base)
    parts = [found.table.numpy().tobytes(), found.gaps.numpy().tobytes(), found.values.numpy().tobytes()]
    yield bytes([len(parts[0]), len(parts[1])]) + b"".join(parts)
    yield bytes(10)


def one(data):
    if len(data) < 2:
        return
    first, second = data[0], data[1]
    table, gaps, values = data[2 : 2 + first], data[2 + first : 2 + first + second], data[2 + first + second :]
    target = torch.zeros(300, dtype=torch.int16)
    number = len(table) // 8
    delta.apply(
        target,
        delta.Delta(
            table=torch.from_numpy(np.frombuffer(table[: 8 * number], dtype=np.int32).reshape(number, 2).copy()),
            gaps=torch.from_numpy(np.frombuffer(gaps, dtype=np.uint8).copy()),
            values=torch.from_numpy(np.frombuffer(values[: len(values) // 2 * 2], dtype=np.int16).copy()),
        ),
    )
