"""One process at a time writes to a folder; a process that is gone holds nothing."""

import json
import signal
import socket
import subprocess
import sys

import pytest

from rl_csrc import FolderInUseError, hold_lock
from rl_csrc import lock as _lock

HOLD = """
import sys, time
from rl_csrc import hold_lock
with hold_lock(sys.argv[1], "output_dir=out"):
    print("held", flush=True)
    time.sleep(600)
"""


def holder(file):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE, text=True)
    with process.stdout as lines:
        assert lines.readline() == "held\n"
    return process


@pytest.mark.promise("`hold_lock` keeps a folder to one process")
@pytest.mark.process
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_second_is_refused_until_the_first_is_killed(tmp_path, end):
    file = tmp_path / "run.lock"
    first = holder(file)
    try:
        for _ in range(2):
            with (
                pytest.raises(
                    FolderInUseError, match=rf"output_dir=out is in use by process {first.pid} on "
                ) as refused,
                hold_lock(file, "output_dir=out"),
            ):
                pass
        assert "wait for it, end it, or choose another folder" in str(refused.value)
    finally:
        first.send_signal(end)
        first.wait(30)
    with hold_lock(file, "output_dir=out"):
        assert json.loads(file.read_text())["host"] == socket.gethostname()
    assert file.read_text() == ""


@pytest.mark.process
def test_without_locks_of_the_file_system_the_record_decides(tmp_path, monkeypatch):
    def unsupported(descriptor, operation):
        raise OSError(95, "Operation not supported")

    file = tmp_path / "run.lock"
    first = holder(file)
    monkeypatch.setattr(_lock.fcntl, "flock", unsupported)
    try:
        with pytest.raises(FolderInUseError, match=str(first.pid)), hold_lock(file, "it"):
            pass
    finally:
        first.kill()
        first.wait(30)
    with hold_lock(file, "it"):
        pass


@pytest.mark.parametrize("changes", [{"started": -1}, {"boot": "before"}])
def test_a_number_that_another_process_has_now_is_no_holder(tmp_path, changes):
    file = tmp_path / "run.lock"
    record = _lock.this_process() | {"pid": 1, "started": _lock.started(1)}
    file.write_text(json.dumps(record))
    with pytest.raises(FolderInUseError, match="process 1 on"), hold_lock(file, "it"):
        pass
    file.write_text(json.dumps(record | changes))
    with hold_lock(file, "it"):
        pass


def test_what_another_host_holds_is_for_a_person_to_decide(tmp_path):
    file = tmp_path / "run.lock"
    file.write_text(json.dumps(_lock.this_process() | {"host": "node7"}))
    told = pytest.raises(FolderInUseError, match=r"on node7.*cannot tell\), delete .*run\.lock and try again")
    with told, hold_lock(file, "it"):
        pass
    file.unlink()
    with hold_lock(file, "it"):
        pass


def test_a_record_that_was_cut_short_holds_nothing(tmp_path):
    file = tmp_path / "run.lock"
    for text in ("", '{"host": "no', "[]"):
        file.write_text(text)
        with hold_lock(file, "it"):
            pass
