"""Which column of the queue becomes what of an estimator's input: through the actor's own method, by hand."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import rl_tq
from rl_trainer.algorithms import ADVANTAGES, AdvantageInput, compute_advantages
from rl_trainer.algorithms.advantages import value_scan
from rl_trainer.algorithms.selection import select_tokens
from rl_trainer.config.schema import AlgorithmConfig, TeacherSection
from rl_trainer.runtime.dispatch import cut
from rl_trainer.workers.engine_worker import EngineWorker
from rl_trainer.workers.teacher import Teachers

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


@pytest.fixture
def computed(engine_worker):
    """What the worker writes, and its report."""

    def compute(weight=0.0, **keys):
        columns = COLUMNS | {"loss_mask": MASK}
        jagged = {
            name: torch.nested.nested_tensor_from_jagged(value, OFFSETS) if value.numel() == len(MASK) else value
            for name, value in columns.items()
        }
        with rl_tq.serve("inproc://") as queue:
            worker = engine_worker(queue.address, AlgorithmConfig(gamma=GAMMA, lam=LAM, **keys))
            report = worker.compute_advantage(queue.put(jagged, partition="train"), weight, seed=5)
            names = report.batch.columns
            return {name: queue.get(report.batch, [name])[name].values() for name in names}, report.reward_kl

    return compute


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
        ratio=ratio if "ratio" in ADVANTAGES[name].reads else None,
        columns={column: COLUMNS[column] for column in ("prompt_token_ids", "completion_token_ids")},
        **fields,
    )


@pytest.mark.promise("`algorithm.mask_truncated`: what was cut off has no term and no count")
def test_what_was_cut_off_is_nobody_s(engine_worker):
    """It is in its group's baseline, and in nothing that is learned from or chosen."""
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 3.0])
    columns = {"rewards": rewards, "loss_mask": torch.ones(6, dtype=torch.int64)}
    columns |= {"old_entropy": torch.tensor([0.1, 0.2, 9.0, 8.0, 0.4, 0.3])}
    offsets = torch.tensor([0, 2, 4, 6])
    jagged = {name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in columns.items()}
    jagged |= {"group_id": torch.zeros(3, dtype=torch.int64), "rollout_index": torch.arange(3)}
    tags = [{"group_id": 0, "finish_reason": reason} for reason in ("stop", "length", "stop")]
    with rl_tq.serve("inproc://") as queue:
        workers = {
            masks: engine_worker(
                queue.address, AlgorithmConfig(advantage="dr_grpo", mask_truncated=masks, top_entropy=0.5)
            )
            for masks in (True, False)
        }
        batch = queue.put(jagged, partition="train", tags=tags)
        report = workers[True].compute_advantage(batch, 0.0, seed=5)
        batch = batch.union(report.batch)
        found = queue.get(batch, ["advantages", "is_high_entropy"])
        mask, whole = (worker._learnable(batch, ["loss_mask"])["loss_mask"].values() for worker in workers.values())
    thirds = torch.tensor([-1 / 3, -4 / 3, 5 / 3]).repeat_interleave(2)  # the mean of 1, 0 and 3 is 4 / 3
    torch.testing.assert_close(found["advantages"].values(), thirds)
    assert found["is_high_entropy"].values().tolist() == [0, 0, 0, 0, 1, 1]  # half of the four that were not cut off
    assert mask.tolist() == [1, 1, 0, 0, 1, 1]
    assert whole.tolist() == [1] * 6


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_teacher_with_fewer_rows_than_ranks_has_one_for_each(num_ranks):
    """Every rank calls, on a row of another if it has none, and each row is written once."""
    offsets = torch.tensor([0, 1, 2, 3])
    tags = [{"group_id": i, "data_source": source} for i, source in enumerate("aba")]
    with rl_tq.serve("inproc://") as queue:
        column = torch.nested.nested_tensor_from_jagged(torch.arange(3), offsets)
        batch = queue.put({"completion_token_ids": column}, partition="train", tags=tags)

        class Teacher(EngineWorker):
            """An engine that gives `sign` times each token's id; its ranks are called one after the other."""

            def __init__(self, sign):
                def forward(data, loss, forward_only):
                    assert len(data) > 0
                    return SimpleNamespace(columns={"logprobs": sign * data["completion_token_ids"].float()})

                self._engine = SimpleNamespace(eval_mode=nullcontext, forward_backward_batch=forward)
                self._queue, self._inputs, self._teacher = queue, ("completion_token_ids",), TeacherSection(path="t")

        class Ranks:
            def __init__(self, sign):
                self.rank = Teacher(sign)

            def compute_teacher_log_prob(self, rows, writes):
                parts = zip(cut(rows, num_ranks), cut(writes, num_ranks), strict=True)
                written = [self.rank.compute_teacher_log_prob(*part) for part in parts]
                return type(rows).concat([part for part in written if len(part)])

        teachers = Teachers({"": Ranks(10), "b": Ranks(-10)}, num_ranks)
        written = teachers.compute_teacher_log_prob(batch)
        assert queue.get(batch.union(written), ["teacher_logprobs"])["teacher_logprobs"].values().tolist() == [
            0,
            -10,
            20,
        ]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_estimator_reads_the_columns_that_it_names(name, computed):
    written, reward_kl = computed(advantage=name)
    inputs = wanted(name)
    torch.testing.assert_close(written.pop("advantages"), compute_advantages(name, inputs))
    assert reward_kl is None
    if name in {"gae", "vtrace"}:
        torch.testing.assert_close(written.pop("returns"), value_scan(inputs, name).returns)
    assert not written


@pytest.mark.parametrize("old", ["recompute", "rollout"])
def test_the_kl_is_taken_off_the_rewards_of_model_tokens(old, computed):
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
def test_the_chosen_tokens_are_those_of_the_loss_s_options(loss, options, computed):
    written, _ = computed(loss=loss, loss_options=options)
    chosen = select_tokens(COLUMNS["old_logprobs"], written["advantages"], MASK, loss=loss, seed=5, **options)
    assert written["selected"].tolist() == chosen.tolist()
    assert 0 < int(chosen.sum()) < 11
