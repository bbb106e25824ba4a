"""Workers as Ray actors: one host process per pool slot, in which any number of colocated workers live."""

from __future__ import annotations
