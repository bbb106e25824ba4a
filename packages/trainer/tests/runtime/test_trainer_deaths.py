"""A process dies or hangs while others wait for it: real processes, every part real, a tiny model."""

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_bench.waiting import until
from rl_trainer.checkpoints import RunState
from rl_trainer.config import load_config
from rl_trainer.data import load_datasets
from rl_trainer.errors import WorkerDiedError, WorkerHungError
from rl_trainer.run import _blamed_on_a_death
from rl_trainer.runtime import create_runtime
from rl_trainer.setup import place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TIMEOUT_S = 400
HEARTBEAT_S = 6.0
SOON_S = 20.0
"""Far from the deadline of the call, and enough for a machine with other work."""


class Job:
    def __init__(self, model, *overrides):
        sizes = ["batch.batch_size=4", "batch.mini_batch_size=4", "batch.group_size=4", "steps=4", "eval_every=0"]
        data = ["data.options.num_rows=64", "data.eval_size=8", f"model.path={model}"]
        times = [f"timeout_s={TIMEOUT_S}", f"heartbeat_s={HEARTBEAT_S}"]
        self.config = load_config("quickstart", ["runtime=ray", *sizes, *data, *times, *overrides])
        self.runtime = create_runtime("ray", timeout_s=TIMEOUT_S, heartbeat_s=HEARTBEAT_S)
        datasets = load_datasets(self.config.data, seed=0)
        state = RunState(seed=0, num_rows=len(datasets.train))
        try:
            self.components = place(self.config, self.runtime, model, datasets, state)
        except BaseException:
            self.runtime.stop()
            raise

    def pid(self, pool):
        return self.runtime.answers.hosts[pool][0].where.pid

    def stop(self):
        self.components.queue.close()
        self.runtime.stop()

    def generate(self):
        with _blamed_on_a_death(self.runtime):  # as a run does
            self.components.source.release(1)
            return self.components.source.take(1)


@pytest.fixture
def job(model):
    made = Job(model, "rollout.num_replicas=2", "agent.num_workers=2")
    try:
        yield made
    finally:
        made.stop()


def killed_while(waiting, pid, *, before_s=1.5):
    """Stop a process, begin what waits for it, and kill it: the error, and the seconds from the kill to it."""
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(waiting)
        time.sleep(before_s)
        assert not future.done(), "nothing waited for the process"
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        error = future.exception(TIMEOUT_S)
        return error, time.monotonic() - killed


@pytest.mark.promise("A dead engine ends every wait at once, with its name and last lines")
def test_the_engine_dies_in_a_weight_sync(job):
    job.components.weights.sync(1)
    error, took_s = killed_while(lambda: job.components.weights.sync(2), job.pid("engine"))
    assert isinstance(error, WorkerDiedError)
    assert str(error).startswith("a worker of pool 'engine', rank 0, died during ")
    assert f"process {job.pid('engine')}" in str(error)
    assert took_s < 5


def test_the_queue_dies_under_the_puts_of_agents(job):
    job.components.weights.sync(1)
    error, took_s = killed_while(job.generate, job.pid("queue"))
    assert isinstance(error, WorkerDiedError)
    assert str(error).startswith("a worker of pool 'queue', rank 0, died")
    assert took_s < 5


@pytest.mark.promise("A dead rollout replica is replaced, and a weight sync goes on without it")
def test_replicas_die_and_hang_in_weight_sync_and_generation(job):
    weights, servers = job.components.weights, job.components.weights.servers
    weights.sync(1)
    # A keeper is gone before it has joined the sync, and the sender waits for it.
    killer = threading.Timer(1.0, os.kill, (servers.hosts[0].where.pid, signal.SIGKILL))
    os.kill(servers.hosts[0].where.pid, signal.SIGSTOP)
    killer.start()
    start = time.monotonic()
    weights.sync(2)
    assert time.monotonic() - start < SOON_S
    until(lambda: len(servers.members) == 2, "the replica is replaced")
    weights.sync(3)
    assert len(weights.in_use) == 2
    # A server's process is stopped: it accepts connections, and answers none.
    stopped = weights.in_use[servers.members[0]].pid
    os.kill(stopped, signal.SIGSTOP)
    start = time.monotonic()
    generated = job.generate()
    assert len(generated.batch.tags) == 16
    weights.sync(4)
    assert time.monotonic() - start < HEARTBEAT_S + SOON_S
    until(lambda: len(servers.members) == 2, "the replica is replaced")
    news = "\n".join(servers.take_news())
    assert "gave no sign of life for heartbeat_s=6 s" in news
    assert f"process {stopped} is stopped (state T" in news
    # The same in the sync alone, which asks it after its health first.
    weights.sync(5)
    stopped = weights.in_use[servers.members[0]].pid
    os.kill(stopped, signal.SIGSTOP)
    start = time.monotonic()
    weights.sync(6)
    assert time.monotonic() - start < HEARTBEAT_S + SOON_S


def test_agent_workers_die_and_hang_while_they_generate(job):
    agents = job.components.agents.replica_set
    job.components.weights.sync(1)
    dead, stopped = (host.where.pid for host in agents.hosts)
    os.kill(stopped, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (dead, signal.SIGKILL)).start()
    os.kill(dead, signal.SIGSTOP)
    start = time.monotonic()
    generated = job.generate()
    assert time.monotonic() - start < HEARTBEAT_S + 2 * SOON_S
    assert len({tags["group_id"] for tags in generated.batch.tags}) == 4
    assert len(generated.batch.tags) == 16, "a rollout is missing, or there twice"
    news = "\n".join(agents.take_news())
    assert f"process {stopped} is stopped (state T" in news
    assert re.search(r"hung during (submit|poll): it gave no sign of life", news)


def test_a_stopped_engine_ends_the_wait_of_whoever_needs_it(job):
    job.components.weights.sync(1)
    pid = job.pid("engine")
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerHungError, match=f"(?s)pool 'engine', rank 0, hung during .*process {pid} is stopped"):
        job.components.weights.sync(2)
    assert time.monotonic() - start < HEARTBEAT_S + SOON_S
