"""What follows one run: signals, and the death of its workers."""

import io
import os
import signal
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from rl_trainer import run
from rl_trainer.config import load_config
from rl_trainer.errors import WorkerDiedError
from rl_trainer.metrics import PhaseTimer
from rl_trainer.pipeline.rollout_source import StopRequestedError


def die(*_):
    raise WorkerDiedError("a worker of pool 'engine' died")


@pytest.fixture
def attempts(monkeypatch):
    """Number of attempts; each dies, after a first step if `has_begun` of the report says so."""
    made = []
    monkeypatch.setattr(run, "_attempt", lambda *given: made.append(given) or die())
    monkeypatch.setattr(run, "_again", lambda config, _: (config, None))
    return made


@pytest.mark.promise("Up to `max_restarts` times; what dies before anything was measured ends the run")
@pytest.mark.parametrize(("has_begun", "max_restarts", "wanted"), [(False, 3, 1), (True, 3, 4), (True, 0, 1)])
def test_a_run_is_started_again_once_it_has_begun_and_so_often(attempts, has_begun, max_restarts, wanted):
    config = load_config("quickstart", ["model.path=nowhere", f"max_restarts={max_restarts}"])
    told = Console(width=200, file=io.StringIO())
    progress = SimpleNamespace(has_begun=has_begun)
    begun = SimpleNamespace(stop=threading.Event(), progress=progress, console=told)
    with pytest.raises(WorkerDiedError, match="pool 'engine'"):
        run._train(config, None, begun)
    assert len(attempts) == wanted
    text = told.file.getvalue()
    assert text.count("from the start, because a worker of pool 'engine' died") == wanted - 1


@pytest.mark.process
def test_a_restart_plays_the_environment_of_the_run(tmp_path, monkeypatch):
    """It once looked for rows in `data.path`, which a run with an environment has not."""
    made = []
    monkeypatch.setattr(run, "_attempt", lambda *given: made.append(given) or die())
    config = load_config("grpo", ["agent.environment=gymnasium:FrozenLake-v1", "model.path=nowhere", "max_restarts=1"])
    begun = SimpleNamespace(
        stop=threading.Event(), model_path="nowhere", output_dir=tmp_path, console=Console(file=io.StringIO()),
        progress=SimpleNamespace(has_begun=True, forget_after=lambda _: None),
    )  # fmt: skip
    with pytest.raises(WorkerDiedError, match="pool 'engine'"):
        run._train(config, None, begun)
    assert made[1][1].stream is not None


@pytest.mark.promise("A second Ctrl-C or SIGTERM ends it at once")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends_at_once(number, monkeypatch):
    before, asked = signal.getsignal(number), threading.Event()
    told = Console(width=200, file=io.StringIO())
    with run._stop_when_asked(told, asked, PhaseTimer()):
        os.kill(os.getpid(), number)
        assert asked.wait(5)
        signal.raise_signal(number)  # the same signal, to the process's group
        monkeypatch.setattr(run, "_SAME_SIGNAL_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before
    assert "stopping after this step; once more stops at once" in told.file.getvalue()


def test_an_evaluation_that_lasts_is_given_up(monkeypatch):
    monkeypatch.setattr(run, "STOP_GRACE_S", 0.01)
    timer, asked = PhaseTimer(), threading.Event()

    def evaluate():
        with timer.phase("eval"):
            threading.Event().wait(30)

    with run._stop_when_asked(Console(quiet=True), asked, timer):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StopRequestedError):
            evaluate()
