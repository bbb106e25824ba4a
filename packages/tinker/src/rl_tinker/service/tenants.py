"""Tenants: API keys and quotas, from a TOML file."""

from __future__ import annotations

import hashlib
import secrets
import tomllib
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from rl_tinker.errors import ConfigError, NotAllowedError

if TYPE_CHECKING:
    from pathlib import Path

Count = Annotated[int, Meta(gt=0)]
Size = Annotated[float, Meta(gt=0)]
KEY_PREFIX = "tml-"
"""Prefix of every API key, which the SDK insists on."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tenant with its quotas."""

    name: Annotated[str, Meta(min_length=1)]
    """Name, which owns sessions, models and checkpoints."""
    max_models: Count = 64
    """Most models that are loaded at the same time."""
    max_pending: Count = 4096
    """Most requests that wait or run, each sequence of a sample counted; further ones are answered with 429, and
    clients send them again. Also most sessions at a time, and most results of samples that stay for a while."""
    max_samplers: Count = 16384
    """Most sampling sessions of sessions that last."""
    max_pending_mib: Size = 2048.0
    """Most MiB of requests that wait or run, or whose gradient no step has used yet."""
    max_checkpoint_gib: Size = 1000.0
    """Most GiB of checkpoints."""


class _Table(Tenant, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table of the keys file."""

    key_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


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
    for number, table in enumerate(tables, 1):
        try:
            tenant = msgspec.convert(table, _Table)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"keys={file}, tenant {number}: {error}; keys: {', '.join(_Table.__struct_fields__)}"
            ) from error
        if tenant.key_sha256 in found or tenant.name in {each.name for each in found.values()}:
            raise ConfigError(f"keys={file}, tenant {number}: its name {tenant.name!r} or its key is listed before")
        found[tenant.key_sha256] = tenant
    return found
