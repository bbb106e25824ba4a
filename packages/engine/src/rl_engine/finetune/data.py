"""JSONL and parquet files of chats and token ids as the columns that an engine takes."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import NonTensorStack

from rl_csrc.inference.messages import messages_for
from rl_engine.batch.packed import ragged_batch
from rl_engine.checkpoint.hf_folder import folder_tokens
from rl_engine.errors import DataError
from rl_engine.finetune.images import ENCODED, ImageReader, RowImages, encoded, encoded_video, joined, take_images

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    import torch
    from tensordict import TensorDict

    from rl_csrc.inference.folder_tokens import FolderTokens

HUB = "hf:"
"""Prefix of a dataset that the datasets package reads."""


@dataclass(slots=True)
class Columns:
    """Rows being collected."""

    reader: ImageReader
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    completions: list[list[int]] = field(default_factory=list[list[int]])
    masks: list[list[int]] = field(default_factory=list[list[int]])
    images: list[RowImages] = field(default_factory=list[RowImages])

    def add(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        mask: Sequence[int] | None = None,
        images: Sequence[str] = (),
    ) -> None:
        """Add one row, with a placeholder token for each image and video; without a mask all of its completion counts.

        Raises:
            DataError: as `ImageReader.place`.
        """
        row = self.reader.place(prompt, completion, mask, images)
        for values, value in zip((self.prompts, self.completions, self.masks), row, strict=True):
            values.append(value)
        self.images.append(RowImages(tuple(images), self.reader))

    def batch(self, **more: torch.Tensor) -> TensorDict:
        """The columns of an engine's batch, and `more`; with images, as `with_pixels` completes them."""
        if any(each.sources for each in self.images):
            more |= {ENCODED: NonTensorStack(*self.images), **joined([each.sizes() for each in self.images])}
        return ragged_batch(self.prompts, self.completions, self.masks).update(more)


class ChatTokenizer:
    """A model folder's tokenizer, loaded when a row first needs one."""

    def __init__(self, model_path: str | Path) -> None:
        self._model_path = model_path
        self._loaded: Any = None
        self._tokens: FolderTokens | None = None
        self._tools: list[Any] | None = None
        self._given: dict[str, list[Any]] = {}
        self.images: list[str] = []
        """Encoded images and videos of the row: those of the last chat, in its order; without a chat all of them."""

    def begin(self, row: Mapping[str, Any]) -> None:
        """Begin a row: `images` and `videos` fill the places in its chats, and these describe `tools` to the model.

        Tools are JSON schemas, or their JSON text. A row of token ids has its tools there already.

        Raises:
            DataError: tools, images or videos are no list, or one of these is none.
        """
        tools = None if "prompt_token_ids" in row else row.get("tools")
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except (ValueError, RecursionError) as error:
                raise DataError(f"tools is not JSON: {error}") from error
        if tools and not isinstance(tools, list):
            raise DataError(f"tools is a {type(tools).__name__}; wanted a list of JSON schemas of functions")
        for kind in ("image", "video"):
            if not isinstance(given := row.get(f"{kind}s") or [], list):
                raise DataError(f"{kind}s is a {type(given).__name__}; wanted a list of {kind}s")
            self._given[kind] = given
        self._tools = well_formed(tools)
        self.images = [*map(encoded, self._given["image"]), *map(encoded_video, self._given["video"])]

    def _shown(self, messages: str | Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Messages for the chat template; their images and videos are taken out into `images`."""
        shown, self.images = take_images(_as_chat(messages), self._given)
        return shown

    def _check_reasoning(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raises DataError where the template leaves out the reasoning of the last message, which is learned."""
        reasoning = messages[-1].get("reasoning_content")
        if isinstance(reasoning, str) and reasoning.strip() not in self._render(messages):
            raise DataError(
                "the chat template leaves out reasoning_content; use one that writes it, or write it into content"
            )

    def text(self, text: str) -> tuple[list[int], list[int]]:
        """Raw text without a chat template, as its first token and the others, ended by the tokenizer's eos."""
        loaded = _loaded_tokenizer(self._model_path) if self._loaded is None else self._loaded
        if loaded.eos_token_id is None:
            raise _FolderError(f"The tokenizer of {self._model_path} has no eos token, which ends a text; add one.")
        if loaded.chat_template is not None:
            self._loaded = loaded
        ids: list[int] = loaded(text)["input_ids"]
        ids = ids if ids[-1:] == [loaded.eos_token_id] else [*ids, loaded.eos_token_id]
        return ids[:1], ids[1:]

    def prompt(self, messages: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """A chat up to where the assistant speaks; text alone is what the user says."""
        return self.ids(self._render(self._shown(messages), is_open=True))

    def turn(
        self, messages: str | Sequence[Mapping[str, Any]], said: str | Sequence[Mapping[str, Any]]
    ) -> tuple[list[int], list[int]]:
        """Token ids of a chat up to where the assistant speaks, and of what it says next, with the end of its turn.

        Args:
            messages: The chat; text alone is the user's.
            said: The assistant's text, or a chat of its one message. The template writes it, as in `conversation`.

        Raises:
            DataError: the chat is not one message of the assistant.
        """
        if isinstance(said, str):
            said = [{"role": "assistant", "content": said}]
        if len(said) != 1 or said[0].get("role") != "assistant":
            raise DataError("a completion given as a chat is one message of the assistant; give several in messages")
        *shown, answer = self._shown([*_as_chat(messages), *said])
        self._check_reasoning([*shown, answer])
        with self._rendering():
            return self._folder_tokens().turn(self._tokenizer(), shown, answer)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int], list[int]]:
        """Prompt, completion and loss mask of a whole chat: 1 on what the assistant says, the ends of turns included.

        The prompt ends where the assistant first speaks. Every piece is tokenised by itself, as it is when a policy
        generates: what it says is appended to what it was given.

        Raises:
            DataError: no assistant turn, or a template that writes a turn differently once another follows it.
        """
        turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise DataError("messages has no assistant turn to learn from")
        messages = self._shown(messages)
        for turn in turns:
            self._check_reasoning(messages[: turn + 1])
        if len(turns) == 1:
            with self._rendering():
                prompt, said = self._folder_tokens().turn(self._tokenizer(), messages[: turns[0]], messages[turns[0]])
            return prompt, said, [1] * len(said)
        pieces: list[tuple[list[int], bool]] = []
        text = ""
        for turn in turns:
            before, after = self._render(messages[:turn], is_open=True), self._render(messages[: turn + 1])
            if not (before.startswith(text) and after.startswith(before)):
                raise DataError(
                    "the chat template writes an earlier turn differently once a later one follows, so that one row "
                    "cannot hold them all; give a row per assistant turn (prompt and completion)"
                )
            pieces += [(self.ids(before[len(text) :]), False), (self.ids(after[len(before) :]), True)]
            text = after
        pieces[-1] = self._folder_tokens().ended(pieces[-1][0]), True
        completion = [token for ids, _ in pieces[1:] for token in ids]
        mask = [kept for ids, spoken in pieces[1:] for kept in self._spoken(ids, spoken)]
        return pieces[0][0], completion, mask

    def _spoken(self, ids: list[int], spoken: bool) -> list[int]:
        """1 up to the end of an assistant's turn; text that the template adds behind it is not learned."""
        length = self._folder_tokens().length_of_turn(ids) or len(ids)
        return [int(spoken and at < length) for at in range(len(ids))]

    def ids(self, text: str) -> list[int]:
        """Tokens of a piece of text by itself."""
        with self._rendering():
            return self._tokenizer()(text, add_special_tokens=False)["input_ids"]

    def _render(self, messages: Sequence[Mapping[str, Any]], *, is_open: bool = False) -> str:
        with self._rendering():
            tokenizer = self._tokenizer()
            chat = messages_for(tokenizer, messages)
            return tokenizer.apply_chat_template(chat, add_generation_prompt=is_open, tokenize=False)

    @contextmanager
    def _rendering(self) -> Generator[None]:
        """Turn what a chat template or a tokenizer raises, panics of Rust code included, into a DataError."""
        self._tokenizer()
        try:
            yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit, DataError):
            raise
        except BaseException as error:
            raise DataError(
                f"The chat template of {self._model_path} cannot render a prompt: {type(error).__name__}: {error}"
            ) from error

    def _tokenizer(self) -> Any:
        if self._loaded is None:
            self._loaded = _tokenizer(self._model_path)
        return _ToolTokenizer(self._loaded, self._tools) if self._tools else self._loaded

    def _folder_tokens(self) -> FolderTokens:
        if self._tokens is None:
            self._tokens = folder_tokens(self._model_path)
        return self._tokens


class _ToolTokenizer:
    """Tokenizer whose chat template is given tools."""

    def __init__(self, tokenizer: Any, tools: list[Any]) -> None:
        self._tokenizer, self._tools = tokenizer, tools

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        return self._tokenizer.apply_chat_template(conversation, tools=self._tools, **kwargs)


def well_formed(value: Any) -> Any:
    """Replace lone surrogates, which JSON can spell and no tokenizer takes."""
    if isinstance(value, dict):
        return {well_formed(name): well_formed(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [well_formed(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return value


def without_nulls(value: Any) -> Any:
    """Drop fields without a value, which Arrow fills in; `content` of a message may be null."""
    if isinstance(value, dict):
        return {  # pyright: ignore[reportUnknownVariableType]
            name: without_nulls(each)
            for name, each in value.items()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            if each is not None or (name == "content" and "role" in value)
        }
    if isinstance(value, list):
        return [without_nulls(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return value


_CHATS = ("messages", "prompt", "completion", "chosen", "rejected", "tools", "text")


def _cleaned(row: Any) -> Any:
    """Raises DataError for a chat that is nested too deeply."""
    if not isinstance(row, dict):
        return row
    try:
        return {name: well_formed(value) if name in _CHATS else value for name, value in row.items()}  # pyright: ignore[reportUnknownVariableType]
    except RecursionError as error:
        raise DataError("is nested too deeply; flatten it, or hold it as text") from error


def _without_filled(row: dict[str, Any]) -> dict[str, Any]:
    """Row of a table without the nulls that Arrow fills in: columns, and fields of chats, that other rows have."""
    found = {name: value for name, value in row.items() if value is not None}
    return {name: without_nulls(value) if name in _CHATS else value for name, value in found.items()}


class _FolderError(DataError):
    """A model folder that cannot make tokens of any row."""


_MOST_SHOWN = 5
"""Rows that a refusal names."""


def read_rows(
    path: str | Path,
    model_path: str | Path,
    shapes: Sequence[tuple[str, ...]],
    use: Callable[[Mapping[str, Any], int, ChatTokenizer], None],
) -> None:
    """Read the rows of a .jsonl or .parquet file, or of a dataset `hf:NAME[:SPLIT]`.

    Args:
        path: The file.
        model_path: Folder of the tokenizer.
        shapes: Names of fields; a row has all of one shape.
        use: Called with each row, its number in the file (from 1), and the tokenizer, which has begun it.

    Raises:
        DataError: no file, no rows, or rows that have none of the shapes or that `use` refuses; names up to five.
    """
    tokenizer, bad, num_rows = ChatTokenizer(model_path), list[str](), 0
    for number, row in _records(path):
        num_rows += 1
        try:
            checked = _checked(_cleaned(row), shapes)
            tokenizer.begin(checked)
            use(checked, number, tokenizer)
        except _FolderError:
            raise
        except DataError as error:
            colon = "" if str(error).startswith(("has ", "is not ", "is nested ")) else ":"
            bad.append(f"row {number}{colon} {str(error).removesuffix('.')}")
    if not num_rows:
        raise DataError(f"Data file {path} has no rows.")
    if bad:
        more = f"; and {len(bad) - _MOST_SHOWN} more" if len(bad) > _MOST_SHOWN else ""
        which = "" if len(bad) == 1 else f"{len(bad)} of {num_rows} rows cannot be used: "
        raise DataError(f"{path}: {which}{'; '.join(bad[:_MOST_SHOWN])}{more}.")


def _records(path: str | Path) -> Iterator[tuple[int, Any]]:
    if str(path).startswith(HUB):
        return _dataset_rows(str(path))
    path = Path(path)
    if not path.is_file():
        raise DataError(f"Data file {path} does not exist.")
    return (_parquet_rows if path.suffix == ".parquet" else _jsonl_rows)(path)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows by the numbers of their lines; the error of a line that is no JSON in place of its row."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=_object)
            except DataError as error:
                row = error
            except (ValueError, RecursionError) as error:
                row = DataError(f"is not JSON that can be read: {error}")
            yield number, row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises DataError for a name that an object has twice: which of the values is meant is not known."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise DataError(f"has {next(name for name in names if names.count(name) > 1)!r} twice; take one out")
    return made


def _dataset_rows(path: str) -> Iterator[tuple[int, Any]]:
    """Rows of a dataset, with the fields that have a value."""
    name, _, split = path.removeprefix(HUB).partition(":")
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{path} needs the datasets package ({error}); try: pip install datasets") from error
    try:
        found: Any = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # a dataset may raise anything
        raise DataError(f"{path} cannot be loaded: {str(error).splitlines()[0] if str(error) else error!r}") from error
    for number, row in enumerate(found, start=1):
        yield number, _without_filled(row)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Rows with the fields that have a value: a column that other rows have is no field of this one."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs pyarrow ({error}); try: pip install pyarrow") from error
    try:
        file = parquet.ParquetFile(path)
        _object([(name, None) for name in file.schema_arrow.names])
        batches = file.iter_batches()
        for number, row in enumerate((row for batch in batches for row in _rows_of(batch)), start=1):
            yield number, row if isinstance(row, DataError) else _without_filled(row)
    except DataError as error:
        raise DataError(f"{path} {error}") from error
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _rows_of(batch: Any) -> list[Any]:
    """Rows of an Arrow batch; an error in place of one with a value that Python has not, such as a far date."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [DataError(f"is not a row that Python can hold: {error}")]
        return [row for index in range(batch.num_rows) for row in _rows_of(batch.slice(index, 1))]


def pair_of(
    row: Mapping[str, Any],
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """Prompt, preferred and rejected message of a pair: texts after a prompt, or chats that differ in the last turn.

    Raises:
        DataError: the chats do not begin alike, or do not end with the assistant.
    """
    prompt = _as_chat(row.get("prompt", ()))
    chats: list[list[Mapping[str, Any]]] = []
    for name in ("chosen", "rejected"):
        said = row[name]
        chats.append([*prompt, *([{"role": "assistant", "content": said}] if isinstance(said, str) else said)])
    (*before, chosen), (*other, rejected) = chats
    if before != other:
        raise DataError("chosen and rejected begin with different messages; they may differ in the last one alone")
    if {chosen.get("role"), rejected.get("role")} != {"assistant"}:
        raise DataError("chosen and rejected have to end with a message of the assistant")
    return before, [chosen], [rejected]


def _as_chat(prompt: str | Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def refuse_empty(path: str | Path, columns: Columns, numbers: Sequence[int]) -> None:
    """Refuse a row without a prompt token or without a completion token, and a file without a token to learn.

    Args:
        path: The file.
        columns: Its rows.
        numbers: Number of the file's row that each came from.

    Raises:
        DataError: names the row of the file.
    """
    if not any(map(any, columns.masks)):
        raise DataError(f"{path}: loss_mask is 0 on every token of every row, so that there is nothing to learn.")
    for index, (prompt, completion) in enumerate(zip(columns.prompts, columns.completions, strict=True)):
        if not prompt or not completion:
            raise DataError(f"{path}: row {numbers[index]} needs at least one prompt token and one completion token.")


def _checked(row: Any, shapes: Sequence[tuple[str, ...]]) -> Mapping[str, Any]:
    if isinstance(row, DataError):
        raise row
    if isinstance(row, dict) and any(all(name in row for name in shape) for shape in shapes):
        has_ids = "prompt_token_ids" in row  # texts next to them are not read
        for name, (is_right, wanted) in _FIELDS.items():
            is_read = name in row and not (has_ids and is_right in (_is_chat, _is_text, _is_chat_or_text))
            if is_read and not is_right(row[name]):
                raise DataError(f"{name} is {_shortened(row[name])}; wanted {wanted}")
        return row  # pyright: ignore[reportUnknownVariableType] - JSON
    fields = ", ".join(sorted(map(str, row))) if isinstance(row, dict) else type(row).__name__
    wanted = ", or ".join(f"{', '.join(shape[:-1])} and {shape[-1]}" if shape[1:] else shape[0] for shape in shapes)
    raise DataError(f"has {fields or 'nothing'}; wanted {wanted}")


def _shortened(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in value)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_chat_or_text(value: Any) -> bool:
    return _is_text(value) or _is_chat(value)


def _list_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))  # pyright: ignore[reportUnknownArgumentType]


_CHAT = (_is_chat, 'a list of chat messages, such as [{"role": "user", "content": "text"}]')
_EITHER = (_is_chat_or_text, f"text or {_CHAT[1]}")
_IDS = (_list_of(lambda one: type(one) is int), "a list of whole numbers")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "messages": _CHAT,
    "text": (_is_text, "text"),
    **dict.fromkeys(("prompt", "completion", "chosen", "rejected"), _EITHER),
    **{f"{name}_token_ids": _IDS for name in ("prompt", "completion", "chosen", "rejected")},
    "loss_mask": (_list_of(lambda one: type(one) is int and one in (0, 1)), "a list of 0 and 1"),
    "steps": (_list_of(_is_text), "a list of texts"),
    "labels": (_list_of(lambda one: isinstance(one, int | float) and 0 <= one <= 1), "a list of numbers from 0 to 1"),
}


_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")


def _loaded_tokenizer(model_path: str | Path) -> Any:
    from transformers import AutoTokenizer

    lack = f"Model folder {model_path} has no tokenizer; give one, or pre-tokenised rows"
    if not any(file for pattern in _VOCABULARIES for file in Path(model_path).glob(pattern)):
        raise _FolderError(lack)  # transformers would make an empty one
    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises Exception itself
        message = " ".join(str(error).split())
        raise _FolderError(f"transformers cannot load the tokenizer of {model_path}: {message:.300}") from error


def _tokenizer(model_path: str | Path) -> Any:
    tokenizer = _loaded_tokenizer(model_path)
    if tokenizer.chat_template is None or folder_tokens(model_path).turn_end_id is None:
        lack = "chat template" if tokenizer.chat_template is None else "eos token"
        raise _FolderError(f"The tokenizer of {model_path} has no {lack}; add one, or give pre-tokenised rows.")
    return tokenizer
