"""The logger of the original's recipes."""

from __future__ import annotations

import logging
import os


def get_logger(name: str | None, default_level: str = "WARNING") -> logging.Logger:
    """A logger at the level of `TQ_LOGGING_LEVEL` or else `default_level`; it prints if logging is not configured.

    Raises:
        ValueError: there is no such level.
    """
    logger = logging.getLogger(name)
    logger.setLevel(os.environ.get("TQ_LOGGING_LEVEL", default_level))
    if not logger.hasHandlers():
        printer = logging.StreamHandler()
        printer.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(printer)
    return logger
