"""What a figure was measured on: the machine, and the commit of the checkout."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """CPU model, cores this process may use, memory, GPUs and driver, Python, torch (which is not imported)."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": _gpus("name"),
        "driver": _gpus("driver_version"),
        "python": platform.python_version(),
        "torch": _version("torch"),
    }


def has_card(name: str) -> bool:
    """Whether the GPU is of this kind (`H200`): a goal in seconds or tokens per second was set for one kind."""
    return any(name in gpu for gpu in _gpus("name"))


def describe_commit(root: Path) -> str:
    """Hash of the checkout's commit, with `-dirty` where tracked files were edited since; `unknown` outside git."""
    head = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if not head:
        return "unknown"
    return head[0] + ("-dirty" if _output("git", "-C", str(root), "status", "--porcelain", "-uno") else "")


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus(column: str) -> list[str]:
    return _output("nvidia-smi", f"--query-gpu={column}", "--format=csv,noheader")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> list[str]:
    """Lines that a command prints; none where it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return []
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []
