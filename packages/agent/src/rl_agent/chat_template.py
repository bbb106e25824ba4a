"""Chat templates: prompts, and the tokens between turns, which are appended to the token ids of the conversation.

A template renders whole conversations. Rendering again after every turn would re-tokenise what the model wrote, and
many templates change the past (they drop old reasoning, trim, reorder arguments). So the template is applied to a
stand-in conversation whose assistant turn ends in an anchor, and only what comes after that turn is used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rl_agent.errors import RowError, TemplateError, TokenizerError, described, is_foreign
from rl_agent.media import count_images, take_images, without_images

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rl_agent.types import Message, Tokenizer

_ANCHOR = "ANCHORanchorANCHOR"  # letters only: no template escapes, trims or splits it
_USER: Message = {"role": "user", "content": "question"}
_OWN_ROLES = frozenset({"system", "developer", "assistant"})
"""Roles whose text is trusted: special tokens in it stay."""
ROWS_AT_ONCE = 1024
"""Rows that `tokenize_prompts` gives to the tokenizer in one call."""
_CALL_ARGUMENTS = {"anchor": _ANCHOR}
_CALL_ID = "call00000"  # nine letters and digits: some templates accept no other


class TurnTemplate:
    """Turn template: token ids of prompts and continuations, by the tokenizer's own chat template.

    Args:
        tokenizer: Any Hugging Face tokenizer with a chat template.
        tools: JSON schemas of the tools that the prompt tells the model of.
        template_kwargs: Further variables of the template, for example `enable_thinking`.

    Raises:
        TemplateError: the template drops what the assistant wrote, or a continuation built by appending differs from
            the template's own rendering; says where.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs: dict[str, Any] = dict(template_kwargs or {})
        if tools:
            self._kwargs["tools"] = list(tools)
        specials = special_tokens(tokenizer)
        self._specials = tuple(sorted(specials, key=len, reverse=True))
        self._special_ids = frozenset(specials.values())
        tail = self._encode(self._tail([_USER]))
        self.turn_end_id: int | None = next((i for i in tail if i in self._special_ids), None)
        """Id of the special token that closes an assistant's turn; None where the template writes none."""
        self._check()
        if tools:
            name = str(tools[0]["function"]["name"])
            for count in (1, 2):
                self._check_tools(
                    [{"role": "tool", "name": name, "tool_call_id": _CALL_ID, "content": f"r{i}"} for i in range(count)]
                )

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation, with the generation prompt of the assistant's turn.

        Raises:
            RowError: the template refuses these messages.
        """
        return render_prompt(self._tokenizer, messages, **self._kwargs)

    def continuation(self, messages: Sequence[Message], *, last_token_id: int, is_stopped: bool) -> tuple[int, ...]:
        """Token ids to append after an assistant's turn: the rest of its closing, `messages`, a generation prompt.

        Args:
            messages: New messages: tool answers or user messages.
            last_token_id: Last id that the model emitted. It is kept, whichever of its stop tokens it is.
            is_stopped: Whether generation stopped there. Where the turn was cut off, or stopped at an ordinary token,
                it is closed for the model.

        Raises:
            TemplateError: the template refuses the messages, or loses them.
        """
        if count_images(messages) and self._tail(messages) == self._tail(without_images(messages)):
            raise TemplateError(
                "the chat template leaves out the images of tool answers; use the template of a vision-language model"
            )
        if not is_stopped or last_token_id not in self._special_ids:
            ids = self._encode(self._tail(messages, calls=False))
            start = ids.index(self.turn_end_id) if self.turn_end_id in ids else 0
            return tuple(ids[start:])
        ids = self._encode(self._tail(messages))
        for end in (last_token_id, self.turn_end_id):
            if end in ids:
                return tuple(ids[ids.index(end) + 1 :])
        return tuple(self._encode(self._after_render(messages)))

    def escape(self, text: str) -> tuple[str, int]:
        """Break special tokens in `text` by a space, so that it cannot open or close a turn; returns text and count.

        What tools and environments say is data: without this, a web page that holds `<|im_end|>` would end its turn.
        """
        num_broken = 0
        for special in self._specials:
            if special in text:
                num_broken += text.count(special)
                text = text.replace(special, special[0] + " " + special[1:])
        return text, num_broken

    def escaped(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """Break special tokens in the messages of tools and users; returns the messages and the number of tokens.

        What the system says, and what the assistant has said, is the application's own, and stays as it is.
        """
        num_broken = 0

        def broken(value: Any) -> Any:
            nonlocal num_broken
            if isinstance(value, str):
                text, count = self.escape(value)
                num_broken += count
                return text
            if isinstance(value, list):
                return [broken(each) for each in cast("list[Any]", value)]
            if isinstance(value, dict):
                return {name: broken(each) for name, each in cast("dict[str, Any]", value).items()}
            return value

        given = [dict(message) for message in messages]
        return [each if each["role"] in _OWN_ROLES else broken(each) for each in given], num_broken

    # ---- rendering

    def _render(self, conversation: Sequence[Message], *, is_open: bool) -> str:
        rendered = self._tokenizer.apply_chat_template(
            with_contents(self._tokenizer, conversation), add_generation_prompt=is_open, tokenize=False, **self._kwargs
        )
        if not isinstance(rendered, str):
            raise TemplateError(f"the chat template gave {type(rendered).__name__} for tokenize=False; text is needed")
        return rendered

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _tail(self, messages: Sequence[Message], *, calls: bool = True) -> str:
        """Rendering after the anchor: the end of the assistant's turn, and all that follows."""
        return self._first(
            messages, lambda base: _after_anchor(self._render([*base, *messages], is_open=True)), calls=calls
        )

    def _after_render(self, messages: Sequence[Message]) -> str:
        """Text that messages add to a rendering, for templates without a special token at the end of a turn."""

        def added(base: list[Message]) -> str | None:
            before, after = self._render(base, is_open=False), self._render([*base, *messages], is_open=True)
            return after[len(before) :] if _ANCHOR in before and after.startswith(before) else None

        return self._first(messages, added)

    def _first(
        self, messages: Sequence[Message], use: Callable[[list[Message]], str | None], *, calls: bool = True
    ) -> str:
        """Render with the first stand-in conversation that the template accepts."""
        refusal: BaseException | None = None
        for assistant in _stand_ins([m for m in messages if m["role"] == "tool" and calls]):
            try:
                found = use([_USER, assistant])
            except TemplateError:
                raise
            except BaseException as error:  # a template refuses by an exception of its template engine
                if not is_foreign(error):
                    raise
                refusal = error
                continue
            if found is not None:
                return found
        roles = ", ".join(dict.fromkeys(str(m["role"]) for m in messages))
        reason = (
            f"it refuses them: {described(refusal)}"
            if refusal
            else "it leaves out what the assistant wrote before them"
        )
        raise TemplateError(
            f"the chat template cannot continue a conversation by {roles} messages; {reason}. "
            "Use a template that supports these roles"
        ) from refusal

    # ---- checking

    def _check_tools(self, answers: list[Message]) -> None:
        """Check that the template renders tool answers, and can continue after them."""
        marked = self._tail(answers)
        if not marked.strip():
            raise TemplateError("the chat template renders nothing for tool answers; it does not support tools")
        missing = next((answer for answer in answers if str(answer["content"]) not in marked), None)
        if missing is not None:
            raise TemplateError(f"the chat template leaves out the tool answer {missing['content']!r}")
        self.continuation(answers, last_token_id=self.turn_end_id or 0, is_stopped=self.turn_end_id is not None)

    def _check(self) -> None:
        """Check a continuation against the template's own rendering of the conversation."""
        prompt = list(self.prompt([_USER]))
        whole = self._encode(self._render([_USER, {"role": "assistant", "content": "answer"}, _USER], is_open=True))
        answer = self._encode("answer")
        start = len(prompt) if whole[: len(prompt)] == prompt else _find(whole, answer)
        end = self._end_of_turn(whole, start)
        emitted = whole[start:end] if end is not None else answer
        last = emitted[-1] if end is not None else -1
        tail = list(self.continuation([_USER], last_token_id=last, is_stopped=end is not None))
        expected = whole[start + len(emitted) :]
        if tail != expected:
            raise TemplateError(
                f"appending to a conversation gives {self._tokenizer.decode(tail)!r} after the assistant's turn where "
                f"the chat template renders {self._tokenizer.decode(expected)!r}; token ids would be wrong"
            )

    def _end_of_turn(self, ids: list[int], start: int) -> int | None:
        if self.turn_end_id is None or self.turn_end_id not in ids[start:]:
            return None
        return ids.index(self.turn_end_id, start) + 1


def _after_anchor(text: str) -> str | None:
    return text.rpartition(_ANCHOR)[2] if _ANCHOR in text else None


def _stand_ins(answers: Sequence[Message]) -> list[Message]:
    """Stand-in assistant turns before tool answers, from the fullest to the barest that a template may need."""
    plain: Message = {"role": "assistant", "content": _ANCHOR}
    if not answers:
        return [plain]
    arguments = {"anchor": _ANCHOR}
    turns: list[Message] = []
    for many in (answers, answers[:1]):
        for given in (arguments, json.dumps(arguments)):
            calls = [
                {
                    "type": "function",
                    "id": str(answer.get("tool_call_id", _CALL_ID)),
                    "function": {"name": str(answer.get("name", "tool")), "arguments": given},
                }
                for answer in many
            ]
            turns.append({"role": "assistant", "content": "", "tool_calls": calls})
    return [*turns, plain]


def _find(ids: list[int], part: list[int]) -> int:
    places = range(len(ids) - len(part), -1, -1)
    found = next((i for i in places if ids[i : i + len(part)] == part), None)
    if found is None:
        raise TemplateError("the chat template does not render what the assistant wrote")
    return found


def messages_of(row: Mapping[str, Any], field: str = "prompt") -> list[Message]:
    """Chat messages of a dataset row.

    Raises:
        RowError: there are none, or they are not messages.
    """
    messages = row.get(field)
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RowError(f"field {field!r} of the row is {messages!r}; it needs a list of chat messages, at least one")
    for i, message in enumerate(messages):
        if not (hasattr(message, "keys") and "role" in message and "content" in message):
            raise RowError(f"message {i} of field {field!r} is {message!r}; a message has a 'role' and a 'content'")
    return list(messages)


def tokenize_prompt(tokenizer: Tokenizer, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Token ids of a row's `prompt`, and its images as data URLs in the order of their placeholders.

    Raises:
        TemplateError, RowError: see `messages_of`, `take_images` and `render_prompt`.
    """
    messages, images = take_images(messages_of(row), row, takes_videos=takes_videos(tokenizer))
    return render_prompt(tokenizer, messages), images


def tokenize_prompts(
    tokenizer: Tokenizer, rows: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    """`tokenize_prompt` of many rows, in half the time where the tokenizer takes many conversations at once.

    Raises:
        TemplateError, RowError: see `tokenize_prompt`; when it is that row's turn.
    """
    for start in range(0, len(rows), ROWS_AT_ONCE):
        chunk = rows[start : start + ROWS_AT_ONCE]
        try:
            found = [take_images(messages_of(row), row, takes_videos=takes_videos(tokenizer)) for row in chunk]
            if any(images for _, images in found):
                raise RowError("images are counted row by row")
            conversations: list[Any] = [messages_for(tokenizer, messages) for messages, _ in found]
            many = tokenizer.apply_chat_template(
                conversations, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            if len(many) != len(chunk) or not all(isinstance(ids, list) and ids for ids in many):
                raise TemplateError("this tokenizer takes one conversation at a time")
        except BaseException as error:  # whatever it is, a row by itself says so, or has nothing to say
            if not is_foreign(error):
                raise
            yield from (tokenize_prompt(tokenizer, row) for row in chunk)
        else:
            yield from ((tuple(ids), ()) for ids in many)


def render_prompt(tokenizer: Tokenizer, messages: Sequence[Message], **kwargs: Any) -> tuple[int, ...]:
    """Token ids of a conversation, with the generation prompt of the assistant's turn.

    Raises:
        TemplateError: the tokenizer has no chat template, or one that does not give ids.
        RowError: its chat template refuses these messages, or leaves out their images.
    """
    messages = messages_for(tokenizer, messages)
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
        )
    except BaseException as error:  # a template refuses by an exception of its template engine, whichever that is
        if not is_foreign(error):
            raise
        if isinstance(error, ValueError) and not _is_usable(tokenizer, kwargs):
            raise TemplateError(f"the tokenizer's chat template cannot be applied: {error}") from error
        raise RowError(f"the chat template refuses the row's messages: {described(error)}") from error
    if not isinstance(ids, list) or not ids or not isinstance(ids[0], int):
        raise TemplateError(f"the tokenizer's chat template gave {ids!r}; a list of token ids is needed")
    if count_images(messages):
        bare = tokenizer.apply_chat_template(
            without_images(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
        )
        if bare == ids:
            raise RowError("the chat template leaves out the images; use the template of a vision-language model")
    return tuple(ids)


def messages_for(tokenizer: Tokenizer, chat: Sequence[Message]) -> list[Message]:
    """Messages with contents and arguments of tool calls in the form that the template of `tokenizer` takes.

    Raises:
        RowError: the template leaves out tool calls.
    """
    return with_arguments(tokenizer, with_contents(tokenizer, chat))


def with_contents(tokenizer: Tokenizer, chat: Sequence[Message]) -> list[Message]:
    """Messages whose contents are text, or lists of text parts, as the template of `tokenizer` writes them.

    Of a form that it does not know, a template writes Python's spelling or nothing. Contents with images stay.
    """
    messages = [dict(message) for message in chat]
    takes_text, takes_parts = _forms_of(tokenizer)
    if takes_text == takes_parts:  # both: contents stay as they were given
        return [*messages]
    for message in messages:
        content = message.get("content")
        if takes_text and isinstance(content, list) and all(map(_is_text, cast("list[Any]", content))):
            message["content"] = "".join(part["text"] for part in cast("list[dict[str, str]]", content))
        elif takes_parts and isinstance(content, str):
            message["content"] = [{"type": "text", "text": content}]
    return [*messages]


def _is_text(part: Any) -> bool:
    fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    return fields.get("type") == "text" and isinstance(fields.get("text"), str)


_FORMS: dict[str, tuple[bool, bool]] = {}


def _forms_of(tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Whether the chat template writes contents that are text, and ones that are lists of parts."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):  # none, or several by name
        return False, False
    if template not in _FORMS:
        _FORMS[template] = _writes(tokenizer, _ANCHOR), _writes(tokenizer, [{"type": "text", "text": _ANCHOR}])
    return _FORMS[template]


def _writes(tokenizer: Tokenizer, content: Any) -> bool:
    chat: list[Message] = [{"role": role, "content": content} for role in ("user", "assistant")]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except BaseException as error:  # a template refuses by whatever its engine raises
        if not is_foreign(error):
            raise
        return False
    return text.count(_ANCHOR) == 2 and not any(spelled in text for spelled in ("{'type'", '{"type"', "{'text'"))


def with_arguments(tokenizer: Tokenizer, chat: Sequence[Message]) -> list[Message]:
    """Messages whose tool calls have their arguments as the template of `tokenizer` takes them.

    OpenAI's messages have JSON text there, and most templates want an object: text would be quoted once more. Some
    write the text as it is, and of an object Python's spelling. Arguments that are no JSON object stay as they are.

    Raises:
        RowError: the template leaves out tool calls.
    """
    if not any(message.get("tool_calls") for message in chat):
        return list(chat)
    messages = [dict(message) for message in chat]
    convert = _to_text if _takes_text(tokenizer) else _to_object
    for message in messages:
        if isinstance(calls := message.get("tool_calls"), Sequence) and not isinstance(calls, str):
            message["tool_calls"] = [_converted(call, convert) for call in cast("Sequence[Any]", calls)]
    return [*messages]


def _converted(call: Any, convert: Callable[[Any], Any]) -> Any:
    if not isinstance(call, dict):
        return call
    fields = cast("dict[str, Any]", call)
    if isinstance(fields.get("function"), dict):
        return {**fields, "function": _converted(fields["function"], convert)}
    return {**fields, "arguments": convert(fields["arguments"])} if "arguments" in fields else fields


def _to_object(arguments: Any) -> Any:
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _to_text(arguments: Any) -> Any:
    found = _to_object(arguments)
    return json.dumps(found, ensure_ascii=False) if isinstance(found, dict) else arguments


def _takes_text(tokenizer: Tokenizer) -> bool:
    """Whether the template refuses an object as arguments, or writes Python's spelling of it, and takes JSON text."""
    by_object, by_text = (_spelled(tokenizer, convert(_CALL_ARGUMENTS)) for convert in (_to_object, _to_text))
    found = [text for text in (by_object, by_text) if text is not None]
    if found and not any(_ANCHOR in text for text in found):
        raise RowError("the chat template leaves out tool calls; use one that writes them, or leave them out")
    return by_text is not None and (by_object is None or str(_CALL_ARGUMENTS) in by_object)


def _spelled(tokenizer: Tokenizer, arguments: Any) -> str | None:
    call = {"type": "function", "id": _CALL_ID, "function": {"name": "f", "arguments": arguments}}
    chat: list[Message] = [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False))
    except BaseException as error:  # a template refuses by whatever its engine raises
        if not is_foreign(error):
            raise
        return None


def _is_usable(tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> bool:
    """Whether the chat template renders a plain question, so that an error is due to the messages."""
    try:
        tokenizer.apply_chat_template([_USER], add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs)
    except ValueError:
        return False
    return True


def load_tokenizer(model_path: str, *, takes_videos: bool = True) -> Tokenizer:
    """Load the tokenizer of a model folder or hub name, by transformers (`pip install 'rl-agent[hf]'`).

    Without `takes_videos` videos of rows are frames, each an image: the server of the model takes none
    (`rl_rollout.types.Capabilities`).

    Raises:
        TokenizerError: transformers is not installed, or the folder holds no tokenizer that it can load.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerError("loading a tokenizer needs transformers: pip install 'rl-agent[hf]'") from error
    is_pipeline = Path(model_path, "model_index.json").is_file() and not Path(model_path, "config.json").is_file()
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            model_path, subfolder="tokenizer" if is_pipeline else "", trust_remote_code=False
        )
        tokenizer.takes_videos = takes_videos and _is_of_videos(Path(model_path, "config.json"))
        return tokenizer
    except Exception as error:  # tokenizers raises Exception itself
        raise TokenizerError(f"no tokenizer can be loaded from {model_path!r}: {error}") from error


def takes_videos(tokenizer: Tokenizer) -> bool:
    """Whether the model and its server take videos; otherwise frames are images. See `load_tokenizer`."""
    return bool(getattr(tokenizer, "takes_videos", False))


def _is_of_videos(config: Path) -> bool:
    """Whether a `config.json` is of a model that takes videos: see `rl_csrc.inference.videos.video_columns`."""
    if not config.is_file():
        return False
    kind = str(json.loads(config.read_text()).get("model_type")).removesuffix("_moe")
    return kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens of a tokenizer, with their ids.

    `all_special_tokens` names those that have a role, such as the end of a sequence. Many model folders (Llama 3,
    gpt-oss) only flag the others, headers of turns among them, which text can spell out all the same.
    """
    named: tuple[Any, Any] = (getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ()))
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return dict(zip(*named, strict=True)) | {each.content: i for i, each in added.items() if each.special}


_MOST_PROMPTS = 1024
"""Rendered prompts that are cached; the oldest is dropped first."""


class CachedTokenizer:
    """Tokenizer with a cache of rendered chat templates: a group's completions share one prompt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Everything else is the tokenizer's own."""
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, conversation: Sequence[Message], **kwargs: Any) -> Any:
        """The tokenizer's `apply_chat_template`, cached."""
        try:
            key = json.dumps((conversation, kwargs))  # in the order of its keys, which a template may look at
        except TypeError:  # it holds something that JSON has no words for
            return self._tokenizer.apply_chat_template(conversation, **kwargs)
        if key not in self._known:
            if len(self._known) == _MOST_PROMPTS:
                del self._known[next(iter(self._known))]
            self._known[key] = self._tokenizer.apply_chat_template(conversation, **kwargs)
        return copy(self._known[key])

    def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """See `tokenize_prompt`."""
        return tokenize_prompt(cast("Tokenizer", self), row)
