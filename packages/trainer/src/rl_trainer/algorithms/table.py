"""The registered algorithms as a Markdown table: ALGORITHMS.md is `python -m rl_trainer.algorithms.table`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from rl_trainer.algorithms import ADVANTAGES
from rl_trainer.algorithms.losses import POLICY_LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterator


def render() -> str:
    """The whole document."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Algorithms"
    yield ""
    yield "Made by `python -m rl_trainer.algorithms.table` from what is registered; a test keeps it so."
    yield ""
    yield "## `algorithm.advantage`"
    yield ""
    yield "| name | what | reads besides rewards | keys | groups of one |"
    yield "|---|---|---|---|---|"
    for name, estimator in sorted(ADVANTAGES.items()):
        needs = ", ".join(f"`{need}`" for need in estimator.needs) or "-"
        keys = ", ".join(f"`{key}`" for key in estimator.keys) or "-"
        ones = "no" if estimator.compares_group else "yes"
        yield f"| `{name}` | {_first_paragraph(estimator.compute)} | {needs} | {keys} | {ones} |"
    yield ""
    yield "## `algorithm.loss`"
    yield ""
    yield "| name | source (arXiv) | `algorithm.loss_options` |"
    yield "|---|---|---|"
    for name, loss in POLICY_LOSSES.items():
        options = ", ".join(f"`{option}: {value:g}`" for option, value in loss.options.items()) or "-"
        yield f"| `{name}` | {loss.source} | {options} |"


def _first_paragraph(function: Any) -> str:
    lines = (inspect.getdoc(function) or "").split("\n\n")[0].splitlines()
    return " ".join(lines).replace("|", "\\|")


if __name__ == "__main__":
    print(render(), end="")  # noqa: T201 - it is what the command is for
