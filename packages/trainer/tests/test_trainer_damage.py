"""A damaged checkpoint is told and passed over; two runs never share a folder. Real runs, in one process each."""

import io
import json
import random
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

import rl_tq
from rl_csrc import hold_lock
from rl_engine import digest_files, read_manifest, write_manifest
from rl_trainer import checkpoints, cli
from rl_trainer.config import load_config
from rl_trainer.errors import InputError
from rl_trainer.planning.prepare import resumed
from rl_trainer.run import run

STEPS = 3
SIZES = [
    "runtime=inline", "data.options.num_rows=100", "data.eval_size=4", "batch.batch_size=2", "batch.mini_batch_size=2",
    "batch.group_size=2", "eval_every=0", "save_every=1", "tracking.trackers=[]",
    "engine.optimizer.lr=1e-2", "engine.optimizer.warmup_steps=0", "algorithm.entropy_coef=0.1",
]  # fmt: skip


def config(model, output_dir, steps=STEPS):
    return load_config("quickstart", [*SIZES, f"model.path={model}", f"output_dir={output_dir}", f"steps={steps}"])


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """A run of three steps with a checkpoint of each, the last of which is gone: it did not end."""
    folder = tmp_path_factory.mktemp("run") / "out"
    run(config(model, folder), Console(quiet=True))
    (folder / "summary.json").unlink()
    last = folder / "checkpoint-3"
    with rl_tq.serve("inproc://") as queue:  # as a run with groups that wait to be learned from has it
        queue.put({"prompt_token_ids": [[1, 2], [3]]}, partition="train")
        queue.snapshot(last / "queue")
    state = read_manifest(last / checkpoints.STATE_FILE)
    rows = {f"queue/{name}": entry for name, entry in digest_files(last / "queue").items()}
    write_manifest(last / checkpoints.STATE_FILE, state, state["files"] | rows)
    assert [path.name for path in checkpoints.complete(folder)] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]
    return folder


@pytest.fixture
def own(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "out")


def files_of(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def told(output_dir, model):
    console = Console(record=True, width=500, file=io.StringIO())
    settings = resumed(config(model, output_dir, STEPS + 1), console)
    return settings.resume_from, console.export_text()


def flip(path, draw):
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


HARM = {
    "a flipped bit": flip,
    "a cut": lambda path, draw: path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)]),
    "more": lambda path, draw: path.write_bytes(path.read_bytes() + b" "),
    "a missing file": lambda path, draw: path.unlink(),
}


@pytest.mark.promise("A damaged checkpoint is named, and `--resume` goes on from the last whole one")
@pytest.mark.promise("`rl-train --verify` prints a line per damaged file, and exits with 1")
@pytest.mark.process
@pytest.mark.parametrize("harm", HARM)
def test_resume_names_a_damaged_file_and_uses_the_last_whole_one(own, model, harm, capsys):
    """Every file of the newest checkpoint, one after the other: shards, manifests, the queue's rows, the model's."""
    newest, draw = own / "checkpoint-3", random.Random(harm)
    names = files_of(newest)
    assert {name.parts[0] for name in names} == {"engine", "model", "queue", "trainer_state.json"}
    for name in names:
        path = newest / name
        if harm == "a missing file" and name.name == checkpoints.STATE_FILE:
            continue  # a folder without it was not finished
        written = path.read_bytes()
        if harm in ("a flipped bit", "a cut") and not written:
            continue
        HARM[harm](path, draw)
        start, text = told(own, model)
        assert start == str(own / "checkpoint-2"), name
        assert f"checkpoint-3 is damaged: {path} " in text, name
        assert "going on from checkpoint-2" in text
        assert cli.main(["--verify", str(own)]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert next(line for line in lines if not line.endswith("is whole")).startswith(f"{path} "), name
        assert len(lines) == 3, lines
        path.write_bytes(written)
    assert cli.main(["--verify", str(own)]) == 0
    assert capsys.readouterr().out.count("is whole") == 3
    start, text = told(own, model)
    assert (start, text) == (str(newest), "")


@pytest.mark.process
def test_a_run_goes_on_beside_the_damage_with_the_same_losses(own, finished, model):
    """The step whose checkpoint was damaged is taken again, from the same prompts, and every prompt counts once."""
    (path,) = (own / "checkpoint-3" / "engine").glob("shard-*")
    flip(path, random.Random(1))
    run(config(model, own, STEPS), Console(quiet=True), resume=True)
    assert (own / "damaged-checkpoint-3" / "engine" / path.name).is_file()
    assert cli.main(["--verify", str(own)]) == 0
    (prompts, losses), (wanted, wanted_losses) = (logs(place) for place in (own, finished))
    assert prompts == wanted
    assert losses == wanted_losses
    assert len(set(losses.values())) == STEPS, "the losses say nothing"


def logs(output_dir):
    """Rows, and loss and gradient norm, by step."""
    prompts, metrics = (
        [json.loads(line) for line in (output_dir / name).read_text().splitlines()]
        for name in ("prompts.jsonl", "metrics.jsonl")
    )
    assert [line["step"] for line in prompts] == list(range(1, STEPS + 1))
    return (
        [line["rows"] for line in prompts],
        {
            line["step"]: (line["metrics"]["policy_loss"], line["metrics"]["grad_norm"])
            for line in metrics
            if line["metrics"]
        },
    )


@pytest.mark.process
def test_kill_leftovers_are_skipped_and_total_damage_is_an_error(own, model, capsys):
    (own / "checkpoint-4").mkdir()
    (own / "checkpoint-5" / "engine").mkdir(parents=True)
    assert told(own, model) == (str(own / "checkpoint-3"), "")
    assert cli.main(["--verify", str(own)]) == 0
    assert "checkpoint-4 was not finished: no run goes on from it" in capsys.readouterr().out
    for step in (1, 2, 3):
        (own / f"checkpoint-{step}" / "engine" / "manifest.json").write_text("")
    with pytest.raises(InputError, match=r"every checkpoint in .* is damaged: .*checkpoint-3/engine/manifest\.json is"):
        resumed(config(model, own))


@pytest.mark.process
def test_a_damaged_checkpoint_that_is_named_is_refused(own, model, tmp_path):
    (path,) = (own / "checkpoint-2" / "model").glob("*.safetensors")
    flip(path, random.Random(2))
    settings = load_config(
        "quickstart",
        [*SIZES, f"model.path={model}", f"output_dir={tmp_path / 'other'}", f"resume_from={own / 'checkpoint-2'}"],
    )
    with pytest.raises(InputError, match=r"model\.safetensors is damaged: its digest is not the one that was written"):
        run(settings, Console(quiet=True))
    assert not (tmp_path / "other").exists()


@pytest.mark.promise("A second run in one `output_dir` is refused")
@pytest.mark.process
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_folder_in_which_a_run_lives_is_refused(tmp_path, capsys, model, resume):
    with hold_lock(tmp_path / "run.lock", "it"):
        command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", *resume, *SIZES]
        ended = subprocess.run(
            [*command, f"model.path={model}", f"output_dir={tmp_path}"], capture_output=True, text=True, check=False
        )
    assert ended.returncode == 2
    assert f"rl-train: output_dir={tmp_path} is in use by process " in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_nothing_to_verify(tmp_path, capsys):
    assert cli.main(["--verify", str(tmp_path)]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err
