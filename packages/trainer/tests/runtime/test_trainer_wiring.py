"""What the components of a job are made with, and where pipelines find them; nothing real starts but the queue."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_rollout.types import Capabilities, ServerAddress
from rl_trainer.checkpoints import RunState
from rl_trainer.config import load_config
from rl_trainer.data import load_datasets
from rl_trainer.metrics import HeldGroup
from rl_trainer.pipeline.replicas import SomeSamples
from rl_trainer.runtime.inline import InlineRuntime
from rl_trainer.setup import place
from rl_trainer.workers.agent import AgentWorker
from rl_trainer.workers.critic import CriticWorker, ProcessRewardWorker
from rl_trainer.workers.engine_worker import EngineWorker
from rl_trainer.workers.queue import QueueWorker, SampleWorker
from rl_trainer.workers.reference import ReferenceWorker
from rl_trainer.workers.rollout import RolloutWorker


class Group(SimpleNamespace):
    """Stands for placed workers: what they were made with, and whether they were told to offload."""

    is_offloaded = False

    def offload(self):
        self.is_offloaded = True


class Members:
    """Stands for a replica set."""

    members = (0, 1)

    def __init__(self, answers):
        self.answers, self.calls = answers, []

    def wait(self):
        return self.members

    def call(self, method, arguments):
        self.calls.append(method.__name__)
        given = self.answers.get(method.__name__, lambda member, *own: None)
        return {member: given(member, *own) for member, own in arguments.items()}


class Placed(InlineRuntime):
    def __init__(self, *, num_seeded=2):
        super().__init__()
        self.made, self.num_seeded = {}, num_seeded

    def create_group(self, worker, pool, **kwargs):
        if worker is QueueWorker:
            return super().create_group(worker, pool, **kwargs)
        assert worker not in self.made or worker is ReferenceWorker
        self.made[worker] = Group(worker=worker, pool=pool, **kwargs)
        return self.made[worker]

    def create_replicas(self, worker, pool, *, owns_pool=True, **kwargs):
        answers = {
            "address": lambda member: ServerAddress(url=f"http://{member}", model="m", pid=member),
            "capabilities": lambda member: Capabilities(is_seeded=member < self.num_seeded),
            "prompt_lengths": lambda member, rows: [1] * len(rows),
        }
        self.made[worker] = SimpleNamespace(pool=pool, owns_pool=owns_pool, **kwargs)
        return Members(answers)


@pytest.fixture
def placed(tmp_path):
    """Places a job of `overrides`; returns its components and what was made."""
    runtimes = []

    def start(*overrides, state=None, **options):
        sizes = ["data.options.num_rows=20", "data.eval_size=4", "queue_storage=inproc", "weights_transport=inproc"]
        sizes += ["runtime=inline", "timeout_s=77", f"name=job-{len(runtimes)}"]
        config = load_config("quickstart", [*sizes, *overrides])
        runtimes.append(Placed(**options))
        datasets = load_datasets(config.data, seed=0)
        state = RunState(seed=0, num_rows=16) if state is None else state
        return place(config, runtimes[-1], Path("policy"), datasets, state, output_dir=tmp_path), runtimes[-1].made

    yield start
    for runtime in runtimes:
        runtime.stop()


def test_a_plain_job_has_only_its_policy_and_servers(placed):
    components, made = placed()
    assert set(made) == {EngineWorker, RolloutWorker, AgentWorker}
    actor = made[EngineWorker]
    assert components.actor is actor
    assert actor.config.model_path == "policy"
    assert actor.config.optimizer is not None
    told = components.weights._transfer.addresses([0, 1])
    assert told == dict.fromkeys((0, 1), actor.weights_address), "these servers take whole tensors"
    agents = made[AgentWorker]
    assert [address.url for address in agents.servers[""]] == ["http://0", "http://1"]
    assert not agents.has_baseline
    assert {each.timeout_s for each in made.values()} == {77}
    assert {each.queue_address for each in (actor, agents)} == {components.queue.address}
    assert isinstance(components.samples, SomeSamples), "which an agent worker writes"
    nothing = ("reference", "ema_reference", "teacher", "critic", "replay")
    assert {getattr(components, name) for name in nothing} == {None}
    assert "seed" in components.source.sampling("1/0")


@pytest.mark.process
def test_each_requested_component_is_where_pipelines_look_for_it(placed, tmp_path):
    keys = ["algorithm.kl_coef=0.1", "algorithm.ref_ema.decay=0.5", "algorithm.advantage=gae", "critic.clip=0.3"]
    components, made = placed(*keys, "tracking.keep_samples=true", "batch.replay.share=0.5", num_seeded=1)
    assert components.reference is made[ReferenceWorker]
    assert components.reference.config.optimizer is None
    assert components.reference.weights_address is None
    assert components.ema_reference is not None
    assert components.critic is made[CriticWorker]
    assert components.critic.loss.clip == 0.3
    assert components.samples is made[SampleWorker]
    assert Path(components.samples.folder).parent == tmp_path
    assert components.replay is not None
    assert "seed" not in components.source.sampling("1/0"), "one of the servers cannot be seeded"
    components, made = placed("algorithm.advantage=prime", "critic.lr=1e-2")
    assert components.critic is made[ProcessRewardWorker]
    assert components.reference is made[ReferenceWorker], "prime compares with the start policy"
    assert placed("algorithm.advantage=remax")[1][AgentWorker].has_baseline
    adapted, _ = placed("algorithm.kl_coef=0.1", "engine.lora.rank=4")
    assert adapted.reference is adapted.actor


@pytest.mark.process
def test_a_teacher_is_an_engine_or_a_client_of_a_server(placed):
    components, made = placed("teacher.path=large", "teacher.divergence=mixed", "teacher.num_candidates=5")
    assert components.teacher is made[ReferenceWorker]
    assert (components.teacher.config.model_path, components.teacher.config.num_candidates) == ("large", 5)
    assert made[EngineWorker].teacher == components.teacher.teacher
    components, made = placed("teacher.path=large", "teacher.url=http://there")
    assert components.teacher is None, "agent workers ask it"
    assert made[AgentWorker].config.teacher.url == "http://there"
    assert ReferenceWorker not in made


@pytest.mark.process
def test_colocated_parts_leave_the_memory_to_the_servers(placed):
    keys = ["rollout.colocated=true", "algorithm.kl_coef=0.1", "algorithm.advantage=gae", "critic.lr=1e-3"]
    components, made = placed(*keys)
    assert components.weights.servers.calls[0] == "sleep"
    assert (made[RolloutWorker].pool, made[RolloutWorker].owns_pool) == ("engine", False)
    assert [each.is_offloaded for each in (components.actor, components.reference, components.critic)] == [
        False,
        True,
        True,
    ]
    apart, made = placed(*keys[1:])
    assert "sleep" not in apart.weights.servers.calls
    assert (made[RolloutWorker].pool, made[RolloutWorker].owns_pool) == ("rollout", True)
    assert not apart.critic.is_offloaded


def test_a_resumed_job_continues_prompts_and_group_numbers(placed):
    held = HeldGroup(group_id=41, row_index=3, place=0, released=2)
    state = RunState(seed=0, num_rows=16, position=9, pending=(7, 5), held=(held,))
    components, _ = placed(state=state)
    assert components.held == (held,)
    source, jobs = components.source, []
    components.agents.submit = lambda some, *_: jobs.extend(some)
    source.release(3)
    assert [(job.row_index, job.group_id) for job in jobs[:2]] == [(7, 42), (5, 43)]
    assert source.position == 9 + len(jobs) - 2
