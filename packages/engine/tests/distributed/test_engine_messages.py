"""What ranks tell each other is plain values and tensors: they come back as they were, and nothing of it is code."""

import math
import os
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_csrc import frames
from rl_engine.distributed.world import decode, encode
from rl_engine.errors import EngineError

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.integers() | st.text() | st.tuples(st.text(), st.tuples(st.integers(), st.integers()))
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


@pytest.mark.process
@given(values)
def test_plain_values_come_back_as_they_were(value):
    again = decode(encode(value))
    assert again == value
    assert type(again) is type(value)


def test_numbers_that_are_none():
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode([math.inf, -math.inf])) == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (2, 3, 4)])
def test_tensors_keep_shape_type_and_bits(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    one = torch.tensor([1, 0, 1], dtype=torch.uint8)  # what comes behind it is not aligned
    back = decode(encode({"a": (one, tensor), "b": [tensor.t() if len(shape) == 1 else tensor]}))
    for found in (back["a"][1], back["b"][0]):
        assert found.dtype == dtype
        assert found.shape == shape
        assert torch.equal(found, tensor)
    back["a"][0][0] = 7  # it can be written


def test_what_is_no_plain_value_is_named():
    with pytest.raises(EngineError, match="a OSError is neither"):
        encode([OSError("no")])


class Evil:
    def __reduce__(self):
        return os.abort, ()


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        b"",
        b"\x01",
        encode([1])[:-1],
        encode(torch.ones(4))[:-1],
        encode(torch.ones(4)) + b"x",
        (2**63).to_bytes(8, "little") + b"[]",
        frames.encode({"0": torch.ones(4)}).to_bytes(),
        *(
            frames.encode({"json": text, "0": torch.ones(4)}).to_bytes()
            for text in (
                b'{"tensor": 1}',
                b'{"tensor": -1}',
                b'{"tensor": "json"}',
                b'{"tensor": [0]}',
                b'{"code": []}',
                b"{}",
                b"[" * 100000,
            )
        ),
    ],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(EngineError, match="A rank sent"):
        decode(data)
