"""Bad input ends with one sentence and exit code 2 before anything is started."""

import json
import platform
import re
import resource
import signal
import subprocess
import sys
from contextlib import nullcontext

import pytest

from rl_engine import write_manifest
from rl_trainer import cli
from rl_trainer import cli as _memory
from rl_trainer.errors import sentence_of


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something was started")

    monkeypatch.setattr("rl_trainer.run._run", refuse)
    monkeypatch.setattr("rl_trainer.planning.preflight.asked_in_background", lambda *_, **__: nullcontext())


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "model.safetensors").touch()
    return folder


@pytest.mark.process
def test_a_folder_without_weights_is_refused(model, capsys):
    (model / "model.safetensors").unlink()
    assert cli.main(["quickstart", f"model.path={model}", "--dry-run"]) == 2
    assert "has no .safetensors file, so it has no weights" in capsys.readouterr().err


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text((json.dumps({"question": "q", "answer": "#### 1"}) + "\n") * 300)
    return path


def refused(capsys, *argv):
    assert cli.main([str(a) for a in argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rl-train: ")
    assert error.count("\n") == 2
    assert re.search(r"\n  more in docs/\S+\.md\n$", error)
    return error


@pytest.mark.promise("Bad input ends with one sentence and exit code 2, before anything starts")
def test_unknown_key(capsys):
    assert "unknown configuration key batch.batchsize; the nearest one is batch.batch_size" in refused(
        capsys, "quickstart", "batch.batchsize=3"
    )


def test_too_few_gpus_are_reported_with_numbers_before_start(capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("rl_trainer.planning.gpus.local_gpus", lambda: 1)
    apart = "the run asks for 2 GPUs (engine 1, rollout 1), and this machine has 1, which they cannot share because"
    assert f"{apart} rollout.colocated=false keeps" in refused(capsys, "quickstart", "rollout.colocated=false")
    assert f"{apart} pipeline=one_step_off" in refused(
        capsys, "quickstart", "pipeline=one_step_off", "algorithm.correction=tis", "algorithm.old_logprobs=recompute"
    )


def test_missing_file(capsys, model):
    assert "there is no file nowhere.jsonl" in refused(
        capsys, "gsm8k", "data.path=nowhere.jsonl", f"model.path={model}"
    )


def test_bad_row(capsys, model, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "q", "answer": "#### 1"}\n{"question": "q"}\n')
    assert "row 2 has no text field 'answer'" in refused(capsys, "gsm8k", f"data.path={path}", f"model.path={model}")


def test_model_without_tokenizer(capsys, model, data):
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer (tokenizer.json" in refused(capsys, "gsm8k", f"data.path={data}", f"model.path={model}")


@pytest.mark.parametrize(
    ("missing", "words"),
    [("config.json", "has no config.json"), (None, "is neither a folder nor the hub's id of a model")],
)
def test_model_folder_that_is_none(capsys, model, data, missing, words):
    path = model / "deeper"
    if missing:
        path = model
        (model / missing).unlink()
    assert words in refused(capsys, "gsm8k", f"data.path={data}", f"model.path={path}")


def test_no_model_at_all(capsys, data):
    assert "model.path is not set" in refused(capsys, "gsm8k", f"data.path={data}")


def test_context_too_short(capsys, model, data):
    (model / "config.json").write_text('{"max_position_embeddings": 100}')
    assert "has a context of 100 tokens" in refused(capsys, "gsm8k", f"data.path={data}", f"model.path={model}")


def test_a_model_whose_rows_would_depend_on_longer_ones(capsys, model, data):
    told = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 100}
    (model / "config.json").write_text(json.dumps(told | {"max_position_embeddings": 100_000}))
    assert "beyond 100 the model in" in refused(capsys, "gsm8k", f"data.path={data}", f"model.path={model}")


def test_context_too_short_for_several_turns(capsys, model, data):
    (model / "config.json").write_text('{"text_config": {"max_position_embeddings": 3000}}')
    words = ["agent.loop=tool", "agent.options.max_completion_tokens=2500", f"data.path={data}", f"model.path={model}"]
    assert "agent.options.max_completion_tokens = " in refused(capsys, "gsm8k", *words)


def test_router_loss_of_a_model_without_experts(capsys, model, data):
    words = ["engine.router_aux_loss_coef=0.01", f"data.path={data}", f"model.path={model}"]
    assert "is not a mixture of experts" in refused(capsys, "gsm8k", *words)


def test_plan_that_does_not_divide(capsys):
    assert "cannot be cut into mini-batches" in refused(capsys, "quickstart", "batch.mini_batch_size=7")


@pytest.mark.parametrize(
    "key", ["engine.backend", "rollout.backend", "weights_transport", "queue_storage", "agent.loop"]
)
@pytest.mark.process
def test_backend_that_is_not_installed(capsys, key):
    error = refused(capsys, "quickstart", f"{key}=nonesuch", "data.options.num_rows=2000", "data.eval_size=16")
    assert f"{key}='nonesuch' is not known; there are" in error


@pytest.mark.process
def test_an_option_that_the_agent_loop_has_not(capsys):
    small = ["data.options.num_rows=2000", "data.eval_size=16", "agent.options={max_turns: 3}"]
    assert "agent.options.max_turns is not an option of agent.loop=single_turn; it has: none" in refused(
        capsys, "quickstart", *small
    )


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("tqdm", "engine.backend=fsdp needs tqdm: pip install 'rl-engine[fsdp]'"),  # of the extra
        (
            "msgspec",  # of the package itself
            "rollout.backend=embedded needs msgspec: pip install 'rl-rollout[embedded]'",
        ),
    ],
)
def test_a_backend_that_lacks_a_package(capsys, monkeypatch, lost, told):
    monkeypatch.setattr("rl_trainer.plugins.is_installed", lambda name: name != lost)
    assert told in refused(capsys, "quickstart", "runtime=ray", "data.options.num_rows=2000", "data.eval_size=16")


def test_output_that_would_be_overwritten(capsys, tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    error = refused(capsys, "quickstart", f"output_dir={tmp_path}", "data.options.num_rows=2000", "data.eval_size=16")
    assert "already holds a finished run" in error


def test_resume_from_an_incomplete_checkpoint(capsys, tmp_path):
    error = refused(capsys, "quickstart", f"resume_from={tmp_path}", "data.options.num_rows=2000", "data.eval_size=16")
    assert "is not a complete checkpoint folder" in error


def test_resume_of_nothing(capsys):
    assert "--resume goes on with the run in output_dir, which is not set" in refused(capsys, "quickstart", "--resume")


@pytest.mark.process
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"step": 200, "num_rows": 1, "seed": 0}, "is at step 200 already"),
        ({"step": 2, "num_rows": 17, "seed": 0}, "took its prompts from 17 rows with seed 0"),
    ],
)
def test_resume_from_what_this_run_cannot_go_on_from(capsys, tmp_path, state, words):
    write_manifest(tmp_path / "trainer_state.json", state, {})
    (tmp_path / "engine").mkdir()
    write_manifest(tmp_path / "engine" / "manifest.json", {}, {})
    error = refused(capsys, "quickstart", f"resume_from={tmp_path}", "data.options.num_rows=2000", "data.eval_size=16")
    assert words in error


@pytest.mark.process
def test_print_config_round_trips(capsys, tmp_path):
    from rl_trainer import load_config

    assert cli.main(["quickstart", "seed=4", "--print-config"]) == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert load_config(str(path)) == load_config("quickstart", ["seed=4"])


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_used_again():
    """By this process, not only by those that it starts. 64 MiB are more than glibc keeps of itself."""
    script = (
        "import resource, runpy\n"
        f"runpy.run_path({_memory.__file__!r})['keep_freed_memory']()\n"
        "def touch(): return [bytearray(b'x') * 2**23 for _ in range(8)]\n"
        "touch()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(5): touch()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 5 * 2**26 / resource.getpagesize() / 4


def test_an_unwritable_folder_is_refused_before_the_start(capsys):
    sizes = ["data.options.num_rows=2000", "data.eval_size=16"]
    error = refused(capsys, "quickstart", *sizes, "output_dir=/sys/rl-trainer")  # which root may not write either
    assert error.startswith("rl-train: /sys/rl-trainer cannot be used: ")
    assert error.splitlines()[0].endswith("; have the folder made writable, or choose another output_dir")


@pytest.mark.promise("`--resume` of a finished run says so and exits with 0")
def test_a_run_that_is_finished_is_not_started_again(capsys, tmp_path):
    folder = tmp_path / "checkpoint-7"
    (folder / "engine").mkdir(parents=True)
    write_manifest(folder / "trainer_state.json", {"step": 7, "num_rows": 2000, "seed": 0}, {})
    write_manifest(folder / "engine" / "manifest.json", {}, {})
    assert cli.main(["quickstart", f"output_dir={tmp_path}", "steps=7", "--resume"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("rl-train: the run is finished: ")
    assert "is of step 7 of steps=7; raise steps to go on" in told
    assert not (tmp_path / "config.yaml").exists()


def written_to_a_full_disk():
    try:
        with open("/dev/full", "w") as file:  # noqa: PTH123 - a device
            file.write("x")
    except OSError as error:
        return error


def test_disk_and_package_errors_are_explained_and_bugs_are_not():
    from rl_ckpt.errors import PeerLostError

    advice = "make room on that disk, then go on with --resume"
    full = written_to_a_full_disk()
    assert sentence_of(full) == f"a file cannot be written: No space left on device; {advice}"
    wrapped = RuntimeError("torn")
    wrapped.__cause__ = full
    assert sentence_of(wrapped) == sentence_of(full)
    rust = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    assert sentence_of(rust) == sentence_of(full)
    arrow = OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device")
    assert sentence_of(arrow) == sentence_of(full)
    assert sentence_of(OSError(30, "Read-only file system", "out/a")).startswith("out/a cannot be used: Read-only")
    assert sentence_of(PeerLostError("receiver 3 went away")) == "receiver 3 went away"
    assert sentence_of(ZeroDivisionError("division by zero")) is None
    assert sentence_of(KeyError("x")) is None


AT_AN_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
class Strike:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(sys.argv[2]))
sys.meta_path.insert(0, Strike())
from rl_trainer import cli
raise SystemExit(getattr(cli, sys.argv[3])(sys.argv[4:]))
"""


@pytest.mark.promise("Ctrl-C and SIGTERM are one sentence while a command imports")
@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "command", "program", "module"),
    [
        (signal.SIGINT, "main", "rl-train", "rl_trainer.errors"),
        (signal.SIGTERM, "main", "rl-train", "rl_trainer.errors"),
        (signal.SIGTERM, "main", "rl-train", "rl_trainer.config"),
        (signal.SIGINT, "main", "rl-train", "rl_trainer.run"),
        pytest.param(signal.SIGINT, "main_eval", "rl-eval", "rl_trainer.config", marks=pytest.mark.slow),
        (signal.SIGTERM, "main_sample", "rl-sample", "rl_trainer.config"),
    ],
)
def test_a_signal_during_an_import_is_answered_with_a_sentence(number, command, program, module):
    told, code = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("ended by SIGTERM", 143)}[number]
    line = [sys.executable, "-c", AT_AN_IMPORT, module, str(int(number)), command, "quickstart"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (code, f"{program}: {told}\n")


@pytest.mark.process
def test_what_is_imported_with_the_commands_takes_no_time():
    told = "import sys, rl_trainer.cli; print(*(name for name in ('pydantic', 'yaml', 'torch') if name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout == "\n"
