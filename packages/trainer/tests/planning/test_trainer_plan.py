import pytest

from rl_trainer.config import load_config
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.pipeline.roles import longest_sequence
from rl_trainer.planning.plan import make_plan


def test_counts_by_hand():
    plan = make_plan(
        load_config(
            "gsm8k",
            ["batch.batch_size=12", "batch.mini_batch_size=4", "batch.group_size=3", "engine.world_size=2", "steps=5"],
        )
    )
    assert plan.completions == 36
    assert plan.optimizer_steps == 3
    assert plan.completions_per_optimizer_step == 12
    assert plan.completions_per_rank == 6
    assert plan.total_completions == 180
    assert plan.max_sequence_tokens == 512 + 1024


def test_rows_divide_over_data_parallel_ranks():
    cut = ["engine.world_size=8", "engine.backend=megatron", "engine.parallel.tp=2", "engine.parallel.pp=2"]
    plan = make_plan(
        load_config("gsm8k", ["batch.mini_batch_size=2", "batch.batch_size=4", "batch.group_size=3", *cut])
    )
    assert plan.completions_per_rank == 3  # 6 rows over 8 / (2 x 2) ranks
    with pytest.raises(PlanError, match="= 3 rows does not divide over 2 data-parallel ranks"):
        make_plan(load_config("gsm8k", ["batch.mini_batch_size=1", "batch.batch_size=4", "batch.group_size=3", *cut]))


@pytest.mark.parametrize("key", ["rollout.max_model_len", "engine.max_tokens_per_gpu"])
def test_the_longest_sequence_may_fill_what_there_is(key):
    make_plan(load_config("quickstart", [f"{key}={16 + 5}", "reward.overlong_buffer=5"]))
    with pytest.raises(PlanError, match=f"= 21 tokens, more than {key}=20"):
        make_plan(load_config("quickstart", [f"{key}=20"]))


GDPO = ["algorithm.advantage=gdpo", "reward.path=rewards.py:f"]
SAPO = ["algorithm.loss=sapo"]
COV = ["algorithm.loss=kl_cov", "algorithm.loss_options={}"]
TIS = ["algorithm.old_logprobs=recompute", "algorithm.correction=tis"]
KL = ["algorithm.kl_coef=0.1", "algorithm.kl_in_reward=true"]
OWN = ["reward.parts.a.kind=classifier", "reward.parts.a.model.path=folder"]
JUDGE = [
    f"reward.parts.a.{setting}"
    for setting in ("kind=judge", "url=http://localhost:1/v1", "model=m", "prompt='good? {completion}'")
]


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        (
            ["batch.batch_size=64", "batch.mini_batch_size=5"],
            PlanError,
            "64 prompts cannot be cut into mini-batches of batch.mini_batch_size=5",
        ),
        (
            ["engine.world_size=3", "batch.mini_batch_size=1", "batch.group_size=4"],
            PlanError,
            "= 4 rows does not divide over 3 data-parallel ranks .engine.world_size=3",
        ),
        (["engine.max_tokens_per_gpu=10"], PlanError, "more than engine.max_tokens_per_gpu=10"),
        (["rollout.max_model_len=10"], PlanError, "more than rollout.max_model_len=10"),
        (["batch.group_size=1", "algorithm.advantage=rloo"], PlanError, "batch.group_size must be at least 2"),
        (["batch.group_size=1", "batch.dynamic_sampling=true"], PlanError, "group_size must be at least 2"),
        (["algorithm.advantage=gae2"], ConfigError, "algorithm.advantage='gae2' is not known; there are .*grpo"),
        (["algorithm.loss=pp0"], ConfigError, "algorithm.loss='pp0' is not known; there are .*ppo"),
        (["engine.world_size=2", "engine.parallel.tp=4"], PlanError, r"world_size=2 is not a multiple of .* 4 x 1 x 1"),
        (["engine.lora.rank=0"], ConfigError, "engine.lora: lora.rank is 0; it must be 1 or more"),
        (["runtime=inline", "engine.world_size=2"], PlanError, "use runtime=ray"),
        (
            ["rollout.colocated=true", "pipeline=one_step_off"],
            PlanError,
            "generates and trains at the same time, which",
        ),
        (["rollout.colocated=true", "rollout.num_replicas=2"], PlanError, "num_replicas=2 of .*engine.world_size=1"),
        (["rollout.top_p=0.9", "algorithm.old_logprobs=recompute"], PlanError, "set top_p=1"),
        (["algorithm.advantage=gae"], PlanError, "reads values, which takes a critic: set a key of critic"),
        (
            ["critic.lr=1e-5"],
            PlanError,
            "critic do nothing with algorithm.advantage=grpo; .* gae, prime, vtrace",
        ),
        (["algorithm.advantage=vtrace", "critic.lr=1e-5"], PlanError, "reads ratio, .* set algorithm.old_logprobs=rec"),
        (["algorithm.advantage=prime"], PlanError, "a process reward model"),
        (
            ["algorithm.advantage=gae", "critic.warmup_steps=50"],
            PlanError,
            "warmup_steps=50 leaves the policy none of steps=50 to learn in",
        ),
        (
            ["algorithm.correction=tis"],
            PlanError,
            "corrects twice: the ratio of algorithm.loss=ppo is that to the samp",
        ),
        (
            ["algorithm.loss_options.share=0.1"],
            ConfigError,
            "share is not read by algorithm.loss=ppo; its options are: clip_low",
        ),
        ([*SAPO, "algorithm.loss_options={tau: 1}"], ConfigError, "tau is not read .* options are: tau_pos, tau_neg"),
        (["algorithm.loss_options.clip_low=-0.2"], PlanError, "clip_low=-0.2 cannot be meant; it has to be 0 or more"),
        (["algorithm.loss_options.clip_dual=1"], PlanError, "clip_dual=1 cannot be meant; .* above 1"),
        ([*SAPO, "algorithm.loss_options={tau_pos: 0}"], PlanError, "tau_pos=0 cannot be meant; it has to be above 0"),
        (["runtime=inline", "agent.num_workers=2"], PlanError, "agent.num_workers=2 needs its own processes"),
        (["runtime=inline", "rollout.num_replicas=2"], PlanError, "num_replicas=2 needs its own processes"),
        (["reward.overlong_buffer=2", "reward.parts.overlong.kind=rule"], PlanError, "one would hide the other"),
        ([*COV, "algorithm.loss_options.share=2"], PlanError, "share=2 is a share of the tokens; give 0 to 1"),
        (
            ["algorithm.loss=sapo", "algorithm.loss_options.clip_high=0.2"],
            ConfigError,
            "loss_options.clip_high is not read by algorithm.loss=sapo; .* tau_pos",
        ),
        (
            ["algorithm.gamma=0.9"],
            PlanError,
            "gamma=0.9 does nothing unless algorithm.advantage is one of gae, gigpo, opt",
        ),
        (["algorithm.correction_bounds=[0, 3]"], PlanError, "does nothing unless algorithm.correction is chosen"),
        ([*TIS, "algorithm.correction_bounds=[0.1, 3]"], PlanError, "tis has an upper bound alone, .*; give .0, 3"),
        ([*TIS, "algorithm.correction_bounds=[3, 2]"], PlanError, "the first has to be the lower one"),
        ([*KL, "algorithm.kl_estimator=k3+"], PlanError, "penalty in the rewards has none; set kl_estimator=k3"),
        (["algorithm.kl_in_reward=true"], PlanError, "does nothing unless algorithm.kl_coef is positive"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_target=1"], PlanError, "unless algorithm.kl_in_reward is set"),
        (["algorithm.rejection_bounds=[0, 1]"], PlanError, "unless algorithm.rejection is chosen"),
        (["algorithm.lam=0.9"], PlanError, "unless algorithm.advantage is one of gae, vtrace"),
        (["algorithm.advantage=gdpo"], PlanError, "reads components, which takes a reward of parts: set reward.parts"),
        ([*GDPO, "algorithm.kl_coef=1", "algorithm.kl_in_reward=true"], PlanError, "kl_in_reward leaves as they are"),
        (["reward.path=a.py:f", "reward.parts.a.kind=rule"], PlanError, "set one of them"),
        (["reward.parts.a.kind=function"], PlanError, "which needs reward.parts.a.path"),
        ([*JUDGE, "reward.parts.a.url=x"], PlanError, "reward.parts.a.url='x' is not a URL"),
        ([*JUDGE, "reward.parts.a.score_at=x"], PlanError, "score_at does nothing with kind=judge, only with classif"),
        ([*JUDGE, "reward.parts.a.prompt=how good?"], PlanError, "prompt has no {completion} in it"),
        (
            [*JUDGE, "reward.parts.a.model={path: folder}"],
            PlanError,
            "kind=judge, which needs one of reward.parts.a.url",
        ),
        ([*JUDGE, "reward.parts.a.parser=x.py:f", "reward.parts.a.pattern=(a)"], PlanError, "leave one of them out"),
        ([*OWN, "reward.parts.a.model.backend=vllm"], PlanError, "backend does nothing with kind=classifier, only w"),
        ([*OWN, "reward.parts.a.model.bakend=vllm"], ConfigError, "nearest one is reward.parts.NAME.model.backend"),
        ([*OWN, "reward.parts.a.model.num_replicas=0"], ConfigError, "a.model.num_replicas: Input should be greater"),
        ([*OWN, "reward.parts.a.path=folder"], PlanError, "path does nothing with kind=classifier, only with function"),
        ([*JUDGE, "reward.parts.a.pattern=x"], PlanError, "pattern='x' has 0 groups; one is needed"),
        ([*JUDGE, "reward.parts.a.pattern=("], PlanError, "is not a regular expression: missing"),
        ([*JUDGE, "reward.num_processes=2"], PlanError, "num_processes does nothing without a part of kind=function"),
        (["reward.parts.a.kind=loop", "reward.parts.a.max_attempts=9"], PlanError, "max_attempts does nothing with ki"),
        (["reward.parts.a.kind=rule", "reward.parts.a.wait=1"], ConfigError, "key reward.parts.a.wait; the nearest"),
        (
            ["reward.parts.a.kind=classifier"],
            PlanError,
            "needs one of reward.parts.a.url .*a.model.path",
        ),
        ([*OWN, "reward.parts.a.url=http://a"], PlanError, "which needs one of"),
        (
            [*OWN, "reward.parts.a.score_at=x"],
            PlanError,
            "score_at is of a server at reward.parts.a.url",
        ),
        (["reward.parts.a.kind=guess"], ConfigError, "reward.parts.a.kind: Input should be 'rule', 'loop'"),
        (["reward.overlong_buffer=6"], PlanError, "longer than the longest completion, rollout.max_new_tokens=5"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(overrides, error, words):
    with pytest.raises(error, match=words):
        make_plan(load_config("quickstart", overrides))


def test_the_longest_sequence_is_the_loop_s_own():
    assert longest_sequence(load_config("quickstart"))[0] == 16 + 5
    tool = ["agent.loop=tool", "agent.options.max_completion_tokens=40"]
    assert longest_sequence(load_config("quickstart", tool))[0] == 16 + 40
    assert make_plan(load_config("quickstart", tool)).max_sequence_tokens == 56
    assert longest_sequence(load_config("quickstart", tool[:1]))[0] == 64
    assert make_plan(load_config("tool_calculator")).max_sequence_tokens == 16 + 128


def test_optimal_token_baseline_works_with_the_engine_pass():
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        make_plan(load_config("quickstart", [f"algorithm.advantage={name}", "algorithm.old_logprobs=recompute"]))


@pytest.mark.parametrize(
    "overrides", [GDPO, JUDGE, ["batch.group_size=1"], [*JUDGE, "algorithm.advantage=gdpo", "reward.parts.b.kind=rule"]]
)
def test_what_can_work_is_planned(overrides):
    make_plan(load_config("quickstart", overrides))
