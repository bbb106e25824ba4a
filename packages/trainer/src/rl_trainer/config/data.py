"""Keys of `data` and `batch`: where prompts come from, and how many of them a step takes."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from rl_trainer.config._types import NonNegative, Positive  # noqa: TC001 - so it does these


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePart:
    """One of several datasets that prompts are drawn from."""

    path: str
    """As `data.path`."""
    format: str | None = None
    """As `data.format`, which it is if None."""
    options: Mapping[str, Any] | None = None
    """As `data.options`, which they are if None."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Prompts are drawn in proportion to the weights, whatever the sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSection:
    """Rows of which the policy has nothing to learn are passed over, by the mean reward of their last group."""

    pass_rate: tuple[float, float] = (0.0, 1.0)
    """Mean reward up to which a row is too hard, and from which it is too easy."""
    revisit: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Probability that such a row is taken all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where prompts come from."""

    format: str = "rows"
    """`rows`: the dataset format; `gsm8k`: question/answer lines; `reasoning_gym`: procedural; or a plug-in, by its
    entry point or as `FILE.py:NAME`."""
    path: str | None = None
    """A .jsonl or .parquet file, a folder with train.* and test.*, `hf:NAME`, or a saved Dataset's folder."""
    eval_path: str | None = None
    """Held-out file; None takes test.* of the folder, or else the last `eval_size` rows of the file."""
    eval_size: Positive = 256
    """Held-out rows."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What that format alone reads: the keys of a class in `rl_trainer.data.options`, or those of your own format."""
    mixture: Mapping[str, MixturePart] = field(default_factory=dict)
    """Several datasets by name, instead of `path`."""
    curriculum: CurriculumSection | None = None
    """Pass over rows that taught nothing lately; None takes every row once per epoch."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are left out, and counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySection:
    """Part of every batch are groups that earlier steps have learned from (arXiv 2506.05316); not in fully_async."""

    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Of a batch's groups, rounded down; fresh ones take the place of what there is not."""
    max_age: Positive = 4
    """Weight versions that its oldest token may lie behind: it is learned from so many times more at most. At least 3
    with pipeline=one_step_off, where tokens are a version older and batches are made a step ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How many of what: prompts, completions, tokens."""

    batch_size: Positive = 64
    """Prompts per training step."""
    group_size: Positive = 8
    """Completions per prompt."""
    mini_batch_size: Positive = 64
    """Prompts per optimizer step."""
    max_tokens_per_gpu: Positive = 16384
    """Tokens per micro-batch."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by other prompts."""
    over_sampling: Annotated[float, Field(ge=0)] = 0.0
    """Share of groups that are begun beyond those that are needed; when enough are complete the others are stopped, and
    their prompts come first in the next step, where they are waited for. Not with pipeline=fully_async."""
    replay: ReplaySection | None = None
    """Learn from groups again; None learns from each once."""
    max_refills: NonNegative = 2
    """Times that failed or dropped groups of a batch are replaced before the run gives up."""
