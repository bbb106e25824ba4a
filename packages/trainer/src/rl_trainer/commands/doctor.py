"""`rl-doctor`: report of installed packages, version clashes and the machine, with remedies."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import resource
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_OURS = ("rl-csrc", "rl-ckpt", "rl-tq", "rl-engine", "rl-rollout", "rl-agent", "rl-post-trainer")
_PEERS = ("torch", "tensordict", "transformers", "ray", "megatron-core", "torchtitan", "vllm", "sglang", "tensorrt-llm")
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Finding: one line of the report."""

    what: str
    value: str
    fix: str = ""
    """Remedy; empty if all is well."""


def findings() -> Iterator[Finding]:
    """Findings of all checks."""
    yield _python()
    yield from _packages()
    yield from _clashes()
    yield from _gpus()
    yield from _memory()
    yield from _limits()
    yield from _programs()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns 1 if something needs fixing, else 0."""
    del argv
    num_wrong = 0
    for each in findings():
        num_wrong += bool(each.fix)
        print(f"{'FIX' if each.fix else 'ok ':3}  {each.what:18} {each.value}")
        if each.fix:
            print(f"     {'':18} -> {each.fix}")
    print(f"{num_wrong} to fix" if num_wrong else "nothing to fix")
    return 1 if num_wrong else 0


def _python() -> Finding:
    is_fine = sys.version_info[:2] >= (3, 11)
    fix = "" if is_fine else "install Python 3.11, 3.12 or 3.13"
    return Finding(what="python", value=f"{platform.python_version()}, {platform.platform()}", fix=fix)


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _packages() -> Iterator[Finding]:
    for name in _OURS:
        found = _version(name)
        fix = "" if found else f"pip install {name}"
        yield Finding(what=name, value=found or "not installed", fix=fix)
    there = {name: found for name in _PEERS if (found := _version(name)) is not None}
    yield Finding(what="next to them", value=", ".join(f"{name} {found}" for name, found in there.items()))
    try:
        importlib.import_module("rl_csrc")  # loads the native module
        yield Finding(what="native code", value="rl_csrc's module loads")
    except (ImportError, OSError, RuntimeError) as error:
        yield Finding(what="native code", value=str(error)[:200], fix="pip install --force-reinstall rl-csrc")


def _clashes() -> Iterator[Finding]:
    """Version clashes: requirements of our packages that the environment does not meet."""
    for name in _OURS:
        if _version(name) is None:
            continue
        for text in distribution(name).requires or ():
            wanted = Requirement(text)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            found = _version(wanted.name)
            if found is None or not wanted.specifier.contains(found, prereleases=True):
                clash = f"{name} wants {wanted.name}{wanted.specifier}, there is {found or 'none'}"
                yield Finding(what="versions", value=clash, fix=f"pip install '{wanted.name}{wanted.specifier}'")


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        has_driver = shutil.which("nvidia-smi") is not None
        fix = "torch was built without CUDA, or for a newer driver: install the build for yours" if has_driver else ""
        yield Finding(what="GPUs", value=f"none that torch {torch.__version__} can use", fix=fix)
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield Finding(what=f"GPU {index}", value=f"{about.name}, {about.total_memory / _GIB:.0f} GiB")
    nccl = ".".join(map(str, importlib.import_module("torch.cuda.nccl").version()))
    yield Finding(what="CUDA, NCCL", value=f"{torch.version.cuda}, {nccl}")
    has_module = importlib.util.find_spec("rl_csrc._cuda") is not None
    fix = "" if has_module else "build it: RL_CSRC_CUDA=ON pip install rl-csrc (plain torch is used until then)"
    yield Finding(what="CUDA kernels", value="built" if has_module else "rl-csrc has no CUDA module", fix=fix)


def _memory() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    yield Finding(what="cores, memory", value=f"{cores}, {memory:.0f} GiB")
    shared = shutil.disk_usage("/dev/shm")
    fix = (
        ""
        if shared.total >= 2 * _GIB
        else "give it more: docker run --shm-size=16g, or mount -o remount,size=16G /dev/shm"
    )
    yield Finding(what="/dev/shm", value=f"{shared.free / _GIB:.1f} of {shared.total / _GIB:.1f} GiB free", fix=fix)
    disk = shutil.disk_usage(".")
    fix = "" if disk.free > 5 * _GIB else "make room: a checkpoint takes 16 bytes per parameter"
    yield Finding(what="disk here", value=f"{disk.free / _GIB:.0f} GiB free", fix=fix)


def _limits() -> Iterator[Finding]:
    for what, kind, least, flag in (
        ("open files", resource.RLIMIT_NOFILE, 4096, "-n"),
        ("processes", resource.RLIMIT_NPROC, 2048, "-u"),
    ):
        soft, hard = resource.getrlimit(kind)
        is_fine = soft == resource.RLIM_INFINITY or soft >= least
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} (at most {hard})"
        yield Finding(what=what, value=limit, fix="" if is_fine else f"ulimit {flag} {least}")


def _programs() -> Iterator[Finding]:
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    yield Finding(what="C++ compiler", value=compiler or "none; only building rl-csrc needs one")
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "HF_HOME"):
        if name in os.environ:
            yield Finding(what=name, value=os.environ[name])


if __name__ == "__main__":
    raise SystemExit(main())
