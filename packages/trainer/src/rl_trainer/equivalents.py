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


def keys_named(name: str) -> dict[str, str]:
    """Libraries by our key that use this name, its last part or the whole."""
    found: dict[str, str] = {}
    last = name.rpartition(".")[2]
    for row in rows():
        ours = row["ours"]
        for library, theirs in (("verl", row["verl"]), ("TRL", row["trl"]), ("prime-rl", row["prime_rl"])):
            if theirs and last == theirs.rpartition(".")[2] and library not in found.get(ours, ""):
                found[ours] = f"{found[ours]} and {library}" if ours in found else library
    return found


def hint(key: str, value: str) -> str:
    """Hint for the error of an unknown value: our name for it; empty if no other library has it either."""
    ours = tables()["values"].get(key, {}).get(value)
    return "" if ours is None else f" (verl's and TRL's {value} is {ours} here)"


def table() -> str:
    """The table as Markdown, for the documentation."""
    lines = ["| here | verl | TRL | prime-rl |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(f"`{cell}`" if cell else "-" for cell in row.values()) + " |" for row in rows()]
    values = ["", "| key | value of verl or TRL | value here |", "|---|---|---|"]
    values += [f"| `{key}` | `{t}` | `{o}` |" for key, of in tables()["values"].items() for t, o in of.items()]
    notes = ["", "| key of verl (a pattern, with `*`) | why `--from-verl` sets nothing for it |", "|---|---|"]
    notes += [f"| `{key}` | {row['missing']} |" for key, row in tables()["verl"].items() if "missing" in row]
    notes += [f"| `{pattern}` | {why} |" for _, pattern, why, *_ in tables()["unread"]]
    return "\n".join([*lines, *values, *notes]) + "\n"
