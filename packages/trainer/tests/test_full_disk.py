"""Writers of a run on a disk that is full: the error names the file, and nothing half-written is taken for whole."""

import errno
import json
import os
import resource
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_csrc import hold_lock
from rl_engine import write_manifest
from rl_engine.checkpoint.hf_folder import publish
from rl_engine.checkpoint.sharded import write_shard
from rl_engine.errors import CheckpointError, naming
from rl_engine.finetune.record import RunRecord
from rl_tq.durability import Journal
from rl_trainer import checkpoints, load_config, output_dir, samples
from rl_trainer.data import load_datasets
from rl_trainer.data.warmup import make_small_model
from rl_trainer.errors import sentence_of
from rl_trainer.metrics import Evaluation, Report, StepRecord
from rl_trainer.trackers.base import RunInfo, TrackerGroup


@contextmanager
def file_sizes_limited(num_bytes):
    """`ulimit -f`: a write beyond it fails with EFBIG, as one to a full disk does with ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def evaluation():
    found = Evaluation(accuracy=0.5, reward=0.5)
    return StepRecord.of_evaluation(0, found, {}, position=0)


def log(folder):
    info = RunInfo(name="x", output_dir=folder, num_steps=1, config={}, console=None)
    TrackerGroup(info, {}).log(evaluation())


def prompts(folder):
    Report(folder).add(replace(evaluation(), rows=[["x"]]))


WRITERS = {
    "metrics.jsonl": log,
    "prompts.jsonl": prompts,
    "summary.json": lambda folder: Report(folder).finish({}),
    "config.yaml": lambda folder: output_dir.write_whole(folder / "config.yaml", "x" * 500),
    "step-000001.parquet": lambda folder: samples.write_samples(
        folder / "step-000001.parquet", {"a": torch.rand(500).tolist()}
    ),
    "trainer_state.json": lambda folder: write_manifest(folder / "trainer_state.json", {"x": "x" * 500}, {}),
    "shard-00000.safetensors": lambda folder: write_shard(
        folder / "shard-00000.safetensors", [("w", ((0,), (500,)), (500,), torch.rand(500))]
    ),
    "run.lock": lambda folder: hold_lock(folder / "run.lock", "x" * 500).__enter__(),
}
"""By the name of the file, a call that writes it to a folder."""


@pytest.mark.promise("A failed write names its file, and nothing half-written is taken for whole")
@pytest.mark.parametrize("name", WRITERS)
def test_the_error_of_a_failed_write_names_its_file(tmp_path, name):
    with file_sizes_limited(10), pytest.raises(OSError, match="File too large") as raised:
        WRITERS[name](tmp_path)
    assert raised.value.errno == errno.EFBIG
    assert str(tmp_path / name) in str(raised.value.filename)
    advice = "raise the limit of file sizes (ulimit -f), then go on with --resume"
    assert sentence_of(raised.value) == f"{raised.value.filename} cannot be used: File too large; {advice}"
    if name not in ("metrics.jsonl", "prompts.jsonl", "run.lock", "shard-00000.safetensors"):
        assert not (tmp_path / name).exists(), "what is half written has another name"


def test_a_log_line_that_was_torn_is_dropped_on_resume(tmp_path):
    log(tmp_path)
    whole = (tmp_path / "metrics.jsonl").read_text()
    line = json.dumps({"step": 1, "reward": 0.5, "metrics": {}})
    with file_sizes_limited(len(whole) + 20), pytest.raises(OSError, match="File too large"):
        output_dir.append_line(tmp_path / "metrics.jsonl", line)
    assert (tmp_path / "metrics.jsonl").read_text() != whole
    checkpoints.forget_after(tmp_path, 5)
    assert (tmp_path / "metrics.jsonl").read_text() == whole


def test_a_folder_that_cannot_be_written_leaves_the_earlier(tmp_path):
    publish(tmp_path / "model", lambda draft: (draft / "a").write_text("first"))
    with file_sizes_limited(3), pytest.raises(OSError, match="File too large") as raised:
        publish(tmp_path / "model", lambda draft: (draft / "a").write_text("second"))
    assert str(tmp_path) in str(raised.value.filename)
    assert (tmp_path / "model" / "a").read_text() == "first"


@pytest.mark.process
def test_the_small_model_s_file_is_named(tmp_path):
    config = load_config("quickstart")
    with file_sizes_limited(1 << 20), pytest.raises(OSError, match="model/model.safetensors"):
        make_small_model(
            tmp_path, config.model.warmup, load_datasets(config.data, seed=config.seed).train,
            seed=config.seed, timeout_s=9.0, on_line=print,
        )  # fmt: skip


def test_the_journal_of_the_queue_is_named(tmp_path):
    log = Journal(tmp_path / "queue")
    log.rewrite([["put", "x"]])
    with file_sizes_limited(100), pytest.raises(OSError, match="File too large") as raised:
        log.append([["put", "x" * 500]])
    assert raised.value.filename == str(tmp_path / "queue" / "journal")
    log.close()
    assert Journal(log.directory).load() == [["put", "x"]], "the record that is torn is none"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG])
def test_an_error_of_the_disk_is_a_sentence_with_the_file(number):
    text = os.strerror(number)
    for error in (
        OSError(number, text),
        RuntimeError(f"Error while serializing: I/O error: {text} (os error {number})"),
    ):
        with pytest.raises(OSError, match=text) as raised, naming(Path("out/x")):
            raise error
        assert sentence_of(raised.value).startswith(f"out/x cannot be used: {text}; ")
    of_a_rank = CheckpointError(f"Checkpoint out/c cannot be written: [Errno {number}] {text}: 'out/c/shard'")
    assert sentence_of(of_a_rank).startswith(f"{of_a_rank}; ")


def test_the_record_of_fine_tuning_is_named(tmp_path):
    record = RunRecord(str(tmp_path / "out"), {}, [], done=0)
    for write in (lambda: record.add(1, {"loss": 0.5}, 1.0), lambda: record.close({"steps": 1, "x": "x" * 500})):
        with file_sizes_limited(10), pytest.raises(OSError, match="File too large") as raised:
            write()
        assert str(raised.value.filename).startswith(str(tmp_path / "out.run"))
    assert not (tmp_path / "out.run" / "summary.json").exists()
