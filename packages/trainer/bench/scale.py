"""What a step costs the controller with 64 to 1,024 engine ranks, and how near the schedule simulator is to real runs.

Of the controller are real: the loop, the source and its queue, dispatch over the ranks by the modes of `EngineWorker`,
the deal over agent workers, and the sync of weights with its replicas. Ranks (16 samples each), agents and up to 128
servers are objects in this process that answer at once; what they take themselves is measured and left out. The
queue's part stands in rows of its own.

The simulator is given the rates of a synchronous run and foretells the other schedules. These are run then, on Ray in
their own processes, engine and server on one thread each. The two cores share memory and whatever else is at work: how
much slower both are while both work is measured by two synchronous runs side by side, not taken from what is foretold.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from packages.trainer.tests.support.stand_ins import FakeAgents, QueueJob

from rl_bench import Run
from rl_ckpt.types import SyncReport
from rl_engine.testing import write_tiny_model
from rl_rollout.types import ServerAddress
from rl_tq.types import BatchMeta
from rl_trainer.commands.simulate import read_rates, simulate
from rl_trainer.config import load_config
from rl_trainer.loop import run_loop
from rl_trainer.metrics import Evaluation
from rl_trainer.pipeline.replicas import AgentReplicas
from rl_trainer.pipeline.weight_sync import WeightSync
from rl_trainer.pipeline.weight_transfer import GatheredTransfer
from rl_trainer.runtime.dispatch import Mesh, calls_of, join, spread
from rl_trainer.workers.engine_worker import AdvantageReport, EngineWorker, UpdateReport
from rl_trainer.workers.rollout import Receivers

GROUP, GROUPS_PER_RANK, MINI_BATCHES = 8, 2, 2
RANKS, REPLICAS, AGENTS = (64, 256, 1024), {64: 8, 256: 32, 1024: 128}, 64

WIDTHS = {"hidden_size": 192, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 6}
HERE = Path(__file__).parent
REAL = [
    "quickstart", "data.format=_letters.py:Letters", "data.options={}", "data.eval_size=4", "data.max_prompt_tokens=96",
    "reward.path=_letters.py:share_of_even", "eval_every=0", "batch.batch_size=8", "batch.mini_batch_size=8",
    "rollout.max_new_tokens=64", "rollout.max_model_len=160", "rollout.max_num_seqs=16", "rollout.num_threads=1",
    "tracking.keep_samples=true",
]  # fmt: skip
SCHEDULES = {
    "sync": ["pipeline=sync"],
    "one_step_off": ["pipeline=one_step_off"],
    "fully_async": ["pipeline=fully_async", "staleness.max_staleness=2"],
}
UNSTEADY = 4
"""Steps at the beginning that are not counted, and at the end, where nothing is generated ahead any more."""
DEADLINE_S = 900.0
"""Of a run."""


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
        spread_out = spread(call, self._mesh, given, named)
        called = [(getattr(rank, name), own) for rank, own in zip(self._ranks, spread_out, strict=True) if own]
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
        self.fake, self.reports = FakeAgents(config), []
        super().__init__(config, self.fake, num_rows=1_000_000, poll_s=0.25)
        self.source.order.at(0)  # shuffles the epoch
        self.source.evaluate = lambda rows: Evaluation(reward=0.0, accuracy=None)
        agents = AgentReplicas(Members(AGENTS, self.roll_out, self.others), {})
        self.source._agents = agents
        self.source._queue = Timed(self.fake.queue, self.of_queue)
        self.actor = Group(num_ranks, self.others)
        transfer = GatheredTransfer(self.actor, "shm://policy")
        self.weights = WeightSync(self.actor, Members(REPLICAS[num_ranks], serve, self.others), agents, transfer)

    def roll_out(self, name, arguments):
        if name == "submit":
            jobs = [job for jobs, *_ in arguments.values() for job in jobs]
            self.reports += [self.fake.put(job, self.fake.version) for job in jobs]
        reports, self.reports = (self.reports, []) if name == "poll" else ([], self.reports)
        return {member: reports if member == min(arguments) else [] for member in arguments}

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


def launch(model, folder, steps, schedule):
    """A real run, with one thread for the engine and one for the server."""
    command = [sys.executable, "-m", "rl_trainer.cli", *REAL, f"steps={steps}", f"model.path={model}"]
    command += [f"output_dir={folder}", *SCHEDULES[schedule]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=HERE, env=environment, stdout=subprocess.DEVNULL)


def step_seconds(process, folder):
    """Seconds of each step of a run, after its end."""
    try:
        code = process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # which ends what it has started
        raise
    if code:
        raise RuntimeError(f"the run of {folder} ended with exit code {code}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [sum(record["phase_s"].values()) for record in records if record["num_tokens"]][UNSTEADY:-UNSTEADY]


def simulator(run: Run) -> None:
    """Record a step of each schedule, simulated and real, and by how much they differ."""
    steps = 16 if run.quick else 40
    run.parameters(real_steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = write_tiny_model(root / "model", num_hidden_layers=4, **WIDTHS)
        real = {name: step_seconds(launch(model, root / name, steps, name), root / name) for name in SCHEDULES}
        pair = [root / "one", root / "other"]
        beside = [step_seconds(*each) for each in [(launch(model, out, steps, "sync"), out) for out in pair]]
        overlap = min(1.0, fmean(real["sync"]) / fmean(map(fmean, beside)))
        rates = read_rates({"run": str(root / "sync"), "overlap": str(overlap)})
        run.record("speed beside another run, of that alone", "real", [overlap], unit="x")
        for name, seconds in real.items():
            foretold = simulate(load_config(str(root / name / "config.yaml")), rates).step_s
            run.record(f"step, {name}", "real", seconds, unit="s", note=f"mean {fmean(seconds):.3g} s")
            run.record(f"step, {name}", "simulated", [foretold], unit="s")
            apart = abs(foretold / fmean(seconds) - 1) * 100
            run.record(f"simulated and real step apart, {name}", "simulator", [apart], unit="%", goal="<= 10 %")


def main(run: Run) -> None:
    controller(run)
    simulator(run)


def controller(run: Run) -> None:
    """Record the controller's part of a step."""
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
