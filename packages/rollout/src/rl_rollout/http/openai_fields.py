"""The fields that the OpenAI-compatible endpoints take, with their JSON types. What is not here is refused."""

from __future__ import annotations

from typing import Any

_NUMBER = (int, float)
_COMMON: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "max_tokens": (int,),
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": (int,),
    "n": (int,),
    "stream": (bool,),
    "stream_options": (dict,),
    "stop": (str, list),
    "stop_token_ids": (list,),
    "ignore_eos": (bool,),
    "return_token_ids": (bool,),
    "seed": (int,),
    "user": (str,),
    "metadata": (dict,),
}
COMPLETION_TYPES = {**_COMMON, "prompt": (str, list), "logprobs": (int,), "prompt_logprobs": (int,)}
CHAT_TYPES = {
    **_COMMON,
    "messages": (list,),
    "max_completion_tokens": (int,),
    "logprobs": (bool,),
    "top_logprobs": (int,),
    "tools": (list,),
    "tool_choice": (str, dict),
    "parallel_tool_calls": (bool,),
}

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
}
"""Fields of OpenAI's that are accepted at the value that changes nothing."""
