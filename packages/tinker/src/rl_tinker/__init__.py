"""Training server for the Tinker API: many tenants' LoRA adapters over one base model, on your own machines."""

from rl_tinker.errors import ConfigError, JournalError, RanksLostError, TinkerError
from rl_tinker.types import ServeConfig

__all__ = ["ConfigError", "JournalError", "RanksLostError", "ServeConfig", "TinkerError"]
