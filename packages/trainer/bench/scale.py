"""What a training step costs the controller, with 64 to 1,024 engine ranks, 16 samples each, and up to 128 replicas.

Real: the loop, the source and its queue, dispatch over the ranks by the modes of `EngineWorker`, the deal over agent
workers, and the sync of weights with its replicas. Ranks, agents and servers are objects in this process that answer at
once; what they take themselves is measured and left out. The queue's part stands in rows of its own.
"""

import time
from dataclasses import replace
from functools import partial

from rl_bench import Run
from rl_ckpt.types import SyncReport
from rl_rollout.types import ServerAddress
from rl_tq.types import BatchMeta
from rl_trainer.config import load_config
from rl_trainer.loop import run_loop
from rl_trainer.metrics import Evaluation
from rl_trainer.pipeline.replicas import AgentReplicas
from rl_trainer.pipeline.weight_sync import WeightSync
from rl_trainer.pipeline.weight_transfer import GatheredTransfer
from rl_trainer.runtime.dispatch import Mesh, calls_of, join, spread
from rl_trainer.testing import FakeAgents, QueueJob
from rl_trainer.workers.engine import AdvantageReport, EngineWorker, UpdateReport
from rl_trainer.workers.rollout import Receivers

GROUP, GROUPS_PER_RANK, MINI_BATCHES = 8, 2, 2
RANKS, REPLICAS, AGENTS = (64, 256, 1024), {64: 8, 256: 32, 1024: 128}, 64


class Rank:
    """Answers as a rank of the policy does, with references."""

    def compute_log_prob(self, batch, column="old_logprobs"):
        return BatchMeta(partition=batch.partition, sample_ids=batch.sample_ids, columns=(column,))

    def compute_advantage(self, batch, kl_coef=0.0, seed=0):
        written = BatchMeta(partition=batch.partition, sample_ids=batch.sample_ids, columns=("advantages",))
        return AdvantageReport(batch=written)

    def update_actor(self, batch):
        return UpdateReport(metrics={"loss": 0.0, "policy_loss": 0.0}, grad_norm=1.0, lr=1e-3)

    def send_weights(self, version, num_receivers):
        nothing = dict.fromkeys(("export_s", "pack_s", "wire_s", "verify_s", "wall_s"), 0.0)
        return SyncReport(version=version, num_tensors=0, num_bytes=0, **nothing)


class Clock:
    """Seconds in what stands for others."""

    def __init__(self):
        self.seconds = 0.0

    def timed(self, function, *given, **named):
        start = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            self.seconds += time.perf_counter() - start


class Group:
    """The ranks behind the methods of one, by the dispatch that `EngineWorker` registers."""

    def __init__(self, num_ranks, ranks):
        self._mesh, self._ranks, self._clock = Mesh(num_ranks), [Rank() for _ in range(num_ranks)], ranks
        for name, call in calls_of(EngineWorker).items():
            setattr(self, name, partial(self._call, name, call))

    def _call(self, name, call, *given, **named):
        spreaded = spread(call, self._mesh, given, named)
        called = [(getattr(rank, name), own) for rank, own in zip(self._ranks, spreaded, strict=True) if own]
        answers = self._clock.timed(lambda: [method(*own[0], **own[1]) for method, own in called])
        return join(call, self._mesh, answers)


class Members:
    """A replica set whose members answer at once."""

    def __init__(self, num_members, answer, ranks):
        self.members, self._answer, self._clock = tuple(range(num_members)), answer, ranks

    def wait(self):
        return self.members

    def call(self, method, arguments):
        return self._clock.timed(self._answer, method.__name__, arguments)


def serve(name, arguments):
    """What a replica of the servers says."""
    answers = {
        "declare_receivers": lambda member: Receivers(1, None),
        "update_weights": lambda member: arguments[member][1],
        "address": lambda member: ServerAddress(url=f"http://{member}", model="m", pid=member),
    }
    return {member: answers[name](member) for member in arguments}


class ScaledJob(QueueJob):
    def __init__(self, config, num_ranks):
        self.others, self.of_queue = Clock(), Clock()
        self.fake = FakeAgents(config)
        super().__init__(config, self.fake, num_rows=1_000_000, poll_s=0.25)
        self.source.order.at(0)  # shuffles the epoch
        self.source.evaluate = lambda rows: Evaluation(reward=0.0, accuracy=None)
        agents = AgentReplicas(Members(AGENTS, self.roll_out, self.others), [])
        self.source._agents = agents
        self.source._queue = Timed(self.fake.queue, self.of_queue)
        self.actor = Group(num_ranks, self.others)
        transfer = GatheredTransfer(self.actor, "shm://policy")
        self.weights = WeightSync(self.actor, Members(REPLICAS[num_ranks], serve, self.others), agents, transfer)

    def roll_out(self, name, arguments):
        if name == "submit":
            self.fake.put({job.group_id: self.fake.version for jobs, *_ in arguments.values() for job in jobs})
        return {member: [] for member in arguments}

    def components(self):
        parts = replace(super().components(), actor=self.actor, weights=self)
        return replace(parts, queue=self.source._queue)

    def sync(self, version):
        self.fake.version = version
        return self.weights.sync(version)


class Timed:
    """A queue whose calls are timed; those of the agent workers go past it."""

    def __init__(self, queue, clock):
        self._queue, self._clock = queue, clock

    def __getattr__(self, name):
        return partial(self._clock.timed, getattr(self._queue, name))


def main(run: Run) -> None:
    steps = 3 if run.quick else 8
    run.parameters(steps=steps, groups_per_rank=GROUPS_PER_RANK, group_size=GROUP, mini_batches=MINI_BATCHES)
    for num_ranks in RANKS:
        batch = num_ranks * GROUPS_PER_RANK
        sizes = [f"batch.batch_size={batch}", f"batch.mini_batch_size={batch // MINI_BATCHES}"]
        sizes += [f"batch.group_size={GROUP}", f"engine.world_size={num_ranks}", f"steps={steps}", "eval_every=0"]
        config = load_config("quickstart", sizes)
        times, of_queue = [], []
        for _ in range(3 if run.quick else 7):
            job = ScaledJob(config, num_ranks)
            records = run_loop(job.components(), config, [])
            next(records)  # the first sync, before any step
            job.others.seconds = job.of_queue.seconds = 0.0
            start = time.perf_counter()
            for _ in records:
                pass
            seconds = time.perf_counter() - start - job.others.seconds
            of_queue.append(job.of_queue.seconds / steps * 1e3)
            times.append(seconds / steps * 1e3 - of_queue[-1])
        samples, replicas = batch * GROUP, REPLICAS[num_ranks]
        goal = "<= 100 ms" if num_ranks == RANKS[-1] else None
        run.record(
            f"controller, {num_ranks} ranks, {replicas} replicas, {samples} samples a step",
            "ours",
            times,
            unit="ms",
            goal=goal,
        )
        run.record(f"its claims, acks and clears, {num_ranks} ranks", "ours", of_queue, unit="ms")
