"""Compile the CUDA module for the host, where fibers take the place of a GPU's threads.

It needs g++ 12 (or another C++20 compiler that CXX names) and pybind11. Objects stay in the folder and are used again
while their sources are the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[1] / "native"
INCLUDES = [HERE, NATIVE.parent / "include", NATIVE, pybind11.get_include(), sysconfig.get_path("include")]
FLAGS = [
    *("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-variable", "-ffp-contract=off"),
    "-DRL_CSRC_EMULATED",
    "-fno-strict-aliasing",  # as nvcc compiles them
    "-ftrivial-auto-var-init=pattern",  # what a kernel forgets to write shows
    "-U_FORTIFY_SOURCE",  # whose longjmp takes a change of stacks for an error
    *(f"-I{folder}" for folder in INCLUDES),
]
SANITIZE = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g"]


def build(folder: Path, *, sanitize: bool = False) -> Path:
    """Return the path of the module `_cuda` in the folder; raises `CalledProcessError` with the compiler's output."""
    compiler = os.environ.get("CXX", "g++")
    flags = [*FLAGS, *(SANITIZE if sanitize else [])]
    sources = [
        *sorted(NATIVE.glob("cuda/*.c*")),
        NATIVE / "tensor_arg.cpp",
        NATIVE / "buffers/exchange.cpp",
        *HERE.glob("*.cpp"),
    ]
    sources = [path for path in sources if path.suffix in (".cu", ".cpp")]
    headers = sorted(
        {*NATIVE.rglob("*.h"), *NATIVE.rglob("*.cuh"), *NATIVE.parent.glob("include/**/*.h"), *HERE.glob("*.h")}
    )
    common = "".join([compiler, *flags]).encode() + b"".join(path.read_bytes() for path in headers)
    objects = {
        source: folder / f"{source.stem}-{hashlib.sha256(common + source.read_bytes()).hexdigest()[:16]}.o"
        for source in sources
    }

    def compile_one(source: Path) -> None:
        if not objects[source].exists():
            partial = objects[source].with_suffix(".partial")
            _run(compiler, *flags, "-x", "c++", "-c", source, "-o", partial)
            partial.rename(objects[source])

    folder.mkdir(parents=True, exist_ok=True)
    module = folder / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two test processes one builds
        names = "\n".join(path.name for path in objects.values())
        if not module.exists() or not (folder / "built").exists() or (folder / "built").read_text() != names:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(compile_one, sorted(sources, key=lambda path: -path.stat().st_size)))
            module.unlink(missing_ok=True)  # a process may have it open
            _run(compiler, "-shared", *(SANITIZE if sanitize else []), *objects.values(), "-o", module)
            for stale in {*folder.glob("*.o")} - {*objects.values()}:
                stale.unlink()
            (folder / "built").write_text(names)
    return module


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)
