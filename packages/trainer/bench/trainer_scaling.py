"""What a fully asynchronous step costs the controller per sample, with 8 to 512 agent workers that answer at once.

Every worker has the same share of a batch, so that the batch grows with the workers: dealing jobs, asking every worker,
choosing groups, references and mini-batches are all there; generation, training and transport are not. What the workers
that stand in for real ones take to make their answers up is measured and left out.
"""

import statistics
import time
from dataclasses import replace

from rl_bench import Run
from rl_tq.types import BatchMeta
from rl_trainer.config import load_config
from rl_trainer.data import PromptOrder
from rl_trainer.loop import run_fully_async
from rl_trainer.replicas import AgentReplicas
from rl_trainer.rollout_source import RolloutManager
from rl_trainer.testing import FakeJob
from rl_trainer.workers.agent import GenerateReport

GROUPS_PER_WORKER, GROUP = 2, 8
SIZES = (8, 64, 512)


class AnsweringReplicas:
    """Agent workers whose groups are finished when they are asked for."""

    def __init__(self, num_members):
        self.members, self.version = tuple(range(num_members)), 0
        self._jobs = {member: [] for member in self.members}
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
        if method.__name__ == "evaluate":
            return {member: [] for member in arguments}
        if method.__name__ == "submit":
            for member, (jobs, *_) in arguments.items():
                self._jobs[member] += jobs
            return {member: [] for member in arguments}
        return {member: [self._report(member)] for member in arguments}

    def _report(self, member):
        jobs, self._jobs[member] = self._jobs[member], []
        about = {"num_tokens": 1, "finish_reason": "stop", "attempt": 0}
        about |= {"weight_version_min": self.version, "weight_version_max": self.version}
        tags = tuple({**about, "group_id": job.group_id, "reward": i % 2} for job in jobs for i in range(GROUP))
        ids = tuple(f"{job.group_id}-{i}" for job in jobs for i in range(GROUP))
        batch = BatchMeta(partition="train", sample_ids=ids, columns=(), tags=tags) if jobs else None
        return GenerateReport(batch=batch, complete_groups=tuple(job.group_id for job in jobs))


class ScaledJob(FakeJob):
    def __init__(self, config, num_workers):
        super().__init__(config)
        self.replica_set = AnsweringReplicas(num_workers)
        self.agents = AgentReplicas(self.replica_set, [])
        order = PromptOrder(num_rows=100_000, seed=0)
        order.at(0)  # shuffles the epoch
        self.manager = RolloutManager(self.agents, [{}] * 100_000, order, config)
        self.manager.evaluate = lambda rows: 0.0

    def components(self):
        return replace(super().components(), agents=self.agents, rollout_manager=self.manager)

    def sync(self, version):
        self.replica_set.version = version
        return super().sync(version)


def main(run: Run) -> None:
    steps = 4 if run.quick else 10
    run.parameters(steps=steps, groups_per_worker=GROUPS_PER_WORKER, group_size=GROUP)
    smallest = 0.0
    for num_workers in SIZES:
        batch = num_workers * GROUPS_PER_WORKER
        sizes = [f"batch.batch_size={batch}", f"batch.mini_batch_size={batch}", f"batch.group_size={GROUP}"]
        how = ["pipeline=fully_async", "staleness.max_staleness=1", f"steps={steps}", "eval_every=0"]
        config = load_config("quickstart", [*how, *sizes])
        times = []
        for _ in range(3 if run.quick else 7):
            job = ScaledJob(config, num_workers)
            start = time.perf_counter()
            for _ in run_fully_async(job.components(), config, []):
                pass
            times.append((time.perf_counter() - start - job.replica_set.busy_s) / steps * 1e3)
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
