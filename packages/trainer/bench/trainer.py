"""What each pipeline makes of a long tail, with workers that answer when they are told to.

Completion lengths are drawn from a lognormal distribution, the same for every pipeline, on a server that
generates a fixed number of completions at a time. Training a batch takes as long as the server needs for it at full
use, so that no pipeline can be more than twice as fast as one that alternates without any tail. The note beside each
figure has the most that is possible with these very lengths: of one_step_off the longer of a batch's generation and
training, step by step; of fully_async the server at full use.
"""

import heapq
import random
import threading
import time

from packages.trainer.tests.support.stand_ins import FakeAgents, QueueJob

from rl_bench import Role, Run
from rl_trainer.config import load_config
from rl_trainer.loop import run_loop
from rl_trainer.metrics import Evaluation

BATCH, GROUP = 8, 4
WORK_S = 0.05  # that a batch takes the server at full use, and that training takes


def settings(*overrides, steps):
    sizes = [f"batch.batch_size={BATCH}", f"batch.mini_batch_size={BATCH}", f"batch.group_size={GROUP}"]
    return load_config("quickstart", [*sizes, f"steps={steps}", "eval_every=0", *overrides])


def lengths(sigma, num_slots):
    """Seconds of one completion after another."""
    draw, mean_s = random.Random(0), WORK_S * num_slots / (BATCH * GROUP)
    while True:
        yield draw.lognormvariate(-(sigma**2) / 2, sigma) * mean_s


def batches_of(sigma, num_slots, steps):
    seconds = lengths(sigma, num_slots)
    return [[next(seconds) for _ in range(BATCH * GROUP)] for _ in range(steps)]


def spans(sigma, num_slots, steps):
    """Seconds that the server needs for each batch, from the first completion's begin to the last one's end."""
    found = []
    for batch in batches_of(sigma, num_slots, steps):
        free = [0.0] * num_slots
        for length in batch:
            heapq.heappush(free, heapq.heappop(free) + length)
        found.append(max(free))
    return found


def most(sigma, num_slots, steps):
    """What one_step_off and fully_async could be at most, as a multiple of sync."""
    first, *rest = spans(sigma, num_slots, steps)
    sync = first + sum(rest) + steps * WORK_S
    one_off = first + sum(max(span, WORK_S) for span in rest) + WORK_S
    full = max(sum(map(sum, batches_of(sigma, num_slots, steps))) / num_slots, steps * WORK_S) + WORK_S
    return {"sync": 1.0, "one_step_off": sync / one_off, "fully_async": sync / full}


class SimulatedServer(FakeAgents):
    """Agent workers whose completions take a drawn time each on one of the slots of a server; a thread puts groups."""

    def __init__(self, config, sigma, num_slots):
        super().__init__(config)
        self._seconds = lengths(sigma, num_slots)
        self._free = [0.0] * num_slots
        self._ends, self._changed, self._is_closed = [], threading.Condition(), False
        self.busy_s, self._reports = 0.0, []
        self._thread = threading.Thread(target=self._put_as_they_end)
        self._thread.start()

    def submit(self, jobs, sampling_params, partition, group_size):
        now = time.perf_counter()
        for job in jobs:
            ends = []
            for _ in range(group_size):
                seconds = next(self._seconds)
                self.busy_s += seconds
                ends.append(max(now, heapq.heappop(self._free)) + seconds)
                heapq.heappush(self._free, ends[-1])
            with self._changed:
                heapq.heappush(self._ends, (max(ends), job.group_id, job, self.version))
                self._changed.notify()

    def poll(self):
        with self._changed:
            reports, self._reports = self._reports, []
        return reports

    def close(self):
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self.queue.close()

    def _put_as_they_end(self):
        while True:
            with self._changed:
                if self._is_closed:
                    return
                now, done = time.perf_counter(), []
                while self._ends and self._ends[0][0] <= now:
                    done.append(heapq.heappop(self._ends)[2:])
                if not done:
                    self._changed.wait(self._ends[0][0] - now if self._ends else None)
            reports = [self.put(job, version) for job, version in done]
            with self._changed:
                self._reports += reports


class SimulatedJob(QueueJob):
    def components(self):
        self.source.evaluate = lambda rows: Evaluation(reward=0.0, accuracy=None)
        return super().components()

    def update_actor(self, batch):
        time.sleep(WORK_S * len(batch) / (BATCH * GROUP))
        return super().update_actor(batch)

    def compute_log_prob(self, batch, column="old_logprobs"):
        time.sleep(WORK_S / 3 * len(batch) / (BATCH * GROUP))  # a forward pass
        return super().compute_log_prob(batch, column)


def main(run: Run) -> None:
    steps = 20 if run.quick else 40
    ahead = ["pipeline=fully_async", "algorithm.old_logprobs=rollout"]
    pipelines = {
        "sync": [],
        "one_step_off": ["pipeline=one_step_off"],
        **{f"fully_async, max_staleness={n}": [*ahead, f"staleness.max_staleness={n}"] for n in (1, 2, 4)},
    }
    run.parameters(steps=steps, batch_size=BATCH, group_size=GROUP, work_s=WORK_S)
    for sigma, num_slots in ((0.5, 32), (1.0, 32), (1.5, 32), (1.0, 8)):
        speeds, idle, ages = {}, {}, {}
        bounds = most(sigma, num_slots, steps)
        for name, overrides in pipelines.items():
            config = settings(*overrides, steps=steps)
            server = SimulatedServer(config, sigma, num_slots)
            job = SimulatedJob(config, server, poll_s=0.25)
            start = time.perf_counter()
            records = list(run_loop(job.components(), config, []))
            seconds = time.perf_counter() - start
            server.close()
            speeds[name] = steps * BATCH * GROUP / seconds
            idle[name] = 1.0 - server.busy_s / num_slots / seconds
            ages[name] = sum(r.metrics.get("staleness_mean", 0.0) for r in records[1:]) / steps
        goals = {"one_step_off": ">= 1.3 of best peer", "fully_async, max_staleness=2": ">= 2.2 of best peer"}
        for name, speed in speeds.items():
            run.record(
                f"long tail, lognormal, sigma {sigma}, {num_slots} slots",
                name,
                [speed],
                unit="completions/s",
                role=Role.PEER if name == "sync" else Role.OURS,
                goal=goals.get(name),
                note=f"server idle {idle[name]:.0%}, mean age {ages[name]:.2f}, "
                f"at most {bounds[name.partition(',')[0]]:.2f} of sync",
            )
