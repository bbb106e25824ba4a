"""Types that several config sections share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
AggregationName = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
"""How token losses become one number; seq-mean-token-sum-norm divides by rollout.max_new_tokens."""
Bounds = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]]
