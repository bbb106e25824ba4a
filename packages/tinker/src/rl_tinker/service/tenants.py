"""Tenants: API keys and quotas, from a TOML file."""

from __future__ import annotations

import hashlib
import secrets
import tomllib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rl_tinker.errors import ConfigError, NotAllowedError

if TYPE_CHECKING:
    from pathlib import Path

KEY_PREFIX = "tml-"
"""Prefix of every API key, which the SDK insists on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Tenant with its quotas."""

    name: str
    """Name, which owns sessions, models and checkpoints."""
    max_models: int = 64
    """Most models that are loaded at the same time."""
    max_pending: int = 4096
    """Most requests that wait or run, each sequence of a sample counted; further ones are answered with 429, and
    clients send them again. Also most sessions at a time, and most results of samples that stay for a while."""
    max_pending_mib: float = 2048.0
    """Most MiB of requests that wait or run, or whose gradient no step has used yet."""
    max_checkpoint_gib: float = 1000.0
    """Most GiB of checkpoints."""


class Tenants:
    """Tenants by API key.

    Args:
        file: TOML file with a table `[[tenant]]` for each: `name`, `key_sha256`, and any quota of `Tenant`. None: every
            key is a tenant of its own, named after the key's digest.

    Raises:
        ConfigError: the file cannot be read, or a table of it is wrong; names the table.
    """

    def __init__(self, file: Path | None) -> None:
        self._by_digest = None if file is None else _read(file)

    @property
    def is_open(self) -> bool:
        """Whether any key is accepted."""
        return self._by_digest is None

    def of(self, key: str) -> Tenant:
        """Tenant of a key.

        Raises:
            NotAllowedError: no key, or one that belongs to nobody.
        """
        if not key:
            raise NotAllowedError("the header X-API-Key is missing; set TINKER_API_KEY")
        digest = key_digest(key)
        if self._by_digest is None:
            return Tenant(name=f"key-{digest[:8]}")
        if digest not in self._by_digest:
            raise NotAllowedError("this API key is not in the keys file of the server")
        return self._by_digest[digest]


def key_digest(key: str) -> str:
    """Digest under which a key is listed in the keys file. Keys are random, so that a plain SHA-256 suffices."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_key() -> str:
    """New random API key."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def _read(file: Path) -> dict[str, Tenant]:
    try:
        tables = tomllib.loads(file.read_text()).get("tenant", [])
    except (OSError, ValueError) as error:
        raise ConfigError(f"keys={file} cannot be read as TOML: {error}") from error
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"keys={file} has no [[tenant]]; `rl-tinker key NAME` prints one")
    found: dict[str, Tenant] = {}
    names: set[str] = set()
    for number, table in enumerate(tables, 1):
        digest, tenant = _tenant(table, f"keys={file}, tenant {number}")
        if digest in found or tenant.name in names:
            raise ConfigError(f"keys={file}, tenant {number}: its name {tenant.name!r} or its key is listed before")
        found[digest] = tenant
        names.add(tenant.name)
    return found


def _tenant(table: Any, where: str) -> tuple[str, Tenant]:
    kinds: dict[str, tuple[type, ...]] = {
        "name": (str,), "key_sha256": (str,), "max_models": (int,), "max_pending": (int,),
        "max_pending_mib": (int, float),
        "max_checkpoint_gib": (int, float),
    }  # fmt: skip
    assert kinds.keys() - {"key_sha256"} == {field.name for field in fields(Tenant)}, "each field of Tenant is a key"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is not a table")
    for name, value in table.items():
        if name not in kinds:
            raise ConfigError(f"{where}: unknown key {name!r}; it has {', '.join(kinds)}")
        if not isinstance(value, kinds[name]) or isinstance(value, bool):
            raise ConfigError(f"{where}: {name}={value!r} must be a {kinds[name][0].__name__}")
        if not isinstance(value, str) and value <= 0:
            raise ConfigError(f"{where}: {name}={value!r} must be above 0")
    digest = str(table.get("key_sha256", ""))
    if not table.get("name") or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ConfigError(f"{where}: needs a name, and a key_sha256 of 64 hexadecimal digits")
    return digest, Tenant(**{name: value for name, value in table.items() if name != "key_sha256"})
