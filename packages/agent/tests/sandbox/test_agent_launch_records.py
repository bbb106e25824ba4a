"""Launch scripts, with bash played by a function: records, complaints, limits and outcomes are read as they are."""

import json
import signal
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_agent.errors import SandboxError, ScriptError
from rl_agent.registry import create_script_reader
from rl_agent.sandbox import launches
from rl_agent.sandbox.launches import ScriptReader
from rl_agent.sandbox.process.isolation import Watch

DONE = {"isolated": True, "status": 0, "records": [], "complaints": "", "trace": [], "is_full": False, "is_cut": False}
MAIN = ["launch", "/w", "python3", "-m", "verl.main", "n=1"]


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("source /lacking/env.sh\npython3 -m verl.main n=1\n")
    return file


@pytest.fixture
def bash(monkeypatch):
    """Reading of a script by `bash.play(request, failing)`: an answer, or a finished process. All requests are kept."""
    played = SimpleNamespace(play=None, requests=[])

    def run(command, *, input=None, **_):  # noqa: A002 - as of subprocess
        if input is None:
            return subprocess.CompletedProcess(command, 0, "\tlibc.so => /lib/libc.so (0x7)\n", "")
        played.requests.append(request := json.loads(input))
        listed = request["stand_ins"].get("/stand_ins/.fails", "").split("\36")
        found = played.play(request, {" ".join(words.split("\37")[:-1]) for words in listed if words})
        if not isinstance(found, dict):
            return found
        answer = {**DONE, **found}
        return subprocess.CompletedProcess(command, 0, json.dumps(answer | {"digest": json.dumps(answer)}), "")

    monkeypatch.setattr(launches.subprocess, "run", run)
    return played


@pytest.mark.parametrize(
    ("command", "module", "options", "arguments"),
    [
        ("python3 -m verl.main a=1 b=2", "verl.main", "", "a=1 b=2"),
        ("python3 -u -mverl.main a=1", "verl.main", "-u", "a=1"),
        ("python3 ./train/run.py --x", "train.run", "", "--x"),
        ("torchrun --nnodes 2 --nproc-per-node=8 -m verl.x c=3", "verl.x", "--nnodes 2 --nproc-per-node=8", "c=3"),
        ("python3 -m torch.distributed.run --nnodes 1 t.py d", "t", "-m torch.distributed.run --nnodes 1", "d"),
        ("accelerate launch --config_file f.yaml t.py", "t", "launch --config_file f.yaml", ""),
        ("ray job submit", "job", "", "submit"),
        ("python3", "python3", "", ""),
    ],
)
def test_a_command_line_is_module_options_and_arguments(tmp_path, command, module, options, arguments):
    (tmp_path / "1000").write_text("".join(f"{word}\0" for word in ("launch", "/w", *command.split())))
    (launch,) = create_script_reader().recorded(tmp_path).launches
    assert (launch.module, " ".join(launch.options), " ".join(launch.arguments)) == (module, options, arguments)
    assert (launch.folder, " ".join(launch.words)) == ("/w", command)


def test_what_was_not_known_is_reported(bash, script):
    """By the marker of a command whose output a test of the script reads."""
    unknown = ["unknown", "/w", "hostname", "-s"]
    line = f"{script}: line 1: /lacking/env.sh: No such file or directory\n"
    bash.play = lambda request, _: {
        "records": [unknown, ["assumed", "/w", "nvidia-smi"], MAIN],
        "trace": ["+ [[ @unknown1000@ == head ]]"],
        "complaints": "" if "/lacking/env.sh" in request["stand_ins"] else line,
        "is_cut": True,
    }
    found = create_script_reader().read(script, ["x"])
    assert [each.arguments for each in found.launches] == [("n=1",)]
    assert found.unknown == {"1000": "hostname -s", "1002": "python3 -m verl.main n=1"}
    assert found.assumed == (
        "source /lacking/env.sh, a file that does not exist here",
        "[[ $(hostname -s) == head ]] is decided with a text that is not known",
        "no test after the first commands, whose trace fills its file, depends on a text that is not known",
        "nvidia-smi fails",
    )
    assert (bash.requests[0]["arguments"], "/lib/libc.so" in bash.requests[0]["programs"]) == (["x"], True)


def test_a_folder_that_is_lacking_is_there_in_the_next_reading(bash, script):
    def play(request, _):
        is_there = "/data/in" in request["folders"]
        said = f"{script}: line 2: cd: /data/in: No such file or directory\n"
        return {"records": [["folders", "/data", "out"], MAIN], "complaints": "" if is_there else said}

    bash.play = play
    assert len(create_script_reader().read(script).launches) == 1
    assert [request["folders"][1:] for request in bash.requests] == [[], ["/data/out", "/data/in"]]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"status": None}, "ran for more than 10 s"),
        ({"status": -signal.SIGXCPU}, "took more than 5 s of CPU time;"),
        ({"status": -signal.SIGKILL}, "CPU time, or killed itself"),
        ({"status": -signal.SIGXFSZ}, "wrote more than 16 MiB;"),
        ({"status": -signal.SIGSEGV}, "made bash crash"),
        ({"is_full": True}, "wrote more than 16 MiB, with what bash reported"),
        ({"complaints": "SCRIPT: line 2: /etc/shadow: Permission denied"}, "line 2 uses /etc/shadow, outside the"),
        ({"complaints": "SCRIPT: line 2: ./a.sh: Permission denied"}, "runs or writes ./a.sh, .* with: bash ./a.sh"),
        ({"complaints": "SCRIPT: line 1: /dev/tcp/h/1: Connection refused"}, "line 1 opens a network connection"),
        ({"complaints": "SCRIPT: line 1: fork: retry: Resource"}, "starts more processes than it may"),
        ({"complaints": "SCRIPT: line 1: enable: x: cannot open"}, r"loads code into bash \(enable: x"),
        ({"complaints": "SCRIPT: line 1: echo: No space left on device"}, "writes more than it may"),
        (
            {
                "complaints": "SCRIPT: line 1: [: @unknown1000@: integer expected",
                "records": [["unknown", "/", "nproc"]],
            },
            r"line 1 needs what \$\(nproc\) prints, which is not known",
        ),
        (subprocess.CompletedProcess([], Watch.TOO_MANY_PROCESSES, "", ""), "had more than 64 processes"),
        (subprocess.CompletedProcess([], Watch.TOO_MUCH_MEMORY, "", ""), "took more than 512 MiB"),
        (subprocess.CompletedProcess([], 1, "", "Killed"), "ended its own reading Killed"),
    ],
)
def test_a_script_past_its_bounds_is_one_error(bash, script, answer, words):
    if isinstance(answer, dict) and "complaints" in answer:
        answer = answer | {"complaints": answer["complaints"].replace("SCRIPT", str(script)) + "\n"}
    bash.play = lambda *_: answer
    with pytest.raises(ScriptError, match=words) as error:
        create_script_reader().read(script)
    assert str(script) in str(error.value)
    assert "give the overrides of its command line instead" in str(error.value)


def test_a_reading_without_end_is_one_error(bash, script):
    def play(*_):
        raise subprocess.TimeoutExpired("python", 70)

    bash.play = play
    with pytest.raises(ScriptError, match="was not read within 70 s"):
        create_script_reader().read(script)


def test_a_script_that_cannot_be_isolated_is_not_run(bash, script, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bash.play = lambda *_: {"isolated": False}
    with pytest.raises(SandboxError, match="is not run: .* run it yourself with stand-ins that record what it launch"):
        ScriptReader(may_isolate=False).read(script)
    (folder,) = tmp_path.glob("rl-launches-*")
    assert (folder / "bin/torchrun").stat().st_mode & 0o111
    monkeypatch.setattr(launches.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SandboxError, match="needs bash to be read, and there is none"):
        create_script_reader().read(script)


def test_a_script_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ScriptError, match="none.sh cannot be read: No such file"):
        create_script_reader().read(tmp_path / "none.sh")
    with pytest.raises(ScriptError, match="folder of the system; copy it"):
        create_script_reader().read(Path("/usr/bin/which").resolve())
    with pytest.raises(ScriptError, match="holds no record of a launch"):
        create_script_reader().recorded(tmp_path)


def test_a_kernel_that_is_short_of_namespaces_is_asked_again(bash, script, monkeypatch):
    pauses_s = []
    monkeypatch.setattr(launches.time, "sleep", pauses_s.append)
    bash.play = lambda *_: {"isolated": len(bash.requests) == 3, "records": [MAIN]}
    assert len(create_script_reader().read(script).launches) == 1
    assert pauses_s == [0.05, 0.2]


def playing(outcome):
    """Bash whose script runs foo and bar, and then launches what `outcome(failing)` gives: arguments, exit status."""

    def play(_, failing):
        launched, status = outcome(failing)
        asked = [["unknown", "/w", "foo"], ["unknown", "/w", "bar", "x"]]
        return {"records": [*asked, *([*MAIN[:-1], each] for each in launched)], "status": status}

    return play


@pytest.mark.parametrize(
    ("outcome", "named"),
    [
        (lambda failing: (["n=1"] if "foo" in failing else ["n=8"], 0), "foo"),
        (lambda failing: (["n=1"] if "bar x" in failing else ["n=8"], 0), "bar x"),
        (lambda failing: (["n=1"] if len(failing) == 2 else ["n=8"], 0), "foo or bar x"),
        (lambda failing: (["n=0", "n=8"] if "foo" in failing else ["n=8"], 0), "foo"),
    ],
)
def test_a_launch_that_a_command_decides_is_refused(bash, script, outcome, named):
    bash.play = playing(outcome)
    with pytest.raises(ScriptError, match=f"whether the command '{named}' succeeds, on which the launch depends"):
        create_script_reader().read(script)


@pytest.mark.parametrize(
    ("outcome", "assumed"),
    [
        (lambda _: (["n=1"], 0), ()),
        (lambda failing: ([], 1) if "foo" in failing else (["n=1"], 0), ()),
        (lambda failing: (["n=1"] * (3 if "foo" in failing else 1), 0), ()),
        (lambda failing: (["n=1"], 0) if "foo" in failing else ([], 0), ("foo fails",)),
    ],
    ids=["no outcome matters", "it ends early", "it tries again", "it needs a failure"],
)
def test_a_launch_that_no_command_decides_is_found(bash, script, outcome, assumed):
    bash.play = playing(outcome)
    found = create_script_reader().read(script)
    assert {each.arguments for each in found.launches} == {("n=1",)}
    assert found.assumed == assumed


def test_outcomes_that_could_not_be_tried_are_assumed(bash, script):
    def play(request, failing):
        if failing:
            return subprocess.CompletedProcess([], 1, "", "Killed")
        return playing(lambda _: (["n=1"], 0))(request, failing)

    bash.play = play
    assert create_script_reader().read(script).assumed == ("foo succeeds", "bar x succeeds")
