"""Command line: `rl-tinker serve model.path=FOLDER [key=value]`, and `rl-tinker key NAME`."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import logging
import signal
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from rl_csrc import FolderInUseError
from rl_engine.errors import EngineError
from rl_rollout.errors import RolloutError
from rl_tinker.errors import ConfigError, TinkerError
from rl_tinker.server import TinkerServer
from rl_tinker.service.tenants import key_digest, new_key
from rl_tinker.types import ServeConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

_OPTION = "server.options."


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `rl-tinker`. Returns 2, with a sentence on standard error, for errors that the caller can fix."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        match given:
            case ["serve", *pairs] if not {"-h", "--help"} & set(pairs):
                asyncio.run(_serve(parse_config(pairs)))
            case ["key", name] if not name.startswith("-"):
                _print_key(name)
            case _:
                _print_help()
                return 0 if {"-h", "--help"} & set(given) else 2
    except (TinkerError, EngineError, RolloutError, FolderInUseError) as error:
        print(f"rl-tinker: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(config: ServeConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stop = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    async with TinkerServer(config) as server:
        print(f"rl-tinker serves {config.model_name or config.model_path} at {server.url}", flush=True)
        print(f"  export TINKER_BASE_URL={server.url} TINKER_API_KEY={'tml-YOUR-KEY' if config.keys else 'tml-me'}")
        sys.stdout.flush()
        await stop.wait()


def parse_config(pairs: Sequence[str]) -> ServeConfig:
    """Configuration from `key=value` arguments.

    Raises:
        ConfigError: an unknown key (nearest named), a value of the wrong type, a key twice, or no `model.path`.
    """
    names = [field.name for field in dataclasses.fields(ServeConfig) if field.name != "server_options"]
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        name = key.replace(".", "_")
        if not equals:
            raise ConfigError(f"argument {pair!r} is not key=value")
        is_option = key.startswith(_OPTION)
        if not is_option and name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            raise ConfigError(f"unknown key {key!r}; the nearest is {_spelled(near[0])!r}")
        found, name = (options, key.removeprefix(_OPTION)) if is_option else (values, name)
        if name in found:
            raise ConfigError(f"key {key!r} is given twice")
        found[name] = _json_or_text(text) if is_option else text
    if not values.get("model_path"):
        raise ConfigError("model.path must be given, as in: rl-tinker serve model.path=FOLDER")
    try:
        return msgspec.convert(values | {"server_options": options}, ServeConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{' '.join(pairs)}: {error}") from error


def _json_or_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _spelled(name: str) -> str:
    part, _, rest = name.partition("_")
    return f"{part}.{rest}" if part in ("server", "model") else name


def _print_key(name: str) -> None:
    """The table for the keys file on standard output, the key itself on standard error: it is stored nowhere."""
    key = new_key()
    print(f"[[tenant]]\nname = {name!r}\nkey_sha256 = {key_digest(key)!r}\n")
    print(f"key of {name}, shown this once: {key}", file=sys.stderr)


def _print_help() -> None:
    print("rl-tinker serve model.path=FOLDER [key=value ...]    serve the Tinker API")
    print("rl-tinker key NAME >> keys.toml                      make an API key\n\nkeys of serve:")
    for field in dataclasses.fields(ServeConfig):
        if field.name == "server_options":
            print(f"  {_OPTION}NAME=VALUE")
            continue
        default = "needed" if field.default is dataclasses.MISSING else field.default
        print(f"  {_spelled(field.name)}={default}")


if __name__ == "__main__":
    sys.exit(main())
