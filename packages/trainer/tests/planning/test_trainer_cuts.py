"""Every loss and aggregation: any partition into micro-batches gives the same, and none waits for the device."""

import random
from typing import get_args, get_type_hints

import pytest
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from rl_engine.types import BatchCounts, ModelOutput
from rl_trainer.algorithms import POLICY_LOSSES, PolicyLoss, PolicyLossFunction
from rl_trainer.algorithms.critic_losses import ProcessRewardLoss, ValueLossFunction
from rl_trainer.config.schema import AlgorithmConfig, TeacherSection

pytestmark = pytest.mark.process  # no process, but a third of the core tier's time
AGGREGATIONS, CORRECTIONS, REJECTIONS = (
    get_args(get_type_hints(AlgorithmConfig)[key]) for key in ("aggregation", "correction", "rejection")
)
TEACHER = TeacherSection(path="nowhere", divergence="mixed", coef=0.5)


def draw_rows(lengths, seed):
    """Columns of one batch, end to end, in float64, and what the model gave."""
    draw = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def numbers(*size, scale=0.3):
        return torch.randn(total, *size, generator=draw, dtype=torch.float64) * scale

    logprobs = numbers() - 1
    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs")
    columns = {name: logprobs + numbers() for name in names}
    columns |= {name: numbers(scale=1.0) for name in ("advantages", "returns", "values")}
    columns["teacher_candidate_logprobs"] = numbers(4, scale=1.0).log_softmax(-1)[:, :3]
    columns["loss_mask"] = (numbers() > -0.2).long()
    columns["loss_mask"][torch.tensor(lengths).cumsum(0) - 1] = 1
    columns["selected"], columns["is_high_entropy"] = (numbers() > 0).long(), (numbers() > 0).long()
    columns["rewards"] = torch.zeros(total, dtype=torch.float64)
    columns["rewards"][torch.tensor(lengths).cumsum(0) - 1] = 1.0
    columns["is_given"] = torch.arange(len(lengths)) % 2 == 1
    return logprobs, columns


class NothingToWaitFor(TorchDispatchMode):
    """Refuses what on another device than the CPU would wait until all is computed that was asked for before."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name, kwargs = op.overloadpacket.__name__, kwargs or {}
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = [index for index in indices if index is not None and index.dtype == torch.bool]
        is_unsized = name == "repeat_interleave" and kwargs.get("output_size") is None
        waits = name.startswith(self.WAITS) or masks or is_unsized
        assert not waits, f"{name} waits for the device"
        return op(*args, **kwargs)


def added_up(loss_function, given, columns, lengths, parts):
    """Loss, metrics and gradient when each of `parts`, lists of rows, is a micro-batch of its own."""
    leaf = given.clone().requires_grad_()
    spans = [part.tolist() for part in torch.arange(sum(lengths)).split(lengths)]
    masks = columns["loss_mask"].split(lengths)
    counts = BatchCounts(tokens=float(sum(map(torch.sum, masks))), sequences=float(sum(mask.any() for mask in masks)))
    total = {}
    for rows in parts:
        index = torch.tensor([token for row in rows for token in spans[row]])
        offsets = torch.nn.functional.pad(torch.tensor([lengths[row] for row in rows]).cumsum(0), (1, 0))
        scores = leaf[index]
        output = ModelOutput(
            token_logprobs=scores,
            token_values=scores,
            token_candidate_logprobs=scores[:, None] - torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
            entropy=scores.square(),
            cu_seqlens=offsets,
            counts=counts,
        )
        batch = {
            name: column[rows] if name == "is_given" else torch.nested.nested_tensor_from_jagged(column[index], offsets)
            for name, column in columns.items()
        }
        with NothingToWaitFor():
            loss, metrics = loss_function(output, TensorDict(batch, batch_size=[len(rows)]))
        loss.backward()
        for name, share in {"loss": loss, **metrics}.items():
            total[name] = total.get(name, 0.0) + float(share.detach())
    return total, leaf.grad


def check(loss_function, seed):
    """Loss and gradient of rows cut at random are those of all rows at once; the latter's gradient."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 6) for _ in range(draw.randint(2, 6))]
    rows = list(range(len(lengths)))
    draw.shuffle(rows)
    ends = sorted({draw.randint(1, len(rows)) for _ in rows} | {len(rows)})
    parts = [rows[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
    given, columns = draw_rows(lengths, seed)
    whole = added_up(loss_function, given, columns, lengths, [sorted(rows)])
    cut = added_up(loss_function, given, columns, lengths, parts)
    assert cut[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)  # sums are in float32
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-6, atol=1e-8)
    return whole[1]


def policy_loss(loss, aggregation):
    config = AlgorithmConfig(loss=loss, aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01)
    return PolicyLossFunction(config=config, max_new_tokens=7, teacher=TEACHER)


SEEDS = [pytest.param(range(1), id="once"), pytest.param(range(1, 21), id="often", marks=pytest.mark.slow)]
OTHERS = {
    **{name: PolicyLossFunction(config=AlgorithmConfig(correction=name)) for name in CORRECTIONS},
    **{name: PolicyLossFunction(config=AlgorithmConfig(rejection=name)) for name in REJECTIONS},
    "off-policy mask": PolicyLossFunction(config=AlgorithmConfig(off_policy_mask=0.05)),
    "top entropy": PolicyLossFunction(config=AlgorithmConfig(top_entropy=0.2, correction="tis")),
    "unbiased KL": PolicyLossFunction(config=AlgorithmConfig(kl_coef=0.3, kl_estimator="k3*")),
    "value": ValueLossFunction(clip=0.2),
    "process reward": ProcessRewardLoss(),
}


NAMES = sorted(POLICY_LOSSES)
ONE_EACH = [(name, AGGREGATIONS[place % len(AGGREGATIONS)]) for place, name in enumerate(NAMES)]
"""Every loss, and every aggregation more than once."""
ALL = [
    (name, way) if (name, way) in ONE_EACH else pytest.param(name, way, marks=pytest.mark.slow)
    for name in NAMES
    for way in AGGREGATIONS
]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("loss", "aggregation"), ALL)
def test_a_policy_loss_is_that_of_the_whole_batch(loss, aggregation, seeds):
    assert all(check(policy_loss(loss, aggregation), seed).abs().max() > 0 for seed in seeds)


@pytest.mark.parametrize(("loss", "aggregation"), ALL)
def test_a_row_without_a_token_of_the_model_counts_nowhere(loss, aggregation):
    lengths = [3, 4, 2]
    given, columns = draw_rows(lengths, 0)
    columns["loss_mask"][3:7] = 0
    kept = torch.tensor([0, 1, 2, 7, 8])
    without = {name: column[[0, 2] if name == "is_given" else kept] for name, column in columns.items()}
    told, gradient = added_up(policy_loss(loss, aggregation), given, columns, lengths, [[0, 1, 2]])
    wanted, wanted_gradient = added_up(policy_loss(loss, aggregation), given[kept], without, [3, 2], [[0, 1]])
    assert told == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(gradient[kept], wanted_gradient)
    assert not gradient[3:7].any()


@pytest.mark.parametrize("correction", ["none", "tis"])
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_without_old_log_probs_the_policy_s_own_are_the_old_ones(loss, correction):
    config = AlgorithmConfig(loss=loss, correction=correction)
    given, columns = draw_rows([3, 5, 2], 0)
    columns["old_logprobs"] = given.clone()
    told = added_up(PolicyLossFunction(config=config, teacher=TEACHER), given, columns, [3, 5, 2], [[0, 1], [2]])
    del columns["old_logprobs"]
    own = PolicyLossFunction(config=config, teacher=TEACHER, has_old_logprobs=False)
    found = added_up(own, given, columns, [3, 5, 2], [[0, 1], [2]])
    of_a_ratio = {"ratio", "log_ratio", "k3", "clipped_high", "clipped_low", "clipped_dual"}
    assert found[0] == {name: value for name, value in told[0].items() if name not in of_a_ratio}  # there was none
    assert found[1].equal(told[1])
    assert found[1].abs().max() > 0


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", OTHERS)
def test_corrected_and_other_losses_are_those_of_the_whole_batch(name, seeds):
    for seed in seeds:
        check(OTHERS[name], seed)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_loss_of_one_s_own_is_that_of_the_whole_batch(aggregation, monkeypatch):
    own = PolicyLoss(source="here", compute=lambda given: -given.advantages * given.logprobs)
    monkeypatch.setitem(POLICY_LOSSES, "own", own)
    check(policy_loss("own", aggregation), 1)
