"""What a test and its solution share of streams, files and introspection, with the other side played by a function."""

# ruff: noqa: PTH110, PTH113, PTH123, SIM115 - it is the functions of the standard library that are replaced

import asyncio
import builtins
import contextlib
import inspect
import io
import os
import sys
import time

import pytest

from rl_agent.sandbox.process import surroundings


class Peer:
    """The other side: answers by operation."""

    def __init__(self, **answers):
        self.answers, self.printed, self.num_forgotten = answers, None, 0

    def ask(self, operation, target, *given):
        found = self.answers[operation]
        return found(target, *given) if callable(found) else found

    def number_of(self, value):
        return value if isinstance(value, int) else None

    def forget(self):
        self.num_forgotten += 1


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    """Everything that is replaced comes back."""
    for owner, names in (
        (builtins, ("open", "input")),
        (io, ("open",)),
        (os.path, ("exists", "isfile")),
        (time, ("sleep",)),
        (asyncio, ("sleep",)),
        (inspect, surroundings._INSPECTED),
        (sys, ("stdin", "stdout", "stderr")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))


def test_a_solution_s_redirected_output_is_sent_and_shown():
    peer = Peer()
    surroundings.surround_solution(peer, "")
    print("a")  # noqa: T201
    sys.stderr.writelines(["b", "c"])
    sent = peer.printed()
    assert "".join(text for name, text in sent if name == "out") == "a\n"
    assert [text for name, text in sent if name == "err"] == ["b", "c"]
    assert peer.printed() == []
    shown = surroundings.TestSurroundings(Peer(), "")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        shown.show([*sent, ["out", 3]])
    assert output.getvalue() == "a\n"
    shown.show(None)


def test_a_solution_s_input_is_what_the_test_gives():
    lines = iter(["1\n", "2\n"])
    surroundings.surround_solution(Peer(line=lambda _: next(lines, "")), "")
    assert input() == "1"
    assert sys.stdin.read() == "2\n"
    surroundings.surround_solution(Peer(line=None), "")
    assert [*sys.stdin] == []


def test_a_test_s_input_is_a_stream_or_a_function(monkeypatch):
    test = surroundings.TestSurroundings(Peer(), "")
    assert test.line("") == ""
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\ny\n"))
    assert [test.line(""), test.line("")] == ["x\n", "y\n"]
    monkeypatch.setattr(builtins, "input", lambda: "z")
    assert test.line("") == "z\n"


def test_a_test_reads_files_that_the_solution_has_written(tmp_path):
    files = {str(tmp_path / "there.txt"): "é\n".encode()}
    test = surroundings.TestSurroundings(Peer(file=files.get), "")
    path = tmp_path / "there.txt"
    assert open(path, encoding="utf-8").read() == "é\n"
    assert open(path, "rb").read() == "é\n".encode()
    assert (os.path.exists(path), os.path.isfile(path), os.path.exists(tmp_path / "no")) == (True, True, False)
    with pytest.raises(FileNotFoundError):
        open(tmp_path / "no")
    own = tmp_path / "own.txt"
    with open(own, "w") as file:
        file.write("mine")
    assert (test.file(str(own)), test.file("/etc/passwd")) == (b"mine", None)
    assert surroundings.content_of(str(own)) == b"mine"
    assert surroundings.content_of(str(tmp_path / "no")) is None


def test_inspect_answers_for_functions_of_the_solution():
    surroundings.TestSurroundings(Peer(inspect=lambda number, name: (number, name)), "import inspect")
    assert inspect.isclass(7) == (7, "isclass")
    assert inspect.isclass(int)


def test_a_pause_of_the_test_forgets_what_was_read():
    peer = Peer()
    surroundings.TestSurroundings(peer, "time.sleep(0)")
    time.sleep(0)
    asyncio.run(asyncio.sleep(0))
    assert peer.num_forgotten == 2
