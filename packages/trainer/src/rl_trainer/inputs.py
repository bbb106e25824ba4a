"""Digests of what a run reads: rows, base model, tokenizer, chat template and plug-in files.

A checkpoint has them, so that a run that resumes after one of them changed is refused, with the name of what changed.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_agent.registry import HUBS
from rl_trainer.config import as_tree
from rl_trainer.pipeline.roles import policies_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from rl_trainer.config import Config
    from rl_trainer.data.datasets import Datasets

_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken")
_TEMPLATE = ("chat_template*", "*.jinja")
_WEIGHTS = ("*.safetensors", "*.bin", "config.json")
_PIECES, _PIECE_BYTES = 64, 4096
"""Of a file of weights its size, its beginning, and so many pieces at even distances are read."""
_PLUG_IN = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")


def digest_inputs(config: Config, datasets: Datasets) -> dict[str, str]:
    """Digest of every input of a run, by a name for messages.

    Rows count as they were read, in their order; a stream by the rows that it gave last. The 256 KiB that are read of a
    file of weights tell models apart, and not two files of which a few numbers differ.

    The configuration has folders in place of the hub's names.
    """
    found = {"training rows": digest_rows(datasets.train)} if datasets.stream is None else {}
    found["held-out rows"] = digest_rows(datasets.eval)
    for policy, own in policies_of(config).items():
        if own.model.path is None or not Path(own.model.path).is_dir():
            continue
        folder, of = Path(own.model.path), f" of {policy}" if policy else ""
        found |= {
            f"base model{of}": _files(folder, _WEIGHTS, _sampled),
            f"tokenizer{of}": _files(folder, _TOKENIZER, _without_template),
            f"chat template{of}": _files(folder, (*_TEMPLATE, "tokenizer_config.json"), _template),
        }
    files = sorted(set(_plug_ins(as_tree(config))))
    for name in dict.fromkeys(file.name for file in files):
        found[f"code of {name}"] = _hex(file.read_bytes() for file in files if file.name == name)
    return found


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Names of the inputs that both have and that differ."""
    return [name for name, digest in after.items() if before.get(name, digest) != digest]


def digest_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """Digest of rows in their order."""
    encode = json.JSONEncoder(default=_plain).encode
    return _hex(encode(row).encode("utf-8", "surrogatepass") + b"\n" for row in rows)


def _plain(value: Any) -> Any:
    """Replacement of a value that is not JSON: its bytes, or its text."""
    if isinstance(value, bytes):
        return _hex([value])
    return _hex([value.tobytes()]) if hasattr(value, "tobytes") else str(type(value))


def _files(folder: Path, patterns: Iterable[str], read: Any) -> str:
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    return _hex(part for path in paths for part in (path.name.encode(), *read(path)))


def _sampled(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        for place in range(0, size, max(size // _PIECES, _PIECE_BYTES)):
            file.seek(place)
            yield file.read(_PIECE_BYTES)
    yield str(size).encode()


def _without_template(path: Path) -> Iterator[bytes]:
    if path.name != "tokenizer_config.json":
        yield path.read_bytes()
        return
    yield json.dumps({key: value for key, value in _object(path).items() if key != "chat_template"}).encode()


def _template(path: Path) -> Iterator[bytes]:
    is_config = path.name == "tokenizer_config.json"
    yield json.dumps(_object(path).get("chat_template")).encode() if is_config else path.read_bytes()


def _object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_bytes())
    return found if isinstance(found, dict) else {}


def _plug_ins(value: Any) -> Iterator[Path]:
    """Files that a configuration names as `FILE.py:NAME` or `MODULE:NAME`; the names of hubs are no modules."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _plug_ins(each)
    elif isinstance(value, str) and (match := _PLUG_IN.fullmatch(value)):
        if not match[1].endswith(".py"):
            yield from _module_file(match[1])
        elif Path(match[1]).is_file():
            yield Path(match[1]).absolute()


def _module_file(name: str) -> Iterator[Path]:
    if name in {hub.name for hub in entry_points(group=HUBS)}:
        return
    with suppress(ImportError, ValueError):  # what else has a colon, such as an address
        spec = find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin)


def _hex(parts: Iterable[bytes]) -> str:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
