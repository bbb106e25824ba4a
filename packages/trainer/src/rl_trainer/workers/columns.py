"""Queue columns of trajectories."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rl_agent.types import AgentLoopOutput
from rl_engine.registry import image_processor
from rl_rollout.errors import RequestError
from rl_rollout.types import expand_runs
from rl_tq.types import PerGroup
from rl_trainer.errors import DataError, InputError, TrainerError
from rl_trainer.rewards import Score

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor


Sample = tuple[AgentLoopOutput, Score]
"""A trajectory and what it is worth."""
Group = tuple[int, list[Sample], float | None]
"""A group's id, its samples in the order of its rollouts, and the reward of its greedy completion, if wanted."""
ROLLOUT = "rollout_index"
"""Index of the rollout in its group: an extra field of the trajectory, and a column."""
TEACHER_PROMPT = "teacher_prompt_token_ids"
"""Ragged int64: the prompt with `teacher.context`, as the teacher reads it; an extra field, and a column."""
TEACHER_LOGPROBS = "teacher_logprobs"
"""Log-probs of the completion under a teacher at `teacher.url`; an extra field, and a column."""
TOOL_ERROR = "tool_error"
"""Tool, type and message of the last exception of a tool: an extra field of the trajectory, and a tag with its row."""
WHERE = "where"
"""Tag: file and number of the row that a sample is of."""
GIVEN = "is_given"
"""Whether a trajectory was taken from its row (`batch.given`): an extra field, a column, and a tag."""
TRUNCATED = ("length", "timeout")
"""Finish reasons of a completion that was cut off."""
EXPERTS = ("routed_experts",)
"""Ragged int16 [tokens but the last, MoE layers, experts per token]: what the servers chose."""


def to_columns(
    groups: Sequence[Group],
    *,
    has_experts: bool = False,
    reader: ImageReader | None = None,
    num_known: int | Mapping[str, int] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Columns and tags of groups. Ragged columns are jagged tensors; "per token" means per completion token.

    `has_experts` writes `EXPERTS`, a `reader` writes `IMAGES` and the images' places in the ids. Sampled ids beyond the
    tokenizer's `num_known`, of several policies by name, are counted.

    Raises:
        TrainerError: rewards have different parts, a server did not report the experts of every token, or images and
            their places do not agree.
    """
    samples = [sample for _, group, _ in groups for sample in group]
    group_ids = [group_id for group_id, group, _ in groups for _ in group]
    greedy = [reward for _, group, reward in groups for _ in group if reward is not None]
    outputs, scores = [output for output, _ in samples], [score for _, score in samples]
    images: dict[str, Any] = {}
    if reader is not None:
        sizes = [len(group) for _, group, _ in groups]
        outputs, values = reader.read(outputs)
        images = _images([output.images for output in outputs], values, sizes)
    elif any(output.images for output in outputs):
        raise TrainerError(
            "a trajectory has images, and the model's folder does not say how to prepare them (preprocessor_config.json"
            "); they would be left out in silence"
        )
    versions = [[v for v in o.weight_versions if v >= 0] for o in outputs]
    given = [bool(o.extra_fields.get(GIVEN)) for o in outputs]
    columns = {
        "prompt_token_ids": _jagged([o.prompt_token_ids for o in outputs], torch.int64),
        **_completions(outputs),
        "loss_mask": _jagged([o.loss_mask for o in outputs], torch.int64),
        "rollout_logprobs": _jagged([o.rollout_logprobs for o in outputs], torch.float32),
        "rewards": _jagged(
            [_place_reward(o, score.reward) for o, score in zip(outputs, scores, strict=True)], torch.float32
        ),
        "weight_version_min": torch.tensor([min(v) for v in versions]),
        "weight_version_max": torch.tensor([max(v) for v in versions]),
        "group_id": torch.tensor(group_ids),
        ROLLOUT: torch.tensor([o.extra_fields[ROLLOUT] for o in outputs]),
        "num_turns": torch.tensor([o.num_turns for o in outputs]),
        **({"greedy_rewards": torch.tensor(greedy)} if greedy else {}),
        **({GIVEN: torch.tensor(given)} if any(given) else {}),
        **(_experts(outputs) if has_experts else {}),
        **{
            name: _jagged([o.extra_fields[name] for o in outputs], dtype)
            for name, dtype in ((TEACHER_PROMPT, torch.int64), (TEACHER_LOGPROBS, torch.float32))
            if name in outputs[0].extra_fields
        },
        **_components(scores),
        **images,
    }
    tags = [
        {
            "group_id": group_id,
            "reward": score.reward,
            "parts": {**score.metrics, **{n: v for n, v in score.components.items() if n not in score.missing}},
            **({"extra": {**score.extra}} if score.extra else {}),
            "num_tokens": len(o.loss_mask),
            **({"num_unknown": unknown} if (unknown := _num_unknown(o, num_known)) else {}),
            **({"num_tool_error": int(count)} if (count := o.metrics.get("num_tool_error")) else {}),
            **({TOOL_ERROR: error} if (error := o.extra_fields.get(TOOL_ERROR)) else {}),
            "weight_version_min": min(v),
            "weight_version_max": max(v),
            "finish_reason": str(o.finish_reason),
            **({GIVEN: True} if o.extra_fields.get(GIVEN) else {}),
            **({"policy": o.policy} if o.policy else {}),
        }
        for group_id, o, score, v in zip(group_ids, outputs, scores, versions, strict=True)
    ]
    return columns, tags


def _completions(outputs: Sequence[AgentLoopOutput]) -> dict[str, Tensor]:
    """Columns of what was generated: token ids, or the trajectories' own columns."""
    if not outputs[0].columns:
        return {"completion_token_ids": _jagged([o.completion_token_ids for o in outputs], torch.int64)}
    rows = {name: [o.columns[name] for o in outputs] for name in outputs[0].columns}
    return {
        name: torch.nested.nested_tensor_from_jagged(
            torch.cat(tensors), torch.tensor([0, *map(len, tensors)]).cumsum(0)
        )
        for name, tensors in rows.items()
    }


def _images(
    urls: Sequence[tuple[str, ...]], values: Sequence[dict[str, Tensor]], sizes: Sequence[int]
) -> dict[str, Any]:
    """Values of `IMAGES` by row; by group, where all rows of each group have the same images."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    is_shared = all(len(set(urls[at : at + size])) == 1 for at, size in zip(starts, sizes, strict=True))
    rows = [values[at] for at in starts] if is_shared else values
    columns: dict[str, Any] = {}
    for name in rows[0]:
        parts = [row[name] for row in rows]
        offsets = torch.tensor([0, *[len(part) for part in parts]]).cumsum(0)
        column = torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)
        columns[name] = PerGroup(column) if is_shared else column
    return columns


def _experts(outputs: Sequence[AgentLoopOutput]) -> dict[str, torch.Tensor]:
    for output in outputs:
        num_reported = sum(map(bool, output.routed_experts))
        num_fed = len(output.prompt_token_ids) + len(output.completion_token_ids) - 1
        if num_reported < num_fed:
            raise TrainerError(
                f"of a trajectory of {num_fed} tokens the server reported the experts of {num_reported}, and "
                "engine.router_replay needs them all; leave it out, or use a server that returns them"
            )
    return {EXPERTS[0]: _jagged([output.routed_experts for output in outputs], torch.int16)}


def _components(scores: Sequence[Score]) -> dict[str, torch.Tensor]:
    """`components` and `component_weights`, (B, K) each, where rewards have parts."""
    if not any(score.components for score in scores):
        return {}
    names = list(scores[0].components)
    other = next((list(score.components) for score in scores if list(score.components) != names), None)
    if other is not None:
        raise TrainerError(f"a completion's reward has the parts {other}, another's {names}; they have to be the same")
    return {
        "components": torch.tensor([[score.components[n] for n in names] for score in scores], dtype=torch.float32),
        "component_weights": torch.tensor([[score.weights[n] for n in names] for score in scores], dtype=torch.float32),
    }


def _place_reward(output: AgentLoopOutput, reward: float) -> list[float]:
    """Rewards per token: each turn's on its last token, the rest of the reward on the model's last token."""
    mask = output.loss_mask
    placed = [0.0] * len(mask)
    ends = [i for i, m in enumerate(mask) if m and not any(mask[i + 1 : i + 2])]
    if output.turn_rewards:
        if len(ends) != len(output.turn_rewards):
            raise ValueError(f"{len(output.turn_rewards)} turn rewards for {len(ends)} runs of model tokens")
        for end, turn_reward in zip(ends, output.turn_rewards, strict=True):
            placed[end] = turn_reward
    placed[ends[-1]] += reward - sum(output.turn_rewards)
    return placed


def _jagged(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> torch.Tensor:
    values = torch.tensor([value for row in rows for value in row], dtype=dtype)
    offsets = torch.tensor([0, *[len(row) for row in rows]]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _num_unknown(output: AgentLoopOutput, num_known: int | Mapping[str, int] | None) -> int:
    """Sampled ids that are beyond the tokenizer: rows of an embedding that was padded."""
    num_known = num_known[output.policy] if isinstance(num_known, Mapping) else num_known
    pairs = zip(output.completion_token_ids, output.loss_mask, strict=True)
    return 0 if num_known is None else sum(bool(wrote) and token >= num_known for token, wrote in pairs)


IMAGES = (
    "pixel_values",
    "image_grid_thw",
    "image_sizes",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
    "input_features",
    "audio_feature_lengths",
)
"""Ragged columns of images, videos and sounds, of which a model takes some: see `rl_engine.registry.describe_model`."""


class ImageReader:
    """Image reader: the model's own image processor, as servers use it.

    Raises:
        InputError: the processor cannot be loaded.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._processor = image_processor(folder)
        except (ImportError, OSError, ValueError) as error:
            raise InputError(
                f"the image processor in {folder} cannot be loaded (pip install 'rl-post-trainer[images]'): {error}"
            ) from error

    def num_added(self, urls: Sequence[str]) -> int:
        """Extra tokens of a prompt with these images and videos, beyond one placeholder each; pixels are not read.

        Raises:
            DataError: a video or a sound cannot be read, or exceeds a bound.
        """
        return sum(map(self._num_tokens, urls)) - len(urls)

    def _num_tokens(self, url: str) -> int:
        if url.startswith(("data:video/", "data:audio/")):
            try:
                return self._processor.num_clip_tokens(url)
            except (OSError, ValueError) as error:
                raise DataError(f"a {url[5:10]} cannot be used: {error}") from error
        image = _opened(url)
        return self._processor.num_tokens(image.height, image.width)

    def read(self, outputs: Sequence[AgentLoopOutput]) -> tuple[list[AgentLoopOutput], list[dict[str, Tensor]]]:
        """Trajectories with image placeholders expanded, and the values of each one's columns.

        Raises:
            TrainerError: a trajectory has not as many places as images.
        """
        seen: dict[str, tuple[tuple[int, ...], dict[str, Tensor]]] = {}
        written: list[AgentLoopOutput] = []
        values: list[dict[str, Tensor]] = []
        for output in outputs:
            for url in output.images:
                if url not in seen:
                    seen[url] = self._read(url)
            of_row = [seen[url] for url in output.images]
            written.append(written_out(output, self._processor.runs(output.images, [run for run, _ in of_row])))
            values.append(self._processor.join([found for _, found in of_row]))
        return written, values

    def _read(self, url: str) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        if not url.startswith(("data:video/", "data:audio/")):
            return self._processor.read(_opened(url).convert("RGB"))
        try:
            return self._processor.read_clip(url)
        except ValueError as error:
            raise TrainerError(f"a trajectory has a {url[5:10]} that cannot be read: {error}") from error


def written_out(output: AgentLoopOutput, runs: Mapping[int, Sequence[tuple[int, ...]]]) -> AgentLoopOutput:
    """Expand the placeholders of a trajectory: each becomes its run. Sampled placeholders stay single.

    Args:
        output: Trajectory with one placeholder for each image and video, or with whole runs already.
        runs: Tokens of each, by the id of their placeholder.

    Raises:
        TrainerError: there are neither as many placeholders as images, nor as many as these take.
    """
    pairs = zip(output.completion_token_ids, output.loss_mask, strict=True)
    given = [*output.prompt_token_ids, *(-1 if wrote else token for token, wrote in pairs)]
    try:
        ids, times = expand_runs("a trajectory", (*output.prompt_token_ids, *output.completion_token_ids), given, runs)
    except RequestError as error:
        raise TrainerError(str(error)) from error

    def repeated(name: str, times: Sequence[int]) -> tuple[Any, ...]:
        return tuple(value for value, count in zip(getattr(output, name), times, strict=True) for _ in range(count))

    start, length = len(output.prompt_token_ids), sum(times[: len(output.prompt_token_ids)])
    per_token = ("loss_mask", "rollout_logprobs", "weight_versions")
    return replace(
        output,
        prompt_token_ids=ids[:length],
        completion_token_ids=ids[length:],
        **{name: repeated(name, times[start:]) for name in per_token},
    )


def _opened(url: str) -> Any:
    """The image in a data URL, its pixels not yet decoded."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def rows_of(tags: Sequence[Mapping[str, Any]]) -> str:
    """Start of a message about samples: file and number of their rows, of five at most; empty where none is known."""
    rows = [*dict.fromkeys(str(tag[WHERE]) for tag in tags if WHERE in tag)]
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"{', '.join(rows[:5])}{more}: " if rows else ""
