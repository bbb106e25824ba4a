"""Special tokens of a Hugging Face model folder: which ids end a turn, and how many ids its tokenizer has.

Folders say in four places which tokens end a turn, and they differ: `eos_token_id` of `generation_config.json` and of
`config.json`, the tokenizer's eos token, and the token that the chat template writes after an assistant's message.
Servers, agent loops and fine-tuning all go by `read_folder_tokens`, so that what is trained to end a turn also ends it.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rl_csrc.inference.messages import messages_for

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from types import FrameType

_ANCHOR = "ANCHORanchorANCHOR"  # letters only: no template escapes, trims or splits it
_GENERATION, _CONFIG, _TOKENIZER, _TEMPLATE = "generation_config.json", "config.json", "tokenizer", "chat template"

_SIZES = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 100_000,
    "hidden_size": 10_000_000,
    "intermediate_size": 10_000_000,
    "vocab_size": 100_000_000,
    "max_position_embeddings": 10**10,
}
"""Sizes in config.json, with the highest value that is not a mistake."""
_SECTIONS = ("text_config", "vision_config", "audio_config", "rope_parameters", "rope_scaling", "quantization_config")
"""Objects in config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTokens:
    """Special tokens of a model folder."""

    ids_by_source: Mapping[str, tuple[int, ...]]
    """Ids that end a turn, by where the folder says so: the two files, `tokenizer`, `chat template`."""
    texts: Mapping[int, str]
    """Texts by id, the highest first: of the added tokens and those with a role; then of the highest id of all."""
    ids_by_role: Mapping[str, int]
    """Ids of the tokens with a role: `eos_token`, `pad_token`, ..."""
    num_tokens: int | None
    """Ids of the tokenizer: one more than its highest. None without a `tokenizer.json`."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a turn, each once, in the order of the sources."""
        return tuple(dict.fromkeys(i for ids in self.ids_by_source.values() for i in ids))

    @property
    def turn_end_id(self) -> int | None:
        """Id that closes an assistant's turn in text to learn from: the template's, else the tokenizer's eos."""
        for source in (_TEMPLATE, _TOKENIZER):
            if ids := self.ids_by_source.get(source):
                return ids[0]
        return next(iter(self.end_ids), None)

    @property
    def unlisted_id(self) -> int | None:
        """Id with which the template ends turns, if neither of the files nor the tokenizer calls it eos."""
        listed = {i for source, ids in self.ids_by_source.items() if source != _TEMPLATE for i in ids}
        return next((i for i in self.ids_by_source.get(_TEMPLATE, ()) if i not in listed), None)

    def padding_id(self, vocab_size: int) -> int | None:
        """Id to pad rows with: the tokenizer's, or a special token that ends no turn if that does or there is none.

        transformers' sequence classifiers score the last token that is not padding, which is to be the end of a turn.
        """
        ends = {self.turn_end_id, self.ids_by_role.get("eos_token")}
        roles = (self.ids_by_role.get(role) for role in ("pad_token", "unk_token", "bos_token"))
        found = (i for i in (*roles, *self.texts) if i is not None)
        return next((i for i in found if i not in ends and i < vocab_size), None)

    @property
    def lines(self) -> list[str]:
        """For a plan: the tokens that end a turn, and a warning about the template's if no file calls it eos."""
        found = [", ".join(map(self.named, self.end_ids)) or "none: completions end at their longest alone"]
        if self.unlisted_id is not None:
            found.append(
                f"the chat template ends turns with {self.named(self.unlisted_id)}, which is not an eos_token_id of "
                "generation_config.json, config.json or the tokenizer. Turns end there here, and a saved model's "
                "generation_config.json lists it; other servers of this folder would generate past it"
            )
        return found

    def turn(self, tokenizer: Any, chat: Sequence[Any], answer: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Token ids of a chat up to where the assistant speaks, and of its next message, with the end of the turn.

        Args:
            tokenizer: The folder's, of transformers.
            chat: The messages before.
            answer: The assistant's message. The chat template writes it, so that it is trimmed as in longer chats.
        """
        whole = messages_for(tokenizer, [*chat, answer])
        before: str = tokenizer.apply_chat_template(whole[:-1], add_generation_prompt=True, tokenize=False)
        after: str = tokenizer.apply_chat_template(whole, add_generation_prompt=False, tokenize=False)
        written = after.removeprefix(before)
        if not after.startswith(before):  # some open a reply with more than they write of a finished one, as <think>
            if answer.get("tool_calls"):
                raise ValueError("the template opens a reply with more than it writes of one with tool calls")
            probe = messages_for(tokenizer, [*whole[:-1], {"role": "assistant", "content": _ANCHOR}])
            plain = tokenizer.apply_chat_template(probe, add_generation_prompt=False, tokenize=False)
            opening = before.removeprefix(plain.partition(_ANCHOR)[0])
            written = _text_of(answer.get("content")).removeprefix(opening).removeprefix(opening.strip())
        prompt, said = (tokenizer.encode(text, add_special_tokens=False) for text in (before, written))
        return prompt, self.ended(said)

    def ended(self, token_ids: Sequence[int]) -> list[int]:
        """An assistant's turn up to the token that ends it, which is added if there is none."""
        length = self.length_of_turn(token_ids)
        closing = [] if self.turn_end_id is None else [self.turn_end_id]
        return list(token_ids[:length]) if length else [*token_ids, *closing]

    def length_of_turn(self, token_ids: Sequence[int]) -> int:
        """Number of tokens up to the last that ends a turn; 0 without one."""
        return max((at + 1 for at, token in enumerate(token_ids) if token in self.end_ids), default=0)

    def named(self, token_id: int) -> str:
        """The id with its token's text, for messages."""
        return f"{self.texts[token_id]} ({token_id})" if token_id in self.texts else str(token_id)


def _text_of(content: Any) -> str:
    """Text of a message's content: text, parts of text, or none."""
    if isinstance(content, list):
        return "".join(str(part["text"]) for part in cast("list[dict[str, Any]]", content) if "text" in part)
    return "" if content is None else str(content)


def read_folder_tokens(folder: str | Path) -> FolderTokens:
    """Read the tokenizer's files, the two configurations and the chat template of a model folder.

    Files that are absent say nothing. The template is rendered by transformers; without that package it says nothing.

    Raises:
        ValueError: a file is no JSON object, or has an `eos_token_id` that is not an id or a list of ids, or the chat
            template does not end; names it.
    """
    folder = Path(folder)
    config, generation = _read(folder / _CONFIG), _read(folder / _GENERATION)
    tokenizer_config = _read(folder / "tokenizer_config.json")
    named = _special_texts(tokenizer_config, _read(folder / "special_tokens_map.json"))
    tokenizer = _read(folder / "tokenizer.json")
    vocabulary = _vocabulary(tokenizer, folder / "tokenizer.json")
    try:
        added = {str(token["content"]): int(token["id"]) for token in tokenizer.get("added_tokens") or ()}
        added |= {token["content"]: int(i) for i, token in (tokenizer_config.get("added_tokens_decoder") or {}).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"the added tokens of {folder} are not a list of tokens with id and content ({error!r}); download it again"
        ) from error
    ids = vocabulary | added
    roles = {role: ids[text] for role, text in named.items() if text in ids}
    eos = roles.get("eos_token")
    template = _template(folder, tokenizer_config)
    written = added | {named[role]: i for role, i in roles.items()}
    highest = [max(vocabulary.items(), key=lambda item: item[1])] if vocabulary else []
    closing = None if template is None else _closing_id(template, named, written, folder)
    sources = {
        _GENERATION: _ids_of(generation, folder / _GENERATION),
        _CONFIG: (
            *_ids_of(config, folder / _CONFIG),
            *_ids_of(config.get("text_config") or {}, folder / _CONFIG),
        ),
        _TOKENIZER: () if eos is None else (eos,),
        _TEMPLATE: () if closing is None else (closing,),
    }
    return FolderTokens(
        ids_by_source={source: tuple(dict.fromkeys(found)) for source, found in sources.items() if found},
        texts={i: text for text, i in (*sorted(written.items(), key=lambda item: -item[1]), *highest)},
        ids_by_role=roles,
        num_tokens=max(ids.values()) + 1 if vocabulary else None,
    )


def read_model_config(folder: str | Path) -> dict[str, Any]:
    """Read a model folder's `config.json`, and check the folder before a library that would fail inside takes it.

    Of an omni model, its thinker's section: see `thinker_of`.

    Raises:
        ValueError: a size is not a number that a model can have, a tokenizer's file is not one, or weights are not a
            regular file (reading a pipe waits for ever); names file, key and value.
    """
    folder = Path(folder)
    file = folder / _CONFIG
    whole = _read(file)
    if not isinstance(whole.get("thinker_config") or {}, dict):
        raise ValueError(f"{file} has thinker_config={whole['thinker_config']!r:.80}; it must be an object")
    config = thinker_of(whole)
    text = config.get("text_config")
    for values in (config, cast("dict[str, Any]", text) if isinstance(text, dict) else {}):
        for key in _SECTIONS:
            if not isinstance(values.get(key) or {}, dict):
                raise ValueError(f"{file} has {key}={values[key]!r:.80}; it must be an object")
        _check_values(values, file)
    if not isinstance(config.get("model_type", ""), str):
        raise ValueError(f"{file} has model_type={config['model_type']!r}; it must be a name")
    _check_tokenizer(folder / "tokenizer.json")
    for name in ("tokenizer_config.json", "special_tokens_map.json", _GENERATION):
        _read(folder / name)
    for weights in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        if not weights.is_file():
            raise ValueError(f"{weights} is not a regular file; download the folder again")
    return config


def _check_tokenizer(file: Path) -> None:
    """Raise ValueError if a tokenizer's file is none; parsed once in a process, since it can have tens of megabytes."""
    digest = sha256(file.read_bytes()).digest() if file.is_file() else None
    if digest in _CHECKED:
        return
    if file.exists() and not isinstance(_read(file).get("model"), dict):
        raise ValueError(f"{file} has no section `model`, so it is not a tokenizer; download the folder again")
    if digest is not None:
        _CHECKED.add(digest)


_CHECKED: set[bytes] = set()
"""Digests of files that `_check_tokenizer` found good."""

OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
"""Model types of omni models: a thinker, which reads every modality and writes text, and parts that speak."""
THINKER = "thinker."
"""Prefix of the thinker's tensors in an omni model's folder."""


def thinker_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Section of an omni model's `config.json` that describes its thinker; all values of another model's."""
    if config.get("model_type") not in OMNI or not config.get("thinker_config"):
        return dict(config)
    return {"model_type": f"{config['model_type']}_thinker", **config["thinker_config"]}


def _check_values(values: Mapping[str, Any], file: Path) -> None:
    """Check the numbers of a section of config.json, on which libraries fail without their names."""
    for key, most in _SIZES.items():
        size = values.get(key)
        if size is not None and (type(size) is not int or not 1 <= size <= most):
            raise ValueError(f"{file} has {key}={size!r}; it must be a whole number from 1 to {most:,}")
    for key, value in _numbers(values):
        if not math.isfinite(value):
            raise ValueError(f"{file} has {key}={value}; it must be a finite number")
        if key == "rope_theta" and value <= 0:
            raise ValueError(f"{file} has rope_theta={value}; it must be positive")
        if key.endswith(("dropout", "pdrop")) and not 0 <= value < 1:
            raise ValueError(f"{file} has {key}={value}; it must be at least 0 and less than 1")
    heads, groups = (values.get(f"num_{name}_heads") for name in ("attention", "key_value"))
    if heads is not None and groups is not None and heads % groups:
        raise ValueError(
            f"{file} has num_attention_heads={heads} and num_key_value_heads={groups}; the first must be a multiple of "
            "the second"
        )
    pad, vocab_size = values.get("pad_token_id"), values.get("vocab_size")
    if type(pad) is int and vocab_size is not None and pad >= vocab_size:
        raise ValueError(f"{file} has pad_token_id={pad} and vocab_size={vocab_size}; ids are less than that")


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(cast("dict[str, Any]", value))
        elif isinstance(value, float | int):
            yield key, value


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    if not file.is_file():
        raise ValueError(f"{file} is not a regular file; download the folder again")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}); download the folder again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds a {type(values).__name__}, not a JSON object; download the folder again")
    return cast("dict[str, Any]", values)


def _ids_of(values: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    found: Any = values.get("eos_token_id")
    ids = cast("list[Any]", found) if isinstance(found, list) else [] if found is None else [found]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{file} has eos_token_id={found!r}; it must be a token id or a list of token ids")
    return tuple(ids)


def _special_texts(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the tokens with a role (`eos_token`, ...), by role."""
    texts: dict[str, str] = {}
    for role, token in (item for source in sources for item in source.items() if item[0].endswith("_token")):
        text: Any = cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[role] = text
    return texts


def _vocabulary(tokenizer: Mapping[str, Any], file: Path) -> dict[str, int]:
    entries: Any = (tokenizer.get("model") or {}).get("vocab") or {}
    try:
        if isinstance(entries, dict):
            return {str(piece): int(index) for piece, index in cast("dict[Any, Any]", entries).items()}
        return {piece: index for index, (piece, *_) in enumerate(entries)}  # a unigram model has them in order
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} has a vocabulary that is none ({error}); download the folder again") from error


def _template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The chat template that `AutoTokenizer` takes, or a processor's."""
    if (file := folder / "chat_template.jinja").is_file():
        try:
            return file.read_text(encoding="utf-8")
        except ValueError as error:
            raise ValueError(f"{file} is not text ({error}); download the folder again") from error
    found: Any = tokenizer_config.get("chat_template") or _read(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        templates = {each["name"]: each["template"] for each in cast("list[dict[str, str]]", found)}
        found = templates.get("default")
    if found is not None and not isinstance(found, str):
        raise ValueError(f"the chat_template of {folder} is {found!r:.80}; it must be a text")
    return found


def _closing_id(template: str, named: Mapping[str, str], added: Mapping[str, int], folder: Path) -> int | None:
    """Id of the first added token that the template writes after the last message, an assistant's."""
    tail = next((text for text in _renderings(template, named, folder) if _ANCHOR in text), "").rpartition(_ANCHOR)[2]
    places = {text: tail.find(text) for text in added if text.strip() and text in tail}
    first = min(places, key=lambda text: (places[text], -len(text)), default=None)
    return None if first is None else added[first]


def _renderings(template: str, named: Mapping[str, str], folder: Path) -> Iterator[str]:
    """A question and an answer, with the contents as text and as parts, where the template takes them.

    A question alone, a system message and tools come first: they tell whether the template ends.
    """
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        return
    _check_operators(template, folder)
    render: Any = render_jinja_template
    parts = [[{"type": "text", "text": text}] for text in ("question", _ANCHOR)]
    tool = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    chats: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
        ([{"role": "user", "content": "question"}], {"add_generation_prompt": True}),
        (
            [{"role": "system", "content": "system"}, {"role": "user", "content": "question"}],
            {"tools": [{"type": "function", "function": tool}]},
        ),
    ]
    for question, answer in (("question", _ANCHOR), parts):
        chats.append(([{"role": "user", "content": question}, {"role": "assistant", "content": answer}], {}))
    for chat, options in chats:
        try:
            with _bounded(folder):
                rendered: Any = render([chat], chat_template=template, **options, **named)
        except EndlessTemplateError:
            raise
        except Exception:  # noqa: BLE001 - a template may raise anything; who renders a row says what
            continue
        yield rendered[0][0] if isinstance(rendered, tuple) else rendered[0]


class EndlessTemplateError(ValueError):
    """A chat template renders for seconds, or fills the memory."""


def _check_operators(template: str, folder: Path) -> None:
    """Refuse powers and huge repetitions: one operation of C that no deadline can stop.

    Raises:
        EndlessTemplateError: the template has one.
    """
    from jinja2 import Environment, TemplateError, nodes  # transformers renders with it

    extensions = ["jinja2.ext.loopcontrols", "jinja2.ext.do"]
    try:
        tree = Environment(extensions=extensions).parse(_GENERATION_TAGS.sub("", template))
    except (TemplateError, RecursionError):  # who renders a row says what is wrong
        return
    factors = (side for each in tree.find_all(nodes.Mul) for side in (each.left, each.right))
    numbers = (each.value for each in factors if isinstance(each, nodes.Const) and isinstance(each.value, int))
    if tree.find(nodes.Pow) or max(numbers, default=0) > _MAX_FACTOR:
        raise EndlessTemplateError(
            f"the chat template of {folder} computes powers, or multiplies by more than {_MAX_FACTOR}, which may never "
            "end; correct it, or download the folder again"
        )


_GENERATION_TAGS = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
_MAX_FACTOR = 1_000_000
_MAX_RENDER_S = 5.0
"""Seconds of processor time that a rendering may take; it takes milliseconds."""
_MAX_RENDER_BYTES = 1 << 30
"""Memory by which the process may grow meanwhile."""


@contextmanager
def _bounded(folder: Path) -> Generator[None]:
    """Bound the time and memory of what Python runs inside, line by line of a template.

    Raises:
        EndlessTemplateError: it takes more.
    """
    end, most = time.thread_time() + _MAX_RENDER_S, _resident_bytes() + _MAX_RENDER_BYTES
    before = sys.gettrace()

    def on_event(frame: FrameType, event: str, argument: object) -> Any:
        is_template = frame.f_code.co_filename == "<template>"
        if time.thread_time() > end or (is_template and _resident_bytes() > most):
            raise EndlessTemplateError(
                f"the chat template of {folder} does not end: a short chat took more than {_MAX_RENDER_S:g} s or "
                f"{_MAX_RENDER_BYTES >> 30} GiB to render; correct it, or download the folder again"
            )
        return on_event if is_template else None

    sys.settrace(on_event)
    try:
        yield
    finally:
        sys.settrace(before)


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * 4096
    except OSError:  # another system than Linux
        return 0
