"""The output folder of a run: one run at a time, from the first moment, and nothing left of a run that was refused."""

import threading
from dataclasses import replace

import pytest

from rl_trainer.config import load_config
from rl_trainer.errors import InputError
from rl_trainer.output_dir import locked_output_dir

QUICKSTART = load_config("quickstart")


def race(config, number):
    """Folders that `number` threads got which enter at the same time, and the errors of the others."""
    start, leave = threading.Barrier(number), threading.Event()
    folders, refusals = [], []

    def enter():
        start.wait(10)
        try:
            with locked_output_dir(config) as folder:
                folders.append(folder)
                (folder / "metrics.jsonl").touch()
                leave.wait(10)
        except InputError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=enter) for _ in range(number)]
    for thread in threads:
        thread.start()
    while len(folders) + len(refusals) < number:
        threads[0].join(0.001)
    leave.set()
    for thread in threads:
        thread.join(10)
    return folders, refusals


@pytest.mark.parametrize("attempt", range(20))
def test_of_runs_that_start_together_one_gets_a_new_folder(tmp_path, attempt):
    folder = tmp_path / "deep" / "run"
    folders, refusals = race(replace(QUICKSTART, output_dir=str(folder)), 4)
    assert folders == [folder]
    assert len(refusals) == 3
    assert all(f"output_dir={folder} is in use by" in refusal for refusal in refusals)


def test_default_names_never_collide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders, refusals = race(replace(QUICKSTART, output_dir=None), 6)
    assert not refusals
    assert len(set(folders)) == 6


def test_a_refused_run_leaves_nothing_behind(tmp_path):
    config = replace(QUICKSTART, output_dir=str(tmp_path / "deep" / "run"))
    with pytest.raises(InputError, match="no such"), locked_output_dir(config):
        raise InputError("no such model")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_stays(tmp_path):
    with locked_output_dir(replace(QUICKSTART, output_dir=str(tmp_path / "run"))) as folder:
        (folder / "config.yaml").touch()
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "run.lock"]


def test_a_folder_that_was_there_stays(tmp_path):
    with locked_output_dir(replace(QUICKSTART, output_dir=str(tmp_path))):
        pass
    assert tmp_path.is_dir()


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path):
    (tmp_path / "file").touch()
    config = replace(QUICKSTART, output_dir=str(tmp_path / "file" / "run"))
    with pytest.raises(InputError, match="file/run"), locked_output_dir(config):
        pass
