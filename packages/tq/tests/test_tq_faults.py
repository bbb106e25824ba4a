"""What fails while a queue is used, and is to be told instead of felt."""

import contextlib
import subprocess
import time
from pathlib import Path

import pytest
import torch

import rl_tq


@pytest.fixture
def small(tmp_path: Path):
    """A file system of 16 MB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("num_columns", [50_000, 800_000], ids=["common segments", "segments of their own"])
def test_a_full_arena_is_an_error_and_the_queue_goes_on(small: Path, num_columns: int):
    """Not a SIGBUS, which ends the process without a word. What was put stays, and room that is made is used."""
    with contextlib.ExitStack() as stack:
        queue = stack.enter_context(rl_tq.serve(f"file://{small}/queue", timeout_s=20.0))
        metas: list[rl_tq.BatchMeta] = []

        def fill() -> None:
            while len(metas) < 200:
                value = float(len(metas))
                metas.append(queue.put({"a": torch.full((2, num_columns), value)}, partition=str(len(metas))))

        with pytest.raises(rl_tq.QueueFullError, match=r"file system of .*queue has no room for \d+ bytes more"):
            fill()
        assert 2 <= len(metas) < 200
        for i, meta in enumerate(metas):
            assert queue.get(meta)["a"].unique().tolist() == [float(i)]
        for meta in metas:
            queue.clear(meta.partition)
        deadline = time.monotonic() + 30.0
        again = None
        while again is None and time.monotonic() < deadline:  # until every reader let go
            with contextlib.suppress(rl_tq.QueueFullError):
                again = queue.put({"a": torch.ones(2, num_columns)}, partition="again")
        assert again is not None
        assert queue.get(again)["a"].unique().tolist() == [1.0]
