"""The registered algorithms as Markdown tables: `python algorithms_table.py ../../ALGORITHMS.md` renews them.

What stands in the file from `WRITTEN` on is written by hand, and stays.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_trainer.algorithms import ADVANTAGES
from rl_trainer.algorithms.losses import POLICY_LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterator


WRITTEN = "## Compared with other implementations\n"


def render() -> str:
    """The part of the document that is made from the registry."""
    return "\n".join(_lines()) + "\n\n"


def renew(file: Path) -> None:
    """Write that part anew, and leave the rest."""
    text = file.read_text()
    file.write_text(render() + text[text.index(WRITTEN) :])


def _lines() -> Iterator[str]:
    yield "# Algorithms"
    yield ""
    yield "`python tests/algorithms/algorithms_table.py ALGORITHMS.md` makes these tables from the registries; a test"
    yield "keeps them so."
    yield ""
    yield "## `algorithm.advantage`"
    yield ""
    yield "| name | what | reads besides rewards | keys | `algorithm.advantage_options` | groups of one |"
    yield "|---|---|---|---|---|---|"
    for name, estimator in sorted(ADVANTAGES.items()):
        needs = ", ".join(f"`{need}`" for need in estimator.reads) or "-"
        keys = ", ".join(f"`{key}`" for key in estimator.keys) or "-"
        options = _options(estimator.options)
        ones = "no" if estimator.compares_group else "yes"
        yield f"| `{name}` | {_first_paragraph(estimator.compute)} | {needs} | {keys} | {options} | {ones} |"
    yield ""
    yield "## `algorithm.loss`"
    yield ""
    yield "| name | source (arXiv) | `algorithm.loss_options` |"
    yield "|---|---|---|"
    for name, loss in POLICY_LOSSES.items():
        yield f"| `{name}` | {loss.source} | {_options(loss.options)} |"


def _options(options: Any) -> str:
    return ", ".join(f"`{option}: {value:g}`" for option, value in options.items()) or "-"


def _first_paragraph(function: Any) -> str:
    lines = (inspect.getdoc(function) or "").split("\n\n")[0].splitlines()
    return " ".join(lines).replace("|", "\\|")


if __name__ == "__main__":
    renew(Path(sys.argv[1]))
