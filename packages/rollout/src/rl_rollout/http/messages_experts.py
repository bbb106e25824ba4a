"""Routed experts in the JSON between our servers and clients: packed numbers in place of digits. Pure functions.

`{"shape": [tokens, layers, experts per token], "dtype": "uint8" or "int16", "data": base64}`; the numbers are
little-endian, in row-major order. Nested lists, the form before this one, are read too.
"""

from __future__ import annotations

import base64
import sys
from array import array
from itertools import chain
from math import prod
from typing import Any, Literal

from rl_rollout.errors import RolloutError

Experts = tuple[tuple[tuple[int, ...], ...], ...]
"""[tokens][layers][experts per token] expert ids."""

_CODES: dict[str, Literal["B", "h"]] = {"uint8": "B", "int16": "h"}
"""Of Python's arrays, by dtype."""


def experts_to_json(experts: Experts) -> dict[str, Any]:
    """Pack ids of at least one token; all tokens have the same layers, and all layers the same number of experts."""
    flat = list(chain.from_iterable(chain.from_iterable(experts)))
    dtype = "uint8" if min(flat) >= 0 and max(flat) < 2**8 else "int16"
    numbers = _little_endian(array(_CODES[dtype], flat))
    shape = [len(experts), len(experts[0]), len(experts[0][0])]
    return {"shape": shape, "dtype": dtype, "data": base64.b64encode(numbers.tobytes()).decode()}


def experts_from_json(found: Any) -> Experts:
    """The reverse of `experts_to_json`.

    Raises:
        RolloutError: it is neither that nor nested lists.
    """
    if isinstance(found, list):
        return tuple(tuple(map(tuple, token)) for token in found)
    try:
        shape, code = found["shape"], _CODES[found["dtype"]]
        numbers = array(code, base64.b64decode(found["data"], validate=True))
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(f"routed_experts cannot be read: {error!r}; wanted shape, dtype and data") from error
    if prod(shape) != len(numbers):
        raise RolloutError(f"routed_experts has {len(numbers)} numbers for the shape {shape}")
    rows: Any = memoryview(_little_endian(numbers)).cast("B").cast(code, shape).tolist()
    return tuple(tuple(map(tuple, token)) for token in rows)


def _little_endian(numbers: array[int]) -> array[int]:
    """To the order of the wire, or from it."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
