"""Kinds of numbers that keys hold."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Bounds = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]]
