"""Training server for the Tinker API: many tenants' LoRA adapters over one base model, on your own machines."""

from rl_tinker.errors import (
    CommandError,
    ConfigError,
    GoneError,
    JournalError,
    NotAllowedError,
    NotFoundError,
    QuotaError,
    RanksLostError,
    RequestError,
    TinkerError,
    UnsupportedError,
)
from rl_tinker.types import AdamParams, AdapterSpec, LossName, ServeConfig

__all__ = [
    "AdamParams",
    "AdapterSpec",
    "CommandError",
    "ConfigError",
    "GoneError",
    "JournalError",
    "LossName",
    "NotAllowedError",
    "NotFoundError",
    "QuotaError",
    "RanksLostError",
    "RequestError",
    "ServeConfig",
    "TinkerError",
    "UnsupportedError",
]
