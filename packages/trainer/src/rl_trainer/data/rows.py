"""What a row is, and how a record of a file becomes one.

A row is a JSON-able mapping: `prompt` (chat messages), `data_source`, `reward_model` ({"style": "rule",
"ground_truth": ...}), `extra_info`, optionally `agent_name`, `images` and `videos`. Every row is checked before it is
used.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rl_trainer.data.options import record_options
from rl_trainer.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_trainer.config import DataConfig

Row = dict[str, Any]

_GSM8K_ANSWER = re.compile(r"####\s*(\S.*)\s*$")
_SEEN = ("image", "image_url", "video", "video_url")
GSM8K_INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."


def row_maker(config: DataConfig) -> Callable[[Mapping[str, Any], str], Row]:
    """What makes a row of a record and of the words for where it stands.

    Raises (when called):
        DataError: the record lacks a field, or holds what no part can use.
    """
    template = record_options(config).prompt_template
    return (lambda record, where: _from_gsm8k(record, where, template)) if config.format == "gsm8k" else checked


def checked(record: Mapping[str, Any], where: str) -> Row:
    """The record as it is, if it is a row."""
    for name in ("prompt", "data_source", "reward_model"):
        if name not in record:
            raise DataError(f"{where} has no field {name!r}; a row needs prompt, data_source and reward_model")
    messages = record["prompt"]
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)
    ):
        raise DataError(
            f"{where}: 'prompt' must be a non-empty list of messages with role and content, got {messages!r:.80}"
        )
    for number, message in enumerate(messages, start=1):
        content = message["content"]
        if not (isinstance(content, str | list) or (content is None and message.get("tool_calls"))):
            raise DataError(
                f"{where}: message {number} of 'prompt' has content {content!r:.80}; give text, or a list of parts"
            )
    if not isinstance(record["reward_model"], dict) or "ground_truth" not in record["reward_model"]:
        raise DataError(
            f"{where}: 'reward_model' must be an object with 'ground_truth', got {record['reward_model']!r:.80}"
        )
    return dict(record)


def shows_images(row: Row) -> bool:
    """Whether the prompt has images, or frames of videos, which reach the model as images."""
    parts = (part for message in row["prompt"] if isinstance(message["content"], list) for part in message["content"])
    return any(part.get("type", "text") in _SEEN for part in parts if isinstance(part, dict))


def _from_gsm8k(record: Mapping[str, Any], where: str, template: str) -> Row:
    for name in ("question", "answer"):
        if not isinstance(record.get(name), str):
            raise DataError(f"{where} has no text field {name!r}; gsm8k rows have question and answer")
    found = _GSM8K_ANSWER.search(record["answer"])
    if found is None:
        raise DataError(f"{where}: the answer has no line '#### <number>'")
    question = template.format(question=record["question"])
    return {
        "prompt": [{"role": "user", "content": f"{question}\n{GSM8K_INSTRUCTION}"}],
        "data_source": "gsm8k",
        "reward_model": {"style": "rule", "ground_truth": found.group(1).replace(",", "")},
        "extra_info": {},
    }
