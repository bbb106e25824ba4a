"""Tokenizer, incremental detokeniser, chat templates and tool calls of the OpenAI-compatible endpoints."""

from __future__ import annotations

import json
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_csrc.inference.messages import messages_for
from rl_rollout.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_UNFINISHED = "\ufffd"
"""Replacement character, to which a tokenizer decodes bytes of an incomplete character."""


class TextStream:
    """Incremental detokeniser: the text of a completion while its tokens arrive.

    Text that may still change is held back: the newest token (it may be a stop token, which is no part of the text),
    an unfinished character, and what could be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._stream = _decode_stream(self._backend)
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._read = 0
        """Number of tokens decoded so far."""
        self._num_decoded = 0
        """Number of characters of their text."""
        self._held = ""
        self.is_stopped = False
        """Whether a stop string was found; the text behind it is dropped."""

    def push(self, ids: Sequence[int]) -> str:
        """Append tokens; returns the further text that can no longer change."""
        self._ids.extend(ids)
        return self._emit(self._decode_to(len(self._ids) - 1), is_last=False)

    def finish(self, *, drop_last: bool) -> str:
        """Return the rest of the text, without the last token's if that was a stop token."""
        end = len(self._ids) - 1 if drop_last else len(self._ids)
        return self._emit(self._decode_to(end, is_last=True), is_last=True)

    def _decode_to(self, end: int, *, is_last: bool = False) -> str:
        new = None if is_last else self._steps(end)
        if new is None:  # the last piece, or a tokenizer without incremental decoding
            whole = self._backend.decode(self._ids[:end], skip_special_tokens=True)
            new = "" if whole.endswith(_UNFINISHED) and not is_last else whole[self._num_decoded :]
        self._read = max(self._read, end)
        self._num_decoded += len(new)
        return new

    def _steps(self, end: int) -> str | None:
        """Text of the tokens up to `end` by incremental decoding; None where the tokenizer has none."""
        if self._stream is None:
            return None
        try:
            return "".join(self._stream.step(self._backend, each) or "" for each in self._ids[self._read : end])
        except Exception:  # noqa: BLE001 - tokenizers' own error: the text does not extend the one before
            self._stream = None
            return None

    def _emit(self, new: str, *, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        num_held = 0 if is_last else max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]


def _decode_stream(backend: Any) -> Any:
    """Incremental decoder of `tokenizers`; None for a pure Python tokenizer, which decodes from the beginning."""
    if type(backend).__module__.partition(".")[0] != "tokenizers":
        return None
    from tokenizers.decoders import DecodeStream

    return DecodeStream(skip_special_tokens=True)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def plain_messages(messages: Any) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Convert OpenAI's messages to those of chat templates; returns them and their images in order.

    Content parts become one string where all are text; else an `image_url` part becomes `{"type": "image"}`.

    Raises:
        RequestError: there is no message, one has no role, or a part is neither text nor an image's data URL.
    """
    if not messages or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise RequestError("the request needs 'messages': a list of objects with 'role' and 'content'")
    images: list[str] = []
    plain: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [_plain_part(part, images) for part in content]
            is_text = all(part["type"] == "text" for part in parts)
            content = "".join(part["text"] for part in parts) if is_text else parts
        plain.append(check_calls({**message, "content": content}))
    return plain, tuple(images)


def _plain_part(part: Any, images: list[str]) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str()}:
            return part
        case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith("data:image/"):
            images.append(url)
            return {"type": "image"}
        case {"type": "image_url"}:
            raise RequestError("an image_url must be a data URL (data:image/png;base64,...); nothing is downloaded")
        case _:
            raise RequestError(f"a part of a message's content is {part!r:.100}; it must be text or image_url")


class LazyTokenizer:
    """Tokenizer of a model folder, loaded at the first request with text."""

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path
        self._tokenizer: Any = None
        self._longest: int | None = None
        """Length of the longest token, characters."""

    def get(self) -> Any:
        """Load the Hugging Face tokenizer, once.

        Raises:
            RequestError: the folder has none that can be loaded, so only token ids are served.
        """
        if self._tokenizer is None:
            try:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(
                    self._model_path, local_files_only=True, trust_remote_code=False
                )
            except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
                raise RequestError(
                    f"model folder {self._model_path!r} has no tokenizer that can be loaded ({error}); "
                    "text is not served here, use /generate with token ids"
                ) from error
        return self._tokenizer

    def encode(self, text: str, most: int | None = None) -> tuple[int, ...]:
        """Token ids of a plain text.

        Raises:
            RequestError: the text is too long for `most` tokens; it is refused without being tokenised.
        """
        self._check_length(text, most)
        return tuple(self.get().encode(text))

    def _check_length(self, text: str, most: int | None) -> None:
        if self._longest is None:
            self._longest = max(map(len, self.get().get_vocab()))
        if most is not None and len(text) > most * self._longest:
            raise RequestError(f"a text of {len(text)} characters is longer than max_model_len={most} tokens can be")

    def encode_chat(
        self, messages: Sequence[Any], tools: Sequence[Any] = (), most: int | None = None
    ) -> tuple[int, ...]:
        """Token ids of a conversation, with the generation prompt of the assistant's turn.

        Raises:
            RequestError: the tokenizer has no chat template, or the template refuses the messages or ignores the tools.
        """
        tokenizer = self.get()
        if not getattr(tokenizer, "chat_template", None):
            raise RequestError("the tokenizer has no chat template; use /v1/completions")
        try:
            chat = messages_for(tokenizer, messages)
            render = partial(tokenizer.apply_chat_template, chat, tokenize=False, add_generation_prompt=True)
            text = render(tools=list(tools) or None)
            shows_tools = not tools or text != render()
        except Exception as error:  # jinja2's errors, and whatever a template raises
            raise RequestError(f"the chat template refused the messages: {error}") from error
        self._check_length(text, most)
        if not shows_tools:
            raise RequestError("the model's chat template ignores tools; leave them out, or serve another model")
        return tuple(tokenizer.encode(text, add_special_tokens=False))


def check_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Validate the tools of a request.

    Raises:
        RequestError: one is not a function with a name.
    """
    for tool in tools:
        match tool:
            case {"type": "function", "function": {"name": str(name)}} if name:
                pass
            case _:
                wanted = '{"type": "function", "function": {"name": ...}}'
                raise RequestError(f"a tool is {tool!r:.100}; it must be {wanted}")
    return list(tools)


def check_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Check the tool calls of a message, and return it.

    Raises:
        RequestError: one is not a function with name and arguments.
    """
    calls = message.get("tool_calls") or ()
    try:
        [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    except (KeyError, TypeError) as error:
        raise RequestError(
            f"a message's tool_calls are {calls!r:.100}; each needs a function with name and arguments"
        ) from error
    return message


def read_calls(parse: Callable[[str], Any], text: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Parse a turn; returns its content and tool calls in OpenAI's format.

    A turn with a malformed call has no calls: all of it is content, so that the caller sees what the model wrote.
    """
    turn = parse(text)
    if any(call.error for call in turn.calls):
        return text, ()
    calls = tuple(
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in turn.calls
    )
    return turn.content if calls else text, calls
