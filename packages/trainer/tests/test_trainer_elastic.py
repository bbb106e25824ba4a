"""Replicas and agent workers die, join and leave while a run goes on: real processes on Ray, and every part real."""

import os
import re
import signal
import time

import pytest

from rl_trainer.checkpoints import RunState
from rl_trainer.config import load_config
from rl_trainer.data import load_datasets
from rl_trainer.loop import run_loop
from rl_trainer.runtime import create_runtime
from rl_trainer.setup import place


def until(condition, what):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


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
