import pytest

from rl_trainer.config import load_config
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.plan import make_plan


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
            "= 4 rows does not divide over engine.world_size=3",
        ),
        (["batch.max_tokens_per_gpu=10"], PlanError, "more than batch.max_tokens_per_gpu=10"),
        (["rollout.max_model_len=10"], PlanError, "more than rollout.max_model_len=10"),
        (["batch.group_size=1"], PlanError, "batch.group_size must be at least 2"),
        (["algorithm.advantage=gae2"], ConfigError, "there are .*grpo"),
        (["algorithm.loss=pp0"], ConfigError, "there are ppo"),
        (["engine.world_size=2", "engine.parallel.tp=4"], PlanError, r"world_size=2 is no multiple of .* 4 x 1 x 1"),
        (["engine.lora.rank=0"], ConfigError, "engine.lora.rank: Input should be greater than 0"),
        (["runtime=inline", "engine.world_size=2"], PlanError, "use runtime=ray"),
        (["rollout.top_p=0.9", "algorithm.old_logprobs=recompute"], PlanError, "set top_p=1"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(overrides, error, words):
    with pytest.raises(error, match=words):
        make_plan(load_config("quickstart", overrides))
