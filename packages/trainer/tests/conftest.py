import os
import sys
from pathlib import Path

import pytest

from rl_trainer.config import WarmupConfig, load_config
from rl_trainer.data import load_datasets
from rl_trainer.data.warmup import make_small_model


@pytest.fixture(autouse=True, scope="module")
def environment():
    """The environment is as it was: jobs get their secrets there, which tests of other packages must not find.

    Nor must Ray, which keeps a token in its own memory: the next Ray of this process would be asked for another one.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    if "ray" in sys.modules:
        from ray._raylet import AuthenticationTokenLoader, Config

        Config.initialize("")  # first: a thread of Ray that still asks for a token must find one, or none wanted
        AuthenticationTokenLoader.instance().reset_cache()


@pytest.fixture
def megatron_on_cpu(monkeypatch):
    """Name of a backend of rl-engine's tests that the processes started here find: `megatron` without a GPU."""
    support = Path(__file__).parents[2] / "engine" / "tests" / "support" / "megatron_on_cpu"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(support), os.environ.get("PYTHONPATH")))))
    return support.name


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with a tiny model that has learned next to nothing, with the quickstart's tokenizer."""
    rows = load_datasets(
        load_config("quickstart", ["data.options.num_rows=2000", "data.eval_size=16"]).data, seed=0
    ).train
    warmup = WarmupConfig(hidden_size=32, num_layers=1, steps=2, batch_size=16)
    folder = tmp_path_factory.mktemp("small")
    return make_small_model(folder, warmup, rows, seed=0, timeout_s=120, on_line=lambda line: None)
