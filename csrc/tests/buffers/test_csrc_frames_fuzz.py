"""libFuzzer on the frame parser and the delta check, under ASan and UBSan. Ten minutes; needs clang and its runtime."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from rl_csrc import frames

pytestmark = pytest.mark.process

FUZZ = Path(__file__).parents[2] / "fuzz"


def seed(corpus):
    corpus.mkdir()
    ragged = frames.Ragged(torch.arange(6.0), torch.tensor([0, 2, 6]))
    nested = frames.Ragged(ragged, torch.tensor([0, 2], dtype=torch.int32))
    mappings = [{}, {"a": torch.randn(3)}, {"r": nested, "b": b"hello", "e": torch.empty(0, 3), "é": torch.tensor(1)}]
    for index, mapping in enumerate(mappings):
        (corpus / str(index)).write_bytes(frames.encode(mapping, checksum=True).to_bytes())


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    if not (shutil.which("clang++") and shutil.which("cmake")):
        pytest.skip("needs clang++ with its fuzzer runtime (libclang-rt) and cmake")
    path = tmp_path_factory.mktemp("fuzz")
    subprocess.run(["cmake", "-S", FUZZ, "-B", path, "-DCMAKE_CXX_COMPILER=clang++"], check=True)
    subprocess.run(["cmake", "--build", path], check=True)
    return path


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("target", "seconds"), [("frames", 540), ("delta", 60)])
def test_fuzz(build, tmp_path, target, seconds):
    seconds = int(os.environ.get("RL_CSRC_FUZZ_SECONDS", seconds))
    corpus = tmp_path / "corpus"
    seed(corpus)
    command = [build / f"{target}_fuzz", f"-max_total_time={seconds}", "-max_len=4096", corpus]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-8000:]
