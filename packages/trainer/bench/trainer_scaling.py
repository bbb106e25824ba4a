"""What a fully asynchronous step costs the controller per sample, with 8 to 512 agent workers that answer at once.

Every worker has the same share of a batch, so that the batch grows with the workers: dealing jobs, asking every worker,
claiming rows from a queue, choosing groups, references and mini-batches are all there; generation, training and
transport are not. What the workers that stand in for real ones take to put their rows is measured and left out, and the
queue's own part stands in rows of its own.
"""

import statistics
import time

from rl_bench import Run
from rl_trainer.config import load_config
from rl_trainer.loop import run_loop
from rl_trainer.metrics import Evaluation
from rl_trainer.pipeline.replicas import AgentReplicas
from rl_trainer.testing import FakeAgents, QueueJob

GROUPS_PER_WORKER, GROUP = 2, 8
SIZES = (8, 64, 512)


class AnsweringReplicas:
    """Agent workers whose groups are in the queue as soon as they are submitted."""

    def __init__(self, config, num_members):
        self.members, self.fake = tuple(range(num_members)), FakeAgents(config)
        self.busy_s = 0.0

    def wait(self):
        return self.members

    def call(self, method, arguments):
        start = time.perf_counter()
        try:
            return self._answer(method, arguments)
        finally:
            self.busy_s += time.perf_counter() - start

    def _answer(self, method, arguments):
        if method.__name__ == "submit":
            self.fake.put({job.group_id: self.fake.version for jobs, *_ in arguments.values() for job in jobs})
        return {member: [] for member in arguments}


class TimedQueue:
    """A queue whose calls are timed; those of the agent workers go past it."""

    def __init__(self, queue):
        self._queue, self.seconds = queue, 0.0

    def __getattr__(self, name):
        method = getattr(self._queue, name)

        def timed(*given, **named):
            start = time.perf_counter()
            try:
                return method(*given, **named)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


class ScaledJob(QueueJob):
    def __init__(self, config, num_workers):
        self.replica_set = AnsweringReplicas(config, num_workers)
        fake = self.replica_set.fake
        super().__init__(config, fake, num_rows=100_000, poll_s=0.25)
        self.source.order.at(0)  # shuffles the epoch
        self.source.evaluate = lambda rows: Evaluation(reward=0.0, accuracy=None)
        self.source._agents = AgentReplicas(self.replica_set, [])
        self.source._queue = self.queue = TimedQueue(fake.queue)


def main(run: Run) -> None:
    steps = 4 if run.quick else 10
    run.parameters(steps=steps, groups_per_worker=GROUPS_PER_WORKER, group_size=GROUP)
    smallest = 0.0
    for num_workers in SIZES:
        batch = num_workers * GROUPS_PER_WORKER
        sizes = [f"batch.batch_size={batch}", f"batch.mini_batch_size={batch}", f"batch.group_size={GROUP}"]
        how = ["pipeline=fully_async", "staleness.max_staleness=1", f"steps={steps}", "eval_every=0"]
        config = load_config("quickstart", [*how, *sizes])
        times, of_queue = [], []
        for _ in range(3 if run.quick else 7):
            job = ScaledJob(config, num_workers)
            start = time.perf_counter()
            for _ in run_loop(job.components(), config, []):
                pass
            seconds = time.perf_counter() - start - job.replica_set.busy_s
            times.append((seconds - job.queue.seconds) / steps * 1e3)
            of_queue.append(job.queue.seconds / steps * 1e3)
        per_sample = statistics.median(times) / (batch * GROUP) * 1e3
        smallest = smallest or per_sample
        run.record(
            f"controller, {num_workers} workers, {batch * GROUP} samples a step",
            "ours",
            times,
            unit="ms",
            goal="<= 50 ms" if num_workers == SIZES[-1] else None,
            note=f"{per_sample:.1f} us a sample, {per_sample / smallest:.2f} of that with {SIZES[0]} workers",
        )
        run.record(f"its claims, acks and clears, {num_workers} workers", "ours", of_queue, unit="ms")
