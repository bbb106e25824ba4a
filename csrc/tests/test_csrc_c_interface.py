"""The kernels behind their plain C headers, as another binding would use them: neither pybind11 nor torch."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import rl_csrc
from rl_csrc import _cpu

INCLUDE = Path(__file__).resolve().parents[1] / "include"
HEADERS = ("kernels.h", "kernels_cuda.h", "attention.h", "decoder.h")


class Logits(ctypes.Structure):
    """`rl_logits` of kernels.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("labels", ctypes.c_void_p),
        ("row_index", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("scalar_temperature", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("ignore_index", ctypes.c_int64),
        ("vocab_start", ctypes.c_int64),
        ("has_ignore", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class Results(ctypes.Structure):
    """`rl_logprobs_out` of kernels.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("logprobs", "entropy", "sum_pi_squared", "lse"))


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return ctypes.CDLL(_cpu.__file__)


@pytest.mark.process
@pytest.mark.parametrize("header", HEADERS)
def test_a_c_compiler_takes_the_header(header: str) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler on PATH")
    flags = ["-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c", "-"]
    program = f'#include "rl_csrc/{header}"\n'
    found = subprocess.run(
        [compiler, f"-I{INCLUDE}", *flags], input=program, capture_output=True, text=True, check=False, timeout=60
    )
    assert found.returncode == 0, found.stderr


def test_every_declared_cpu_function_is_exported(library: ctypes.CDLL) -> None:
    text = "".join((INCLUDE / "rl_csrc" / name).read_text() for name in ("kernels.h", "attention.h", "decoder.h"))
    names = set(re.findall(r"^\w[\w ]*\b(rl_cpu_\w+)\(", text, re.MULTILINE))
    assert len(names) > 15
    assert [name for name in sorted(names) if not hasattr(library, name)] == []


@pytest.mark.promise("The binary links no libtorch")
@pytest.mark.process
def test_the_module_links_no_torch() -> None:
    """One wheel serves every torch, and a machine without CUDA: the C and C++ libraries are all that it wants."""
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf on PATH")
    run = {"capture_output": True, "text": True, "check": True, "timeout": 60}
    dynamic = subprocess.run(["readelf", "--wide", "--dynamic", _cpu.__file__], **run).stdout
    wanted = set(re.findall(r"\(NEEDED\).*\[(\w[\w+-]*)", dynamic))
    assert "libc" in wanted
    assert wanted <= {"libc", "libm", "libstdc++", "libgcc_s", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}
    symbols = subprocess.run(["readelf", "--wide", "--dyn-syms", _cpu.__file__], **run).stdout
    unresolved = re.findall(r" UND (\S+)", symbols)
    assert any(name.startswith("Py") for name in unresolved)
    assert [name for name in unresolved if re.search(r"c10|at6|torch|cuda", name)] == []


def test_a_call_through_the_interface_gives_the_bits_of_the_op(library: ctypes.CDLL) -> None:
    logits, labels = torch.randn(5, 301), torch.tensor([3, 300, -100, 0, 7])
    outs = [torch.full((5,), float("nan")) for _ in range(4)]
    score = library.rl_cpu_logprobs
    score.restype = ctypes.c_int64
    rows = Logits(
        data=logits.data_ptr(), row_stride=301, vocab=301, rows=5, labels=labels.data_ptr(),
        scalar_temperature=0.5, ignore_index=-100, has_ignore=1,
    )  # fmt: skip
    results = Results(*(out.data_ptr() for out in outs))
    assert score(ctypes.byref(rows), ctypes.byref(results), 1) == 0
    wanted = rl_csrc.logprobs(logits, labels, temperature=0.5, entropy=True, sum_pi_squared=True)
    for ours, theirs in zip(outs, wanted, strict=False):
        assert torch.equal(ours, theirs)
    labels[3] = 301
    assert score(ctypes.byref(rows), ctypes.byref(results), 1) == 4  # 1 + the first label outside the vocabulary
