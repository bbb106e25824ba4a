"""Roles in pools of their own (`placement`): what is planned, what is refused, and runs whose losses stay the same."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from rl_engine import create_engine
from rl_rollout.testing import write_tiny_model
from rl_tq import BatchMeta
from rl_trainer.commands.simulate import forecast, node_facts
from rl_trainer.config import load_config
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.loop import score
from rl_trainer.metrics import PhaseTimer
from rl_trainer.pipeline.roles import critic_config, frozen_config, model_facts
from rl_trainer.planning import gpus
from rl_trainer.planning.gpus import check_gpus, placement_facts, pools_of, resource_pools
from rl_trainer.planning.memory import memory_of_pools, memory_plan, stored_parameters
from rl_trainer.planning.plan import make_plan
from rl_trainer.planning.preflight import check_engines
from rl_trainer.run import run
from rl_trainer.setup import scoring_pools

GIB = 2**30
KL = "algorithm.kl_coef=0.1"
FROZEN = ["placement.reference.pool=frozen", "placement.reference.num_gpus=2"]
CRITIC = ["algorithm.advantage=gae", "critic.lr=1e-5", "algorithm.kl_coef=0.1"]
CLASSIFIER = "reward.parts={liked: {kind: classifier, model: {path: there}}}"
RATES = {"replica_tokens_per_s": "4000", "sequence_tokens_per_s": "60", "update_tokens_per_s": "20000"}
RATES |= {"mean_tokens": "400"}


def pools(*overrides):
    return {pool.name: (pool.num_workers, pool.num_gpus, pool.roles) for pool in pools_of(of(*overrides))}


def of(*overrides):
    return load_config("quickstart", [*overrides])


def test_every_role_is_in_the_policy_pool_unless_set_otherwise():
    assert pools(*CRITIC, "engine.world_size=4", "rollout.parallel.tp=2") == {
        "engine": (4, 1, ("policy", "reference", "critic")),
        "rollout": (1, 2, ("rollout",)),
        "agent": (1, 0, ("agent workers",)),
        "queue": (1, 0, ("queue",)),
    }
    apart = pools(*CRITIC, *FROZEN, "engine.world_size=4", "placement.critic.pool=value", "rollout.colocated=true")
    assert apart == {
        "engine": (4, 1, ("policy", "rollout")),
        "frozen": (2, 1, ("reference",)),
        "value": (4, 1, ("critic",)),  # as many as the policy has
        "agent": (1, 0, ("agent workers",)),
        "queue": (1, 0, ("queue",)),
    }
    together = pools(*CRITIC, *FROZEN, "placement.critic.pool=frozen", "rollout.colocated=true")
    assert together["frozen"] == (2, 1, ("reference", "critic"))


@pytest.mark.parametrize(
    ("overrides", "pool", "size"),
    [
        ([], "reward", 1),
        (["rollout.colocated=true", "engine.world_size=2"], "engine", 2),
        (["rollout.colocated=true", "placement.reward.pool=judges"], "judges", 1),
        ([KL, *FROZEN, "placement.reward.pool=frozen"], "frozen", 2),
        (["placement.reward.pool=engine"], "engine", 1),
    ],
)
def test_reward_models_are_apart_or_share_a_pool(overrides, pool, size):
    found = {name: each for name, each in pools(CLASSIFIER, *overrides).items() if "reward" in each[2]}
    assert {name: each[0] for name, each in found.items()} == {pool: size}


def test_an_engine_is_built_from_the_keys_of_its_role():
    own = "placement.reference.engine={backend: megatron, precision: bfloat16, parallel: {tp: 2}}"
    config = of(*CRITIC, *FROZEN, own, "placement.critic.engine.max_tokens_per_gpu=999")
    reference, critic = frozen_config(config, "reference", Path("m")), critic_config(config, config.critic, Path("m"))
    assert (reference.precision, reference.parallel.tp, reference.max_tokens_per_gpu) == (
        "bfloat16",
        2,
        config.engine.max_tokens_per_gpu,
    )
    assert (critic.precision, critic.parallel.tp, critic.max_tokens_per_gpu) == ("float32", 1, 999)
    assert critic.optimizer.lr == 1e-5


def test_agents_and_queue_choose_nodes_and_cpus():
    """By a Ray resource; the plan says so, and a run of one process has nothing to choose."""
    keys = ["placement.agent={num_cpus: 4, resource: scorers}", "placement.queue.resource=books"]
    config = of(*keys, "agent.num_workers=2", "runtime=ray")
    agent, queue = (pool for pool in resource_pools(config) if pool.name in ("agent", "queue"))
    assert (agent.num_workers, agent.num_cpus, agent.resource) == (2, 4, "scorers")
    assert (queue.num_workers, queue.num_cpus, queue.resource) == (1, 1, "books")
    told = dict(placement_facts(config, {}, gpus=0))
    assert (
        told["pool agent"] == "2 processes of 4 CPUs each on CPUs of nodes with the Ray resource scorers: agent workers"
    )


@pytest.mark.promise("A placement that cannot be is refused in one sentence")
@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        (["placement.actor.pool=a"], ConfigError, "unknown configuration key placement.actor; the nearest one is"),
        ([KL, "placement.reference.engine.world_size=2"], ConfigError, "unknown configuration key placement.reference"),
        (["placement.agent.num_cpus=0"], ConfigError, "placement.agent.num_cpus: Input should be greater than 0"),
        (["placement.agent.resource=CPU"], PlanError, "resource=CPU is every node's; name one that only some"),
        (["placement.queue.num_cpus=2", "runtime=inline"], PlanError, "placement.queue does nothing with runtime=inl"),
        (["placement.reference.pool=frozen"], PlanError, "placement.reference does nothing unless there is a KL pen"),
        ([KL, "engine.lora.rank=2", *FROZEN], PlanError, "the policy is not an adapter, its own reference"),
        (["placement.critic.pool=frozen"], PlanError, "placement.critic does nothing unless a key of critic is set"),
        (["placement.teacher.pool=frozen"], PlanError, "placement.teacher does nothing unless there is a teacher"),
        (["placement.reward.pool=frozen"], PlanError, "placement.reward does nothing unless reward.parts has"),
        ([KL, "placement.reference.num_gpus=2"], PlanError, "num_gpus=2 does nothing in the policy.s pool"),
        ([KL, "placement.reference.pool=queue"], PlanError, "pool='queue' cannot be: .* agent, queue, rollout are"),
        ([KL, "placement.reference.pool=a b"], PlanError, "pool='a b' cannot be: a pool has a name of letters"),
        (
            [*CRITIC, *FROZEN, "placement.critic.pool=frozen", "placement.critic.num_gpus=3"],
            PlanError,
            "placement.reference.num_gpus=2 and placement.critic.num_gpus=3 are of the same pool 'frozen'",
        ),
        (
            [KL, *FROZEN, "placement.reference.engine.parallel.tp=4"],
            PlanError,
            "the reference has 2 processes in pool 'frozen', which is not a multiple of .* 4 x 1 x 1; set placement",
        ),
        (
            [KL, "placement.reference.pool=frozen", "placement.reference.num_gpus=1", "engine.parallel.tp=2",
             "engine.world_size=2"],
            PlanError,
            "the reference has 1 processes .* 2 x 1 x 1; set placement.reference.engine.parallel",
        ),
        ([KL, *FROZEN, "runtime=inline"], PlanError, "placement.reference.num_gpus=2 needs its own processes"),
        (
            [*CRITIC, "placement.critic.pool=v", "placement.critic.num_gpus=3", "batch.mini_batch_size=4",
             "batch.group_size=4", "batch.batch_size=4"],
            PlanError,
            "= 16 rows does not divide over the 3 data-parallel ranks of placement.critic.num_gpus=3",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_refused_in_one_sentence(overrides, error, words):
    with pytest.raises(error, match=words):
        make_plan(of(*overrides))


@pytest.mark.process
def test_unavailable_gpus_and_layouts_are_refused(monkeypatch, model):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(gpus, "local_gpus", lambda: 8)
    config = of(KL, *FROZEN, "engine.world_size=4", "rollout.num_replicas=4", "batch.mini_batch_size=4")
    with pytest.raises(PlanError, match=r"asks for 10 GPUs \(engine 4, frozen 2, rollout 4\), and this machine has 8"):
        check_gpus(
            gpus.settle(of(KL, *FROZEN, "engine.world_size=4", "rollout.num_replicas=4", "rollout.colocated=false"))
        )
    assert gpus.settle(config).rollout.colocated  # 6 of 8 then
    assert sum(pool.num_workers * pool.num_gpus for pool in resource_pools(gpus.settle(config))) == 6
    monkeypatch.setattr(gpus, "local_gpus", lambda: 5)
    with pytest.raises(PlanError, match="the pools of placement ask for engine 4, frozen 2 without them"):
        check_gpus(gpus.settle(config))
    fits = of(KL, *FROZEN, "placement.reference.engine={backend: megatron, parallel: {tp: 2}}", f"model.path={model}")
    check_engines(fits, Path(model), is_made=True)
    wrong = of(KL, *FROZEN, "placement.reference.engine.parallel.pp=2", f"model.path={model}")
    with pytest.raises(ConfigError, match="engine.backend=fsdp cannot be used for the reference: "):
        check_engines(wrong, Path(model), is_made=True)


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_the_plan_has_every_pool_with_gib_per_role(tmp_path, precision):
    folder = write_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    own = [f"model.path={folder}", *FROZEN, f"placement.reference.engine.precision={precision}"]
    config = of(*CRITIC, *own, "rollout.colocated=false")
    engine = create_engine("fsdp", frozen_config(config, "reference", folder))
    engine.initialize()
    held = sum(parameter.nbytes for parameter in engine.parts.built.scorer.model.parameters())
    engine.close()
    plan = memory_plan(config, model_facts(folder).config, num_parameters=stored_parameters(folder))
    assert round(plan.others["frozen"]["reference"] * GIB) == held // 2, "of one of two ranks"
    assert round(plan.engine["critic"] * GIB) == 16 * stored_parameters(folder)
    told = dict(placement_facts(config, memory_of_pools(config), gpus=8))
    assert told["pool engine"].startswith("1 process of 1 GPU: policy 0.")
    assert told["pool frozen"] == "2 processes of 1 GPU: reference 0.0 GiB"
    assert told["pool queue"] == "1 process on CPUs of any node: queue"
    assert dict(placement_facts(config, {}, gpus=0))["pool rollout"] == (
        "1 process (of 1 GPU each where there are GPUs): rollout"
    )


@pytest.mark.process
def test_a_pool_without_enough_gpus_is_refused_with_its_key(tmp_path):
    sizes = {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8}
    sizes |= {"intermediate_size": 27648, "vocab_size": 152_064, "model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    place = ["placement.reference.pool=frozen", "placement.reference.num_gpus="]
    overrides = ["data.path=there", f"model.path={tmp_path}", KL, place[0]]
    told = dict(forecast(load_config("qwen2.5-32b", [*overrides, f"{place[1]}2"]), RATES | {"cluster": "3x8x80"}))
    assert told["memory, pool frozen"] == "30.5 GiB: reference 30.5"
    assert told["GPUs"].startswith("24 for engine 16, frozen 2, rollout 16: in turn; 6 idle")
    assert "reference 30.5 GiB" in told["pool frozen"]
    wide = "placement.reference.engine.precision=float32"
    with pytest.raises(
        PlanError, match=r"a GPU of pool frozen takes 122.1 GiB .* raise placement.reference.num_gpus=1"
    ):
        forecast(load_config("qwen2.5-32b", [*overrides, f"{place[1]}1", wide]), RATES | {"cluster": "3x8x80"})


@pytest.mark.promise("A plan says node by node who lives on which GPU, with GiB, and refuses what has no node")
def test_the_plan_says_who_lives_on_which_gpu_of_which_node():
    own = ["engine.world_size=10", "rollout.colocated=false", "rollout.num_replicas=2", "batch.mini_batch_size=4"]
    config = of(KL, *FROZEN, *own, "rollout.parallel.tp=4", "rollout.backend=vllm")
    memory = {"engine": {"policy": 12.34}, "frozen": {"reference": 1.0}, "rollout": {"rollout": 5.0}}
    assert node_facts(config, memory, num_nodes=4, gpus_per_node=8) == [
        ("node 0", "GPUs 0-7: policy 12.3 GiB"),
        ("node 1", "GPUs 0-1: policy 12.3 GiB; GPUs 2-3: reference 1.0 GiB; GPUs 4-7: rollout 5.0 GiB"),
        ("node 2", "GPUs 0-3: rollout 5.0 GiB"),
        ("node 3", "idle"),
    ]
    shared = of("engine.world_size=16", "rollout.colocated=true", "rollout.num_replicas=16")
    assert node_facts(shared, {}, num_nodes=2, gpus_per_node=8) == [("nodes 0-1", "GPUs 0-7: policy, rollout")]
    scattered = of(*own, "engine.world_size=10", "rollout.parallel.tp=7", "rollout.backend=vllm")
    words = (
        "no node has 7 GPUs left for a process of pool 'rollout': 8, 2, 7 of 8 are taken on 3 nodes; take more nodes"
    )
    with pytest.raises(PlanError, match=words):
        node_facts(scattered, {}, num_nodes=3, gpus_per_node=8)


class Scorer:
    """An engine that scores once as many others do as `together` has parties."""

    def __init__(self, told, together=None):
        self.told, self.together = told, together

    def compute_log_prob(self, batch, column="old_logprobs"):
        if self.together is not None:
            self.together.wait(30)
        self.told.append(column)
        return BatchMeta(partition=batch.partition, sample_ids=batch.sample_ids, columns=(column,))

    def compute_values(self, batch):
        return self.compute_log_prob(batch, "values")

    def compute_stage(self, batch, name):
        assert {"old_logprobs", "ref_logprobs", "values"} <= {*batch.columns}, "it may read all of them"
        return self.compute_log_prob(batch, name)

    def collect(self):
        pass


@pytest.mark.promise("Roles in pools of their own score at the same time")
def test_pools_score_concurrently_and_stages_of_one_in_turn():
    apart = ["placement.reference.pool=frozen", "placement.critic.pool=value", "algorithm.stages=[mine]"]
    apart += ["algorithm.old_logprobs=recompute", "algorithm.correction=tis"]
    config, batch = of(*CRITIC, *apart), BatchMeta(partition="train", sample_ids=("a",), columns=("token_ids",))
    pools = scoring_pools(config)
    assert pools == {"ref_logprobs": "frozen", "values": "value"}
    assert scoring_pools(of(*CRITIC)) == scoring_pools(replace(config, runtime="inline")) == {}
    told, together = [], threading.Barrier(3)
    actor, reference, critic = Scorer(told, together), Scorer(told, together), Scorer(told, together)
    parts = {"actor": actor, "reference": reference, "critic": critic, "teacher": None, "source": actor}
    actor.compute_stage = partial(Scorer.compute_stage, Scorer(told))
    timer = PhaseTimer()
    scored = score(SimpleNamespace(**parts, pools=pools), config, batch, timer)
    assert scored.columns == ("token_ids", "old_logprobs", "ref_logprobs", "values", "mine")
    assert [*timer.take()] == ["old_logprobs", "ref_logprobs", "values", "mine"]
    assert sorted(told[:3]) == ["old_logprobs", "ref_logprobs", "values"]
    shared, told[:] = Scorer(told), []
    parts = dict.fromkeys(("actor", "reference", "critic", "source"), shared)
    assert (
        score(SimpleNamespace(**parts, teacher=None, pools={}), config, batch, PhaseTimer()).columns == scored.columns
    )
    assert told == ["old_logprobs", "ref_logprobs", "values", "mine"]


SMALL = [
    "steps=2", "eval_every=0", "data.options.num_rows=200", "data.eval_size=4", "timeout_s=300", "batch.batch_size=4",
    "batch.mini_batch_size=2", "batch.group_size=2", "engine.optimizer.lr=1e-2", "engine.optimizer.warmup_steps=0",
    "engine.matmul_precision=highest", "algorithm.entropy_coef=0.1", "algorithm.kl_coef=0.1",
    "engine.optimizer.eps=1e-3",  # AdamW would make steps of gradients that are rounding errors
]  # fmt: skip


def losses(output_dir):
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()][1:]
    return [(line["metrics"]["policy_loss"], line["metrics"]["kl"]) for line in lines]


@pytest.mark.promise(
    "A reference and a critic in pools of their own leave every loss as it is, bit for bit where the number format "
    "is the same"
)
@pytest.mark.process
@pytest.mark.timeout(900)
def test_a_reference_and_a_critic_of_their_own_change_no_loss(model, tmp_path):
    def trained(name, *overrides):
        own = ["runtime=inline", f"model.path={model}", f"output_dir={tmp_path / name}"]
        with (tmp_path / f"{name}.txt").open("w") as plan:
            run(of(*SMALL, *CRITIC, *own, *overrides), Console(file=plan, width=200))
        return losses(tmp_path / name)

    shared = trained("shared")
    apart = ["placement.reference.pool=frozen", "placement.critic.pool=value"]
    assert trained("apart", *apart) == shared, "bit for bit"
    assert "pool frozen" in (tmp_path / "apart.txt").read_text()
    wide = trained("wide", *apart, "placement.reference.engine.precision=float64")
    assert wide == [pytest.approx(step, abs=1e-6) for step in shared]
    assert wide != shared, "the reference's log-probs are others in their last bits"
    assert len(shared) == 2
    assert shared[1][1] > 1e-4


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_mixed_roles_have_the_losses_of_one_pool(model, tmp_path, megatron_on_cpu):
    """On Ray: the policy on two fsdp ranks, the reference on a megatron rank of its own, the critic on another."""

    def trained(name, *overrides):
        own = [f"model.path={model}", f"output_dir={tmp_path / name}", "engine.world_size=2"]
        command = [
            sys.executable,
            "-m",
            "rl_trainer.cli",
            "quickstart",
            "runtime=ray",
            *SMALL,
            *CRITIC,
            *own,
            *overrides,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return losses(tmp_path / name)

    shared = trained("shared")
    apart = trained(
        "apart",
        f"placement.reference={{pool: frozen, num_gpus: 1, engine: {{backend: {megatron_on_cpu}}}}}",
        *("placement.critic={pool: value, num_gpus: 1, engine: {precision: float64}}",),
    )
    assert len(shared) == 2
    assert shared[1][1] > 1e-4
    assert apart == [pytest.approx(step, abs=1e-5) for step in shared]
