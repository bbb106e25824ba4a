"""What the command line says of keys, choices and the machine."""

import re
import subprocess

import pytest

from rl_trainer import cli, load_config
from rl_trainer.commands import catalog, doctor
from rl_trainer.config import explain
from rl_trainer.errors import ConfigError


@pytest.mark.process
def test_every_key_has_a_doc_and_a_type():
    undocumented = [key.name for key in explain.keys().values() if not key.doc]
    assert undocumented == []
    assert all(key.type and "typing" not in key.type for key in explain.keys().values())
    assert explain.keys()["engine.optimizer.lr"].owner == "rl-engine"
    assert explain.keys()["batch.batch_size"].type == "int > 0"
    assert explain.keys()["rollout.colocated"].type == "true or false, or null"


@pytest.mark.process
def test_nearly_every_key_of_the_trainer_is_read_somewhere():
    unread = [k.name for k in explain.keys().values() if k.owner == "rl-post-trainer" and not explain.readers(k.name)]
    assert len(unread) < len(explain.keys()) / 3, unread
    assert "rl_trainer.pipeline.rollout_source" in explain.readers("batch.over_sampling")


def test_a_key_is_explained(capsys):
    assert cli.main(["--explain", "batch.over_sampling"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("batch.over_sampling: float >= 0, default 0.0\n")
    assert "read in" in told
    assert "reward.parts.NAME.weight" in explain.explain("reward.parts.mine.weight")
    with pytest.raises(ConfigError, match="the nearest one is batch.batch_size"):
        explain.explain("batch.batchsize")


def test_a_printed_configuration_says_where_a_value_is_from(capsys):
    assert cli.main(["dapo", "seed=4", "data.path=d", "model.path=m", "--print-config"]) == 0
    told = {*re.findall(r"; from ([^;()]+)\)", re.sub(r"\s*\n\s*# ", " ", capsys.readouterr().out))}
    assert told == {"the command line", "the default", "gsm8k.yaml", "dapo.yaml"}


@pytest.mark.process
def test_the_list_names_everything_in_short_lines(capsys):
    assert cli.main(["--list"]) == 0
    told = capsys.readouterr().out
    for name in ("quickstart", "reinforce_pp", "cispo", "fsdp", "vllm", "shm", "single_turn", "wandb"):
        assert re.search(rf"^  {name}  +\S", told, re.MULTILINE), name
    assert max(map(len, told.splitlines())) <= 120


@pytest.mark.process
@pytest.mark.parametrize(("typed", "wanted"), [("batch.gr", "batch.group_size="), ("quick", "quickstart")])
def test_the_shell_completes_keys_and_recipes(typed, wanted):
    script = (
        f"{catalog.completion('bash')}\nCOMP_WORDS=(rl-train {typed}); COMP_CWORD=1; _rl_train; echo ${{COMPREPLY[@]}}"
    )
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert wanted in ended.stdout.split()


def test_the_doctor_names_what_is_wrong_and_the_fix(capsys, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(total=2**26, free=2**25))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (256, 512))
    assert doctor.main([]) == 1
    told = capsys.readouterr().out
    assert "--shm-size=16g" in told
    assert "ulimit -n 4096" in told
    assert re.search(r"^ok   native code", told, re.MULTILINE)


def test_the_doctor_sees_versions_that_clash(monkeypatch):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0" if name == "torch" else real(name))
    clashes = [each for each in doctor.findings() if each.what == "versions"]
    assert any("wants torch" in each.value and each.fix.startswith("pip install 'torch") for each in clashes)


def test_the_sources_follow_the_layers():
    text = explain.annotated(load_config("quickstart", ["seed=3"]), "quickstart", ["seed=3"])
    assert "from the command line)\nseed: 3\n" in text
