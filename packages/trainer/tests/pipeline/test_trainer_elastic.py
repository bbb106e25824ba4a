"""Replicas and agent workers die, join and leave while a run goes on: real processes on Ray, and every part real."""

import os
import re
import signal
import urllib.request

import pytest

from rl_bench.waiting import until
from rl_trainer.checkpoints import RunState
from rl_trainer.config import load_config
from rl_trainer.data import load_datasets
from rl_trainer.data.warmup import make_small_model
from rl_trainer.loop import run_loop
from rl_trainer.run import create_elastic
from rl_trainer.runtime import create_runtime
from rl_trainer.setup import place

pytestmark = pytest.mark.process


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_without_the_dead_and_with_the_new(model):
    num_steps, batch_size = 10, 4
    config = load_config(
        "quickstart",
        [
            "pipeline=fully_async", "staleness.max_staleness=2", "rollout.num_replicas=2", "agent.num_workers=2",
            f"model.path={model}", f"data.options.num_rows={num_steps * batch_size}", "data.eval_size=8",
            f"batch.batch_size={batch_size}", "batch.mini_batch_size=4", "batch.group_size=4", f"steps={num_steps}",
            "eval_every=0", "timeout_s=400",
        ],
    )  # fmt: skip
    datasets = load_datasets(config.data, seed=config.seed)
    with create_runtime("ray", timeout_s=config.timeout_s) as runtime:
        components = place(config, runtime, model, datasets, RunState(seed=0, num_rows=len(datasets.train)))
        agents, servers = components.agents.replica_set, components.weights.servers
        rows, failures, versions = [], 0, []
        for record in run_loop(components, config, components.eval_rows):
            rows += record.rows
            failures += sum(record.failures.values())
            if record.step == 1:  # the server's own process, which takes its keeper along
                os.kill(components.weights.in_use[servers.members[0]].pid, signal.SIGKILL)
            if record.step == 2:
                os.kill(agents.hosts[0].where.pid, signal.SIGKILL)
            if record.step == 4:
                until(lambda: len(servers.members) == 2, "the replica is replaced")
                until(lambda: len(agents.members) == 2, "the agent worker is replaced")
                servers.resize(3)
                agents.resize(3)
                until(lambda: len(servers.members) == 3 and len(agents.members) == 3, "both have grown")
            if record.step == 6:
                assert sorted(components.weights.in_use) == sorted(servers.members)
                os.kill(servers.hosts[0].where.pid, signal.SIGKILL)  # now the keeper, and its server with it
                agents.resize(1)
            versions.append(record.step)
        components.queue.close()
        news = "\n".join([*servers.take_news(), *agents.take_news()])
    assert versions == list(range(num_steps + 1))
    assert sorted(rows) == list(range(num_steps * batch_size)), "a prompt was lost, or used twice"
    assert failures == 0
    # The keeper of a server that is gone may notice by itself and end, or be ended after the next sync's check.
    lost = re.findall(r"^member \d+ of (\w+)-\d+ (?:died|is given up)", news, re.MULTILINE)
    assert sorted(lost) == ["AgentWorker", "RolloutWorker", "RolloutWorker"], news
    assert re.search(r"the rollout server is gone|is given up: http\S+ is not there", news), news
    assert news.count("has joined") >= 4, news  # two replacements and two that were asked for; the third may come late
    assert news.count("has left") == 2, news


POLICY = """
from rl_trainer.pipeline.elastic import ElasticPolicy

class Script(ElasticPolicy):
    def wanted(self, load):
        return 3 if 2 <= load.step < 6 else 1

    def lends(self, load):
        return 3 <= load.step < 7
"""


def num_generated(server):
    """Batches of requests that a replica has answered."""
    token = {"Authorization": f"Bearer {os.environ['RL_ROLLOUT_API_TOKEN']}"}
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/metrics", headers=token), timeout=60) as answer:
        found = re.search(r'total\{path="/generate_batch",status="200"\} (\d+)', answer.read().decode())
    return int(found[1]) if found else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_follow_a_policy_and_engine_gpus_are_lent(model, tmp_path):
    (tmp_path / "policy.py").write_text(POLICY)
    num_steps, batch_size = 9, 4
    config = load_config(
        "quickstart",
        [
            "pipeline=fully_async", "staleness.max_staleness=2", "agent.num_workers=2", "rollout.elastic.lend=true",
            "rollout.elastic.max_replicas=3", f"rollout.elastic.policy={tmp_path / 'policy.py'}:Script",
            f"model.path={model}", f"data.options.num_rows={num_steps * batch_size}", "data.eval_size=8",
            f"batch.batch_size={batch_size}", "batch.mini_batch_size=4", "batch.group_size=4", f"steps={num_steps}",
            "eval_every=0", "timeout_s=400",
        ],
    )  # fmt: skip
    datasets = load_datasets(config.data, seed=config.seed)
    with create_runtime("ray", timeout_s=config.timeout_s) as runtime:
        components = place(config, runtime, model, datasets, RunState(seed=0, num_rows=len(datasets.train)))
        elastic, servers = create_elastic(config, components), components.weights.servers
        rows, failures, news, lent, own, answered = [], 0, [], [], [], 0
        for record in run_loop(components, config, components.eval_rows):
            rows += record.rows
            failures += sum(record.failures.values())
            in_use = components.weights.in_use
            lent.append(components.weights.lent_in_use)
            own.append(len(in_use))
            answered = max([answered, *map(num_generated, lent[-1])])
            news += [*elastic.follow(record), *servers.take_news()]
            if record.step == 4:
                until(lambda: len(servers.members) == 3, "two have joined")
        components.queue.close()
    told = "\n".join(news)
    assert sorted(rows) == list(range(num_steps * batch_size)), "a prompt was lost, or used twice"
    assert failures == 0
    # Decided after steps 3 to 6, so that the syncs of the steps after them lend.
    assert [bool(each) for each in lent] == [False] * 4 + [True] * 4 + [False] * 2
    assert own[5:7] == [3, 3], own
    assert own[-2:] == [1, 1], own
    assert answered > 0, "the lent replica generated nothing"
    assert "rollout.elastic: 1 replicas to 3 after step 2" in told
    assert "rollout.elastic: 3 replicas to 1 after step 6" in told
    assert (told.count("has joined"), told.count("has left")) == (2, 2), told
    assert "engine's GPUs are lent while learning waits" in told
    assert "engine's GPUs are lent no more" in told


@pytest.fixture
def shipped(tmp_path):
    """The quickstart's model as it is shipped."""
    config = load_config("quickstart", [])
    rows = load_datasets(config.data, seed=config.seed).train
    return make_small_model(tmp_path, config.model.warmup, rows, seed=config.seed, timeout_s=9, on_line=print)


@pytest.mark.promise(
    "A run whose engine lends its memory to generation and takes it back loses no prompt and mixes no weights"
)
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_engine_memory_is_lent_and_returned_in_one_process(shipped):
    """Real engine, servers, agents and sessions, without Ray: two steps of four lend, and every row is used once."""
    num_steps, batch_size = 4, 2
    config = load_config(
        "quickstart",
        [
            "pipeline=fully_async", "staleness.max_staleness=2", "rollout.elastic={lend: true, max_replicas: 1}",
            f"model.path={shipped}", f"data.options.num_rows={num_steps * batch_size}", "data.eval_size=2",
            f"batch.batch_size={batch_size}", "batch.mini_batch_size=2", "batch.group_size=2", f"steps={num_steps}",
            "eval_every=0", "runtime=inline", "rollout.colocated=false", "weights_transport=inproc",
            "queue_storage=inproc",
        ],
    )  # fmt: skip
    datasets = load_datasets(config.data, seed=config.seed)
    with create_runtime("inline", timeout_s=config.timeout_s) as runtime:
        components = place(config, runtime, shipped, datasets, RunState(seed=0, num_rows=len(datasets.train)))
        weights, rows, lent, metrics = components.weights, [], [], []
        for record in run_loop(components, config, components.eval_rows):
            rows += record.rows
            lent.append(len(weights.lent_in_use))
            metrics.append(record.metrics)
            weights.lends = record.step in (1, 2)
        components.queue.close()
    assert lent == [0, 0, 1, 1, 0]
    assert sorted(rows) == list(range(num_steps * batch_size)), "a prompt was lost, or used twice"
    assert all(each["mismatch_abs"] < 1e-4 for each in metrics[1:] if each["staleness_max"] == 0)
