"""Names of verl, TRL and prime-rl and ours: one table for error hints, `--from-verl` and the docs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def tables() -> dict[str, Any]:
    """Tables of `equivalents.yaml`, read when an error or a conversion first needs them."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def rows() -> list[dict[str, str]]:
    """Names of one setting by library: `ours` (several with commas), `verl`, `trl` and `prime_rl`; empty for none."""
    named = [{"verl": verl, **row} for verl, row in tables()["verl"].items() if "ours" in row]
    names = ("ours", "verl", "trl", "prime_rl")
    return [{name: row.get(name, "") for name in names} for row in (*named, *tables()["here_and_elsewhere"])]


def hint(key: str, value: str) -> str:
    """Hint for the error of an unknown value: our name for it; empty if no other library has it either."""
    ours = tables()["values"].get(key, {}).get(value)
    return "" if ours is None else f" (verl's and TRL's {value} is {ours} here)"
