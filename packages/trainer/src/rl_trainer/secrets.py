"""Secrets of one job, which its processes prove to know where they talk over sockets."""

from __future__ import annotations

import os
import secrets

_SERVER = "RL_ROLLOUT_API_TOKEN"
_VARIABLES = ("RL_CKPT_TOKEN", "RL_TQ_TOKEN", _SERVER)
"""What rl-ckpt, rl-tq and rl-rollout read theirs from."""


def make_tokens() -> dict[str, str]:
    """By variable, the secrets of the environment; where it has none, new ones, which it has from then on."""
    return {name: os.environ.setdefault(name, secrets.token_hex(32)) for name in _VARIABLES}


def server_token() -> str | None:
    """What the job's own servers ask for; None where no job was started."""
    return os.environ.get(_SERVER)
