"""The registered algorithms as a Markdown table: ALGORITHMS.md is `python -m rl_trainer.algorithms.table`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from rl_trainer.algorithms import ADVANTAGES
from rl_trainer.algorithms.distillation import ALONE
from rl_trainer.algorithms.policy_loss import POLICY_LOSSES
from rl_trainer.algorithms.selection import COV_LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterator

_SOURCES = {
    "ppo": "1707.06347; clip-higher 2503.14476; dual clip 1912.09729",
    "gspo": "2507.18071",
    "cispo": "2506.13585",
    "sapo": "2511.20347",
    "gmpo": "2507.20673",
    "dppo_tv": "2602.04879",
    "dppo_kl": "2602.04879",
    "dro": "direct reward optimisation",
    "reinforce": "Williams 1992; GPG 2504.02546",
    "clip_cov": "2505.22617",
    "kl_cov": "2505.22617",
    "distill": "2306.13649; the teacher alone (`teacher`)",
}


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
    yield "| name | what | reads besides rewards | groups of one |"
    yield "|---|---|---|---|"
    for name, estimator in sorted(ADVANTAGES.items()):
        needs = ", ".join(f"`{need}`" for need in estimator.needs) or "-"
        ones = "no" if estimator.compares_group else "yes"
        yield f"| `{name}` | {_first_paragraph(estimator.compute)} | {needs} | {ones} |"
    yield ""
    yield "## `algorithm.loss`"
    yield ""
    yield "| name | source (arXiv) | computed by |"
    yield "|---|---|---|"
    for name in POLICY_LOSSES:
        own = {ALONE: "distillation", **dict.fromkeys(COV_LOSSES, "selection")}
        where = f"`rl_trainer.algorithms.{own[name]}`, " if name in own else ""
        yield f"| `{name}` | {_SOURCES[name]} | {where}`rl_csrc.policy_loss` |"


def _first_paragraph(function: Any) -> str:
    lines = (inspect.getdoc(function) or "").split("\n\n")[0].splitlines()
    return " ".join(lines).replace("|", "\\|")


if __name__ == "__main__":
    print(render(), end="")  # noqa: T201 - it is what the command is for
