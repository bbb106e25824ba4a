"""Which column of the queue becomes what of an estimator's input: through the actor's own method, by hand."""

import pytest
import torch

import rl_tq
from rl_trainer.algorithms import ADVANTAGES, AdvantageInput, compute_advantages
from rl_trainer.algorithms.advantages import value_scan
from rl_trainer.algorithms.selection import select_tokens
from rl_trainer.config import AlgorithmConfig
from rl_trainer.runtime.base import WorkerContext
from rl_trainer.workers.engine import EngineWorker

OFFSETS = torch.tensor([0, 4, 6, 9, 11, 13])
MASK = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1])
GAMMA, LAM, KL = 0.9, 0.8, 0.3
PER_TOKEN = (
    "rewards", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "sum_pi_squared", "process_rewards",
)  # fmt: skip
COLUMNS = {name: torch.rand(13, generator=torch.Generator().manual_seed(n)) for n, name in enumerate(PER_TOKEN)} | {
    "greedy_rewards": torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25]),
    "group_id": torch.tensor([3, 3, 8, 8, 8]),
    "rollout_index": torch.tensor([0, 1, 0, 0, 1]),
    "components": torch.tensor([[0.0, 1.0], [1.0, 0.5], [0.25, 0.0], [0.5, 2.0], [1.0, 1.0]]),
    "component_weights": torch.tensor([[1.0, 4.0]] * 5),
    "completion_token_ids": torch.arange(13) % 3,
    "prompt_token_ids": torch.nested.nested_tensor_from_jagged(torch.tensor([7, 7, 8, 8, 9]), torch.arange(6)),
}


def computed(weight=0.0, **keys):
    """What the worker writes, and its report."""
    columns = COLUMNS | {"loss_mask": MASK}
    jagged = {
        name: torch.nested.nested_tensor_from_jagged(value, OFFSETS) if value.numel() == len(MASK) else value
        for name, value in columns.items()
    }
    worker = object.__new__(EngineWorker)
    worker._algorithm = AlgorithmConfig(gamma=GAMMA, lam=LAM, **keys)
    worker._context = WorkerContext(rank=0, world_size=1)
    with rl_tq.serve("inproc://") as worker._queue:
        batch = worker._queue.put(jagged, partition="train")
        report = worker.compute_advantage(batch, weight, seed=5)
        names = report.batch.columns
        return {name: worker._queue.get(report.batch, [name])[name].values() for name in names}, report.reward_kl


def wanted(name, old="old_logprobs", rewards=COLUMNS["rewards"]):
    fields = {field: COLUMNS[field] for field in ("values", "sum_pi_squared", "process_rewards", "components")}
    ratio = (COLUMNS[old] - COLUMNS["rollout_logprobs"]).exp()
    return AdvantageInput(
        rewards=rewards,
        loss_mask=MASK,
        cu_seqlens=OFFSETS,
        group_ids=COLUMNS["group_id"],
        rollout_ids=COLUMNS["rollout_index"],
        gamma=GAMMA,
        lam=LAM,
        logprobs=COLUMNS[old],
        greedy_rewards=COLUMNS["greedy_rewards"],
        component_weights=COLUMNS["component_weights"][0],
        ratio=ratio if "ratio" in ADVANTAGES[name].needs else None,
        columns={column: COLUMNS[column] for column in ("prompt_token_ids", "completion_token_ids")},
        **fields,
    )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_estimator_reads_the_columns_that_it_names(name):
    written, reward_kl = computed(advantage=name)
    inputs = wanted(name)
    torch.testing.assert_close(written.pop("advantages"), compute_advantages(name, inputs))
    assert reward_kl is None
    if name in {"gae", "vtrace"}:
        torch.testing.assert_close(written.pop("returns"), value_scan(inputs, name).returns)
    assert not written


@pytest.mark.parametrize("old", ["recompute", "rollout"])
def test_the_kl_is_taken_off_the_rewards_of_model_tokens(old):
    column = {"recompute": "old_logprobs", "rollout": "rollout_logprobs"}[old]
    kl = (COLUMNS[column] - COLUMNS["ref_logprobs"]).abs() * MASK
    inputs = wanted("reinforce_pp", column, COLUMNS["rewards"] - KL * kl)
    keys = {"advantage": "reinforce_pp", "old_logprobs": old, "kl_estimator": "abs", "kl_coef": 99.0}
    written, reward_kl = computed(KL, **keys, kl_in_reward=True)
    torch.testing.assert_close(written["advantages"], compute_advantages("reinforce_pp", inputs))
    assert reward_kl == pytest.approx(float(kl.sum()) / 11)
    in_the_loss, reward_kl = computed(KL, **keys)
    torch.testing.assert_close(in_the_loss["advantages"], compute_advantages("reinforce_pp", wanted("reinforce_pp")))
    assert reward_kl is None


@pytest.mark.parametrize(
    ("loss", "options"), [("clip_cov", {"share": 0.5, "low": -1.0, "high": 1.0}), ("kl_cov", {"share": 0.4})]
)
def test_the_chosen_tokens_are_those_of_the_loss_s_options(loss, options):
    written, _ = computed(loss=loss, loss_options=options)
    chosen = select_tokens(COLUMNS["old_logprobs"], written["advantages"], MASK, loss=loss, seed=5, **options)
    assert written["selected"].tolist() == chosen.tolist()
    assert 0 < int(chosen.sum()) < 11
