import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_trainer.config import Config, load_config
from rl_trainer.config.schema import AlgorithmConfig, RolloutSection, WarmupConfig
from rl_trainer.data import load_datasets
from rl_trainer.data.warmup import make_small_model
from rl_trainer.runtime.base import WorkerContext


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


METER = SimpleNamespace(
    tokens=SimpleNamespace(num_tokens=None),
    reader=None,
    teacher_prompt=lambda row: None,
    with_teacher_prompt=lambda sample, row: sample,
)


@pytest.fixture
def agent_worker(monkeypatch):
    """Makes an agent worker without servers: `loop` rolls out, `scorer` scores, `queue` takes the rows."""
    import rl_agent.registry
    import rl_tq.registry
    from rl_rollout.testing import FakeServer
    from rl_trainer.workers import agent

    def make(queue, loop=None, scorer=None, tokenizer=None, meter=METER, **options):
        monkeypatch.setattr(rl_tq.registry, "connect", lambda *_, **__: queue)
        monkeypatch.setattr(rl_agent.registry, "create_tokenizer", lambda *_, **__: tokenizer)
        monkeypatch.setattr(agent, "thinking_of", lambda *_: None)
        monkeypatch.setattr(agent, "Scorer", lambda *_, **__: scorer)
        monkeypatch.setattr(agent, "PromptMeter", lambda *_, **__: meter)
        monkeypatch.setattr(agent, "Replicas", lambda _: SimpleNamespace(router=FakeServer()))
        monkeypatch.setattr(agent, "create_runner", lambda *_: rl_agent.AgentRunner(lambda _: loop(None, None)))
        given = {
            "has_baseline": options.pop("has_baseline", False),
            "model_paths": {"": ""},
            "servers": {"": ()},
            "takes_videos": False,
        }
        config = Config(rollout=RolloutSection(max_new_tokens=5), runtime="inline", **options)
        context = WorkerContext(rank=0, world_size=1)
        return agent.AgentWorker(context, config=config, queue_address="", timeout_s=60.0, **given)

    return make


@pytest.fixture
def engine_worker(monkeypatch):
    """Makes the worker of a policy around rl-engine's fake."""
    import rl_engine.registry
    from rl_engine.testing import FakeEngine
    from rl_engine.types import EngineConfig
    from rl_trainer.workers.engine_worker import EngineWorker

    monkeypatch.setattr(rl_engine.registry, "create_engine", lambda _, config: FakeEngine(config))

    def make(queue_address="inproc://", algorithm=None, optimizer=None):
        config = EngineConfig(model_path="", optimizer=optimizer)
        context, algorithm = WorkerContext(rank=0, world_size=1), algorithm or AlgorithmConfig()
        return EngineWorker(context, backend="", config=config, algorithm=algorithm, queue_address=queue_address)

    return make


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with a tiny model that has learned next to nothing, with the quickstart's tokenizer."""
    rows = load_datasets(
        load_config("quickstart", ["data.options.num_rows=2000", "data.eval_size=16"]).data, seed=0
    ).train
    warmup = WarmupConfig(hidden_size=32, num_layers=1, steps=2, batch_size=16)
    folder = tmp_path_factory.mktemp("small")
    return make_small_model(folder, warmup, rows, seed=0, timeout_s=120, on_line=lambda line: None)
