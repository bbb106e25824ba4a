"""`policies`: several policies learn in one environment, each with its engine, weight session and replicas."""

import json
import re
from dataclasses import replace

import pytest
from packages.trainer.tests.support.stand_ins import FakeJob
from rich.console import Console

from rl_engine import write_manifest
from rl_rollout.testing import write_tiny_model
from rl_tq.types import BatchMeta
from rl_trainer import checkpoints, cli
from rl_trainer.api import Run
from rl_trainer.commands import view
from rl_trainer.config import load_config
from rl_trainer.config.explain import explain
from rl_trainer.errors import ConfigError, InputError, PlanError, TrainerError
from rl_trainer.loop import mini_batches, run_loop
from rl_trainer.pipeline.roles import policies_of
from rl_trainer.planning.gpus import pools_of, settle
from rl_trainer.planning.prepare import prepare
from rl_trainer.run import run
from rl_trainer.samples import kept

FILE = '''
from rl_agent import AgentLoop
from rl_agent.chat_template import tokenize_prompt
from rl_agent.session import Session


class Talk:
    """Two seats say a text each; whoever says more wins the difference from the other."""

    possible_agents = ("left", "right")

    def __init__(self, topic="any"):
        self.topic = topic

    def reset(self, *, seed):
        self.agents, self.agent_selection, self.said = ["left", "right"], "left", []

    def last(self):
        over = len(self.said) == 2
        gain = (len(self.said[0]) - len(self.said[1])) / 8 if over else 0.0
        return f"talk of {self.topic}", gain if self.agent_selection == "left" else -gain, over, False, {}

    def step(self, action):
        if action is None:
            self.agents.remove(self.agent_selection)
        else:
            self.said.append(action)
        self.agent_selection = "right" if self.agent_selection == "left" else "left"


class Named(AgentLoop):
    """Generates by the policies in the row's `asked`, and learns as those in `learns`."""

    async def run(self, sampling_params, row):
        outputs = []
        for name in row["asked"]:
            policy = self.policy(name)
            prompt = tokenize_prompt(policy.tokenizer, row)[0]
            learner = row["as"].get(name, name)
            session = Session(policy.server, policy.tokenizer, prompt, sampling_params, policy=learner)
            await session.generate()
            outputs.append(session.finish(reward=session.num_tokens / 8))
        return [output for output in outputs if output.policy in row["learns"]]
'''
NUMBERS = re.compile(r"(one|two)/(reward|policy_loss|loss|grad_norm|lr|kl_coef|samples)")
SEATS = "agent.options={seats: {left: one, right: two}, max_turns: 2}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("policies") / "model")


@pytest.fixture(scope="module")
def plug_in(tmp_path_factory):
    path = tmp_path_factory.mktemp("policies") / "talk.py"
    path.write_text(FILE)
    return path


def rows_of(folder, **fields):
    row = {
        "prompt": [{"role": "user", "content": "hi"}],
        "data_source": "talk",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "as": {},
        **fields,
    }
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "extra_info": {"n": n}}) + "\n" for n in range(20)))
    return [f"data.path={path}", "data.format=rows", "data.options={}"]


def settings(model, folder, *more):
    return [
        "runtime=inline", "steps=3", "eval_every=3", "save_every=1", "timeout_s=60", "data.eval_size=2",
        "rollout.max_new_tokens=8", "rollout.max_model_len=128", "data.max_prompt_tokens=64",
        "batch.batch_size=2", "batch.mini_batch_size=2", "batch.group_size=4", f"model.path={model}",
        "engine.optimizer={lr: 1.0e-3, warmup_steps: 0}", f"output_dir={folder}",
        "policies={one: {}, two: {}}", *more,
    ]  # fmt: skip


def trained(model, folder, *more):
    run(load_config("quickstart", settings(model, folder, *more)), Console(quiet=True))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["reward"] is not None}


def numbers(lines):
    """By step, what two runs have in common to the last bit."""
    return {
        step: (
            {name: value for name, value in line["metrics"].items() if NUMBERS.fullmatch(name)},
            {name: receipt["digest"] for name, receipt in line["weights"].items()},
        )
        for step, line in lines.items()
    }


def digests(lines, policy):
    return [line["weights"][policy]["digest"] for _, line in sorted(lines.items())]


@pytest.fixture(scope="module")
def talked(model, plug_in, tmp_path_factory):
    """Three steps of two policies, one at each seat: the options, the folder and the lines of metrics."""
    folder = tmp_path_factory.mktemp("talked")
    kl = "policies.one.algorithm={kl_coef: 0.1, kl_in_reward: true, kl_target: 0.01, kl_estimator: k1}"
    options = [*rows_of(folder), "agent.loop=self_play", f"agent.environment={plug_in}:Talk", SEATS, kl]
    return options, folder / "out", trained(model, folder / "out", *options)


class Shared(FakeJob):
    """Fake of every component of two policies: of each batch of eight samples the last `few` are those of `two`."""

    few = 1

    def take(self, step, num_groups=None):
        generated = super().take(step, num_groups)
        batch = generated.batch
        names = ["one"] * (len(batch) - self.few) + ["two"] * self.few
        tags = tuple({**tags, "policy": name} for tags, name in zip(batch.tags, names, strict=True))
        return replace(generated, batch=replace(batch, tags=tags))

    def compute_whole_advantage(self, batch, kl_coef=0.0, seed=0):
        self.calls.append("whole")
        return self.compute_advantage(batch, kl_coef, seed)

    def components(self):
        first = replace(super().components(), policy="one")
        return replace(first, others=(replace(first, policy="two"),))


@pytest.mark.parametrize(
    ("few", "calls", "skipped"),
    [(0, ["advantage", "update 8"], 0), (1, ["advantage", "update 7"], 1), (4, ["advantage", "update 4"] * 2, None)],
)
def test_a_policy_with_fewer_rows_than_ranks_skips_the_step(few, calls, skipped):
    """It is counted, and the others learn."""
    policies = "policies={one: {}, two: {engine: {world_size: 4}}}"
    sizes = ["batch.batch_size=4", "batch.mini_batch_size=4", "batch.group_size=2", "algorithm.kl_coef=0"]
    config = load_config("quickstart", ["steps=1", "runtime=ray", "eval_every=0", policies, *sizes])
    job = Shared(config)
    job.few = few
    *_, record = run_loop(job.components(), config, [])
    made = [call for call in job.calls if call.startswith(("adv", "update"))]
    assert made == calls
    assert ("whole" in job.calls) == (few == 4), "two groups cannot be divided over four ranks"
    assert record.metrics.get("two/skipped_samples") == skipped
    assert record.metrics["two/samples"] == few
    assert job.calls.count("sync 2") == 2, "a version is that of both"


@pytest.mark.parametrize(("sizes", "wanted"), [([2] * 4, [4, 4]), ([1] * 4, [4]), ([4, 4, 1], [9]), ([1, 1, 4], [6])])
def test_a_mini_batch_has_a_row_for_every_rank(sizes, wanted, monkeypatch):
    config = load_config("quickstart", ["batch.mini_batch_size=2", "runtime=ray", "engine.world_size=3"])
    monkeypatch.setattr("random.Random.shuffle", lambda self, order: None)
    tags = [{"group_id": group} for group, size in enumerate(sizes) for _ in range(size)]
    ids = tuple(str(index) for index in range(len(tags)))
    batch = BatchMeta(partition="train", sample_ids=ids, columns=("x",), tags=tuple(tags))
    found = mini_batches(batch, config, 1)
    assert [len(each) for each in found] == wanted


@pytest.mark.process
def test_each_policy_learns_from_the_rewards_of_its_seat(talked):
    _, folder, lines = talked
    assert [*lines] == [1, 2, 3]
    for line in lines.values():
        metrics = line["metrics"]
        assert metrics["one/samples"] == metrics["two/samples"] == 8
        assert metrics["one/reward"] == pytest.approx(-metrics["two/reward"])
        assert not line["failures"]
        assert {receipt["version"] for receipt in line["weights"].values()} == {line["step"] + 1}
    assert len({*digests(lines, "one"), *digests(lines, "two")}) == 6, "both change, to different weights"
    assert "two/kl_coef" not in lines[3]["metrics"]
    assert {"one/eval_reward", "two/eval_reward"} <= lines[3]["metrics"].keys()
    for name in ("one", "two"):
        assert (folder / "checkpoint-3" / "policies" / name / "model" / "config.json").is_file()


@pytest.mark.process
def test_what_a_run_left_is_shown_by_policy(talked):
    _, folder, lines = talked
    data = json.loads(re.search(r"const data = (.*);\n", view.page(folder))[1].replace("<\\/", "</"))
    wanted = [(f"{step}, {name}", digests(lines, name)[step - 1]) for step in (1, 2, 3) for name in ("one", "two")]
    assert [(step, receipt["digest"]) for step, receipt in data["weights"]] == wanted
    for name in ("one", "two"):
        (sample, *_) = kept(folder / "policies" / name, step=2, order="first", count=1)
        assert "talk of any" in sample.prompt


@pytest.mark.process
@pytest.mark.promise(
    "Of several policies each learns from its own trajectories: those of one leave the others' weights"
)
def test_an_update_of_one_leaves_the_digest_of_the_other(model, plug_in, tmp_path):
    """The one that never has a trajectory holds nobody up."""
    rows = rows_of(tmp_path, asked=["one", "two"], learns=["one"])
    lines = trained(model, tmp_path / "out", *rows, f"agent.loop={plug_in}:Named", "reward.parts.own.kind=loop")
    assert len({*digests(lines, "one")}) == 3
    assert len({*digests(lines, "two")}) == 1
    assert [line["metrics"]["two/samples"] for line in lines.values()] == [0, 0, 0]
    assert not [name for name in lines[1]["metrics"] if name.startswith("two/") and "loss" in name]


@pytest.mark.process
def test_an_update_of_one_does_not_depend_on_the_other(talked, model, tmp_path):
    options, _, lines = talked
    other = trained(model, tmp_path / "out", *options, "policies.two.engine.optimizer.lr=1.0e-5", "steps=1")
    assert digests(other, "one") == digests(lines, "one")[:1]
    assert digests(other, "two") != digests(lines, "two")[:1]


@pytest.mark.process
@pytest.mark.promise(
    "A resumed run of several policies has the weights of one that was never stopped, for each of them"
)
def test_a_resumed_run_is_equal_bit_for_bit_for_both(talked, model, tmp_path):
    options, folder, lines = talked
    start = folder / "checkpoint-1"
    assert not checkpoints.damage(start)
    resumed = trained(model, tmp_path / "out", *options, f"resume_from={start}")
    assert numbers(resumed) == {step: each for step, each in numbers(lines).items() if step > 1}


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["one_step_off", "fully_async"])
def test_every_schedule_carries_several_policies(talked, model, tmp_path, pipeline):
    """In processes, and without staleness with the numbers of `sync` in one process, bit for bit."""
    options, _, lines = talked
    more = ["runtime=ray", f"pipeline={pipeline}", "staleness.max_staleness=0", "save_every=0"]
    assert numbers(trained(model, tmp_path / "out", *options, *more)) == numbers(lines)


@pytest.mark.slow
def test_two_policies_generate_ahead_of_learning(talked, model, tmp_path):
    options, _, _ = talked
    more = ["runtime=ray", "pipeline=fully_async", "staleness.max_staleness=1", "algorithm.correction=tis", "steps=4"]
    lines = trained(model, tmp_path / "out", *options, *more, "algorithm.old_logprobs=recompute")
    assert len({*digests(lines, "one"), *digests(lines, "two")}) == 8
    assert max(line["metrics"]["staleness_max"] for line in lines.values()) == 1


@pytest.mark.process
def test_a_checkpoint_has_the_engines_of_all_policies(talked):
    _, folder, _ = talked
    checkpoint = folder / "checkpoint-2"
    engine = checkpoint / "policies" / "two" / "engine"
    assert checkpoints.is_complete(checkpoint)
    engine.rename(hidden := engine.with_name("elsewhere"))
    assert not checkpoints.is_complete(checkpoint)
    hidden.rename(engine)
    weights = next((checkpoint / "policies" / "one" / "model").glob("*.safetensors"))
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + b"x")
    (line,) = checkpoints.damage(checkpoint)
    assert "policies/one/model" in line
    weights.write_bytes(before)


@pytest.mark.process
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"asked": ["three"], "learns": []}, "asks for policy 'three', and there are one, two"),
        ({"asked": ["one"], "as": {"one": "me"}, "learns": ["me"]}, "of policy 'me'; the run's policies are: one, two"),
    ],
)
def test_an_unknown_policy_is_one_error_with_its_row(model, plug_in, tmp_path, fields, sentence):
    options = [*rows_of(tmp_path, **fields), f"agent.loop={plug_in}:Named", "reward.parts.own.kind=loop"]
    with pytest.raises(TrainerError, match=rf"rows\.jsonl, row \d+: the agent loop .*{sentence}"):
        trained(model, tmp_path / "out", *options)


def test_a_policy_says_only_what_differs():
    config = load_config("quickstart", ["engine.optimizer.lr=0.1", "policies={a: {}, b: {engine: {world_size: 2}}}"])
    own = policies_of(config)
    assert [(name, each.engine.world_size, each.engine.optimizer.lr) for name, each in own.items()] == [
        ("a", 1, 0.1), ("b", 2, 0.1)
    ]  # fmt: skip
    assert config.engine == own["a"].engine
    again = load_config("quickstart", ["policies.a.algorithm.kl_coef=0.5", "policies.b.engine.optimizer={lr: 0.2}"])
    assert [each.algorithm.kl_coef for each in policies_of(again).values()] == [0.5, 0.0]
    assert again.policies["b"].engine.optimizer.warmup_steps == again.policies["a"].engine.optimizer.warmup_steps
    assert explain("policies.a.engine.optimizer.lr") == explain("engine.optimizer.lr")


def test_pools_of_all_policies_add_up():
    sizes = "policies={a: {rollout: {num_replicas: 3}}, b: {engine: {world_size: 2}, algorithm: {kl_coef: 0.1}}}"
    config = settle(load_config("quickstart", ["runtime=ray", sizes, "placement.reference.pool=frozen"]))
    pools = {pool.name: pool.num_workers for pool in pools_of(config)}
    assert pools == {
        "a.engine": 1, "a.rollout": 3, "b.engine": 2, "b.frozen": 2, "b.rollout": 1, "agent": 1, "queue": 1
    }  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(
    ("error", "more", "sentence"),
    [
        (ConfigError, ["policies.b.engin.world_size=2"], "unknown configuration key policies.b.engin"),
        (ConfigError, ["policies.b.engine.optimizer.lrr=2"], "nearest one is policies.b.engine.optimizer.lr"),
        (ConfigError, ["policies.b.data.path=x"], "unknown configuration key policies.b.data"),
        (ConfigError, ["policies.b.engine.world_size=none"], "policies.b.engine.world_size: "),
        (PlanError, ["policies={'a/b': {}}"], "policies.a/b: a policy has a name of letters"),
        (PlanError, ["policies.reward.engine.world_size=1"], "policies.reward: a policy has a name of letters"),
        (PlanError, ["policies.policy.engine.world_size=1"], "policies.policy: a policy has a name of letters"),
        (PlanError, ["policies.b.algorithm.kl_in_reward=true"], "policies.b: algorithm.kl_in_reward=True does noth"),
        (PlanError, ["policies.b.rollout.temperature=0.5"], "policies.b.rollout.temperature=0.5 differs from 1.0"),
        (PlanError, ["policies.b.algorithm.advantage=remax"], "policies.b.algorithm.advantage=remax compares with"),
        (PlanError, ["policies.b.algorithm.advantage=gae"], "policies.b: "),
        (PlanError, ["policies.b.engine.world_size=2"], "policies.b: engine.world_size=2 needs its own processes"),
        (PlanError, ["batch.stream=true", "batch.mini_batch_size=1"], "batch.stream is for runs of one policy"),
        (PlanError, ["weights_transport=tcp://127.0.0.1:1"], "weights_transport=tcp://127.0.0.1:1 is for runs of one"),
        (InputError, ["policies.b.model.path=/nowhere"], "policies.b: model.path=/nowhere is neither"),
        (ConfigError, ["policies.b.rollout.backend=mine"], "policies.b: "),
        (InputError, ["agent.options={seats: {left: a, right: c}}"], "asks for policy 'c', and there are a, b"),
        (
            InputError,
            ["agent.options={seats: {left: a}}"],
            "option seats has left; it needs those of the game: left, r",
        ),
    ],
)
def test_what_cannot_work_is_found_at_the_plan(model, plug_in, tmp_path, error, more, sentence):
    options = [*rows_of(tmp_path), "agent.loop=self_play", f"agent.environment={plug_in}:Talk"]
    seats = "agent.options={seats: {left: a, right: b}}"
    with pytest.raises(error, match=re.escape(sentence)):
        prepare(
            load_config(
                "quickstart", settings(model, tmp_path / "o", *options, seats, "policies={a: {}, b: {}}", *more)
            )
        )


@pytest.mark.parametrize("recipe", ["two_policies", "self_play"])
def test_a_checkpoint_of_other_policies_is_not_resumed(recipe, tmp_path):
    folders = ["policies/left/engine", "policies/right/engine"]
    for each in folders:
        (tmp_path / each).mkdir(parents=True)
    state = {"step": 2, "num_rows": 9, "seed": 0, "engines": folders, "policies": {"left": {}, "right": {}}}
    write_manifest(tmp_path / "trainer_state.json", state, {})
    with pytest.raises(InputError, match="has the policies: left, right; this run has: .*; give policies those names"):
        checkpoints.check_resume(load_config(recipe, [f"resume_from={tmp_path}"]), 9, is_known_whole=True)


def test_a_run_of_several_policies_has_no_single_model():
    run = Run(load_config("quickstart", ["policies={one: {}, two: {}}"]))
    with pytest.raises(ConfigError, match="the run has the policies one, two: see policies/NAME/model"):
        _ = run.model_path


@pytest.mark.process
def test_the_plan_shows_every_policy(model, plug_in, tmp_path):
    options = [*rows_of(tmp_path), "agent.loop=self_play", f"agent.environment={plug_in}:Talk", SEATS]
    facts = dict(prepare(load_config("quickstart", settings(model, tmp_path / "out", *options))).facts)
    for name in ("one", "two"):
        assert {f"{name}: components", f"{name}: memory, engine rank", f"{name}: a checkpoint"} <= facts.keys()
        assert "policy" in facts[f"pool {name}.engine"]


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (cli.main, ["two_policies", "--simulate"]),
        (cli.main_eval, ["two_policies", "model.path=m"]),
        (cli.main_sample, ["two_policies", "model.path=m"]),
    ],
)
def test_commands_of_one_policy_refuse_several(main, words, capsys):
    assert main(words) == 2
    assert "opener, replier" in capsys.readouterr().err
