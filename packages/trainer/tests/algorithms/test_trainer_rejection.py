"""A rejected token has no term of the loss left, and bypass mode corrects and rejects by the policy under update."""

import math
from itertools import cycle, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rl_engine.types import BatchCounts, ModelOutput
from rl_trainer.algorithms import POLICY_LOSSES, PolicyLoss, PolicyLossFunction
from rl_trainer.algorithms.rollout_correction import configured_weights, drop_rejected, finished_metrics
from rl_trainer.config import load_config
from rl_trainer.config.schema import AlgorithmConfig, TeacherSection
from rl_trainer.errors import PlanError
from rl_trainer.pipeline.roles import has_old_pass
from rl_trainer.planning.plan import make_plan

AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSSES = sorted(POLICY_LOSSES)
CASES = sorted({*zip(LOSSES, cycle(AGGREGATIONS), strict=False), *product(["ppo"], AGGREGATIONS)})
"""Every loss, and every aggregation with one of them: they are computed one after the other."""
TEACHER = TeacherSection(path="nowhere", divergence="mixed", coef=0.5)
FAR = 1.0
"""Log ratio trainer / sampler of a token that is rejected, whose ratio of 2.7 is above 2."""


def draw(lengths, seed):
    """Columns, and the tokens that `token_k1` rejects; the last row is rejected whole."""
    generator = torch.Generator().manual_seed(seed)
    num = sum(lengths)

    def normal(*size):
        return torch.randn(num, *size, generator=generator) * 0.3

    old = normal() - 1
    mask = normal() > -0.2
    far = normal() > 0.1
    far[num - lengths[-1] :] = True
    columns = {"old_logprobs": old, "rollout_logprobs": old - FAR * far + 0.1 * normal(), "loss_mask": mask.long()}
    columns |= {"ref_logprobs": old + normal(), "teacher_logprobs": old + normal(), "advantages": 3 * normal()}
    columns |= {"teacher_candidate_logprobs": normal(4).log_softmax(-1)[:, :3], "selected": (normal() > 0).long()}
    return columns, old + normal(), far & mask


def learn(config, columns, logprobs, lengths, *, counts=None, **options):
    """Loss, metrics, and the gradients of log-probs and entropies."""
    offsets = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    rows = {name: torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in columns.items()}
    rows["is_given"] = torch.zeros(len(lengths), dtype=torch.bool)
    batch = TensorDict(rows, batch_size=[len(lengths)])
    drop_rejected(config, batch)
    mask = batch["loss_mask"].values().bool()
    alive = float(sum(part.any() for part in mask.split(lengths)))
    leaf, entropy = logprobs.clone().requires_grad_(), torch.ones_like(logprobs).requires_grad_()
    output = ModelOutput(
        token_logprobs=leaf,
        token_candidate_logprobs=leaf[:, None] - torch.tensor([1.0, 2.0, 3.0]),
        entropy=entropy,
        cu_seqlens=offsets,
        counts=counts or BatchCounts(tokens=float(mask.sum()), sequences=alive),
    )
    loss, metrics = PolicyLossFunction(config=config, max_new_tokens=7, **options)(output, batch)
    loss.backward()
    return loss.detach(), {name: float(value) for name, value in metrics.items()}, leaf.grad, entropy.grad


@pytest.mark.parametrize(("loss", "aggregation"), [*CASES, ("own", "token-mean")])
def test_a_rejected_token_has_no_term_and_others_keep_theirs(loss, aggregation, monkeypatch):
    """Policy, reference KL, entropy, KL-Cov, teacher: as if it had not been there, but for the counts."""
    own = PolicyLoss(source="here", compute=lambda given: -given.advantages * given.logprobs)
    monkeypatch.setitem(POLICY_LOSSES, "own", own)
    lengths = [5, 3, 6, 4]
    columns, logprobs, rejected = draw(lengths, 0)
    keys = {"loss": loss, "aggregation": aggregation, "kl_coef": 0.3, "entropy_coef": 0.2, "correction": "tis"}
    config = AlgorithmConfig(**keys, rejection="token_k1")
    total, metrics, gradient, entropies = learn(config, columns, logprobs, lengths, teacher=TEACHER)
    assert not gradient[rejected].any()
    assert not entropies[rejected].any()
    mask = columns["loss_mask"].bool()
    assert metrics["rejected"] == pytest.approx(float(rejected.sum() / mask.sum()))
    without = columns | {"loss_mask": (mask & ~rejected).long()}
    counts = BatchCounts(tokens=float(mask.sum()), sequences=float(sum(part.any() for part in mask.split(lengths))))
    plain = learn(AlgorithmConfig(**keys), without, logprobs, lengths, counts=counts, teacher=TEACHER)
    if aggregation != "seq-mean-token-mean":  # whose rows divide by tokens that are out of this mask
        torch.testing.assert_close(total, plain[0])
        torch.testing.assert_close(gradient, plain[2])
        torch.testing.assert_close(entropies, plain[3])
    else:
        left = [float(part.sum()) for part in (mask & ~rejected).split(lengths)]
        share = torch.cat(
            [
                torch.full((n,), a / max(float(m.sum()), 1))
                for n, a, m in zip(lengths, left, mask.split(lengths), strict=True)
            ]
        )
        torch.testing.assert_close(gradient, plain[2] * share)
        torch.testing.assert_close(entropies, plain[3] * share)


@pytest.mark.parametrize(("loss", "aggregation"), CASES)
def test_counted_after_rejection_the_batch_is_as_if_without(loss, aggregation):
    lengths = [5, 3, 6, 4]
    columns, logprobs, rejected = draw(lengths, 1)
    keys = {"loss": loss, "aggregation": aggregation, "kl_coef": 0.3, "entropy_coef": 0.2}
    config = AlgorithmConfig(**keys, rejection="token_k1", rejection_counts="after")
    found = learn(config, columns, logprobs, lengths, teacher=TEACHER)
    mask = columns["loss_mask"].bool()
    without = columns | {"loss_mask": (mask & ~rejected).long()}
    wanted = learn(AlgorithmConfig(**keys), without, logprobs, lengths, teacher=TEACHER)
    for ours, theirs in zip((found[0], *found[2:]), (wanted[0], *wanted[2:]), strict=True):
        torch.testing.assert_close(ours, theirs)
    share = finished_metrics(found[1])["rejected"]
    assert share == pytest.approx(float(rejected.sum() / mask.sum()))


def test_the_counts_that_a_mean_divides_by_by_hand():
    """-A logprob = 1, 2, 3 | 4; the second and the last token are rejected."""
    columns = {
        "old_logprobs": torch.zeros(4),
        "rollout_logprobs": torch.tensor([0.0, -1.0, 0.0, 1.0]),
        "advantages": torch.ones(4),
        "loss_mask": torch.ones(4, dtype=torch.long),
    }
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    wanted = {
        "before": {"token-mean": 4 / 4, "seq-mean-token-sum": 4 / 2, "seq-mean-token-mean": (4 / 3 + 0) / 2},
        "after": {"token-mean": 4 / 2, "seq-mean-token-sum": 4 / 1, "seq-mean-token-mean": 4 / 2},
    }
    for counts, by_aggregation in wanted.items():
        for aggregation, value in by_aggregation.items():
            config = AlgorithmConfig(
                loss="reinforce", aggregation=aggregation, rejection="token_k1", rejection_counts=counts
            )
            assert learn(config, columns, logprobs, [3, 1])[0].item() == pytest.approx(value)


@pytest.mark.parametrize("counts", ["before", "after"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_that_is_rejected_whole_teaches_nothing(aggregation, counts):
    columns, logprobs, _ = draw([4, 2], 4)
    columns["rollout_logprobs"] = columns["old_logprobs"] - 5.0
    config = AlgorithmConfig(aggregation=aggregation, rejection="token_k1", rejection_counts=counts, kl_coef=0.1)
    total, metrics, gradient, entropies = learn(config, columns, logprobs, [4, 2])
    assert total == 0
    assert all(math.isfinite(value) for value in finished_metrics(metrics).values())
    assert not gradient.any()
    assert not entropies.any()


@pytest.mark.process
@settings(max_examples=40, deadline=None)
@given(
    loss=st.sampled_from(LOSSES),
    aggregation=st.sampled_from(AGGREGATIONS),
    counts=st.sampled_from(["before", "after"]),
    rejection=st.sampled_from(["token_k1", "token_k3", "sequence_k2", "sequence_mean_k1", "sequence_max_k3"]),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_no_token_outside_the_accepted_ones_is_looked_at(loss, aggregation, counts, rejection, lengths, seed):
    """What stands at rejected tokens changes neither loss nor gradient, where they stay rejected."""
    columns, logprobs, _ = draw(lengths, seed)
    keys = {"loss": loss, "aggregation": aggregation, "rejection_counts": counts, "kl_coef": 0.3, "entropy_coef": 0.2}
    config = AlgorithmConfig(**keys, rejection=rejection, rejection_bounds=(0.5 if rejection[-1] == "1" else 0, 1.5))
    total, _, gradient, entropies = learn(config, columns, logprobs, lengths)
    lost = entropies == 0
    other = {name: columns[name] + lost * 7.0 for name in ("ref_logprobs", "advantages")}
    again = learn(config, columns | other, logprobs, lengths)
    torch.testing.assert_close(again[0], total)
    torch.testing.assert_close(again[2], gradient)
    assert not gradient[lost].any()


def test_ratio_metrics_are_means_over_accepted_tokens():
    columns, _, rejected = draw([5, 3, 6, 4], 2)
    accepted = columns["loss_mask"].bool() & ~rejected
    logprobs = columns["old_logprobs"] + math.log(1.1)
    for counts in ("before", "after"):
        config = AlgorithmConfig(rejection="token_k1", rejection_counts=counts)
        metrics = finished_metrics(learn(config, columns, logprobs, [5, 3, 6, 4])[1])
        assert metrics["ratio"] == pytest.approx(1.1, rel=1e-5)
        assert metrics["rejected"] == pytest.approx(1 - float(accepted.sum() / columns["loss_mask"].sum()))


def test_the_kl_cov_penalty_is_weighted_like_its_objective():
    """Tokens with ratios trainer / sampler of 0.5 and 2; the second is selected, and pays 0.25 times its distance."""
    old = torch.tensor([-1.0, -1.0])
    columns = {
        "old_logprobs": old,
        "rollout_logprobs": old - torch.tensor([0.5, 2.0]).log(),
        "advantages": torch.zeros(2),
        "loss_mask": torch.ones(2, dtype=torch.long),
        "selected": torch.tensor([0, 1]),
    }
    options = {"loss": "kl_cov", "loss_options": {"kl_coef": 0.25}}
    for correction, weight in (("none", 1.0), ("tis", 1.5)):
        bounds = None if correction == "none" else (0.0, 1.5)
        config = AlgorithmConfig(**options, correction=correction, correction_bounds=bounds)
        loss, metrics, gradient, _ = learn(config, columns, old + 0.4, [2])
        assert loss.item() == pytest.approx(0.25 * 0.4 * weight / 2, rel=1e-5)
        assert metrics["policy_loss"] == pytest.approx(loss.item())
        assert gradient.tolist() == pytest.approx([0.0, 0.25 * weight / 2])


@pytest.mark.parametrize(("loss", "c"), [("ppo", 3.0), ("gspo", None), ("clip_cov", None)])
def test_the_dual_clip_is_on_where_its_paper_has_it(loss, c):
    """A token of ratio 10 and advantage -1 costs 10, or 3 by the dual clip; asked for, every one has it."""
    columns = {
        "old_logprobs": torch.tensor([-3.0]),
        "rollout_logprobs": torch.tensor([-3.0]),
        "advantages": torch.tensor([-1.0]),
        "loss_mask": torch.ones(1, dtype=torch.long),
        "selected": torch.zeros(1, dtype=torch.long),
    }
    logprobs = torch.tensor([-3.0 + math.log(10.0)])
    value, metrics, *_ = learn(AlgorithmConfig(loss=loss), columns, logprobs, [1])
    assert value.item() == pytest.approx(c or 10.0, rel=1e-5)
    assert ("clipped_dual" in metrics) == (c is not None)
    asked = AlgorithmConfig(loss=loss, loss_options={"clip_dual": 4.0})
    assert learn(asked, columns, logprobs, [1])[0].item() == pytest.approx(4.0)


BYPASS = ["pipeline=sync", "algorithm.loss_options={}", "algorithm.old_logprobs=rollout"]


def bypass_columns(**more):
    """The sampler's log-probs stand for the old ones, as the worker names them."""
    rollout = torch.tensor([-1.0, -1.0, -2.0])
    return {"old_logprobs": rollout, "advantages": -torch.ones(3), "loss_mask": torch.ones(3, dtype=torch.long), **more}


def test_reinforce_takes_importance_weights_in_bypass_mode():
    config = AlgorithmConfig(loss="reinforce", old_logprobs="rollout", correction="tis", correction_bounds=(0.0, 1.5))
    ratios = torch.tensor([0.5, 1.2, 9.0])
    logprobs = bypass_columns()["old_logprobs"] + ratios.log()
    loss, metrics, gradient, _ = learn(config, bypass_columns(), logprobs, [3])
    weights = torch.tensor([0.5, 1.2, 1.5])
    assert loss.item() == pytest.approx(float((weights * logprobs).mean()), rel=1e-5)
    torch.testing.assert_close(gradient, weights / 3)  # the weights carry none
    assert metrics["correction_mean"] == pytest.approx(float(weights.mean()))
    assert metrics["correction_clipped"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "distill"])
def test_bypass_mode_rejects_by_the_policy_under_update(loss):
    config = AlgorithmConfig(loss=loss, old_logprobs="rollout", rejection="token_k1", rejection_bounds=(0.8, 1.3))
    logprobs = bypass_columns()["old_logprobs"] + torch.tensor([0.9, 1.2, 9.0]).log()
    columns = bypass_columns(selected=torch.tensor([1, 0, 0]) * (loss == "kl_cov"))
    _, metrics, gradient, entropies = learn(config, columns, logprobs, [3])
    assert gradient[:2].all()
    assert gradient[2] == 0
    assert entropies.tolist()[2] == 0
    assert metrics["rejected"] == pytest.approx(1 / 3)


@pytest.mark.process
def test_what_bypass_mode_takes_and_refuses():
    make_plan(load_config("quickstart", [*BYPASS, "algorithm.rejection=sequence_mean_k3"]))
    make_plan(load_config("quickstart", [*BYPASS, "algorithm.loss=reinforce", "algorithm.correction=sequence_tis"]))
    with pytest.raises(PlanError, match=r"corrects twice: .* algorithm.loss=ppo .* or correction=none"):
        make_plan(load_config("quickstart", [*BYPASS, "algorithm.correction=tis"]))
    keys = ["algorithm.rejection=token_k1", "algorithm.rejection_counts=after"]
    with pytest.raises(PlanError, match="rejection_counts=after counts what is left before the update"):
        make_plan(load_config("quickstart", [*BYPASS, *keys]))
    with pytest.raises(PlanError, match="algorithm.loss=reinforce has no ratio to correct for it"):
        make_plan(load_config("quickstart", [*BYPASS, "pipeline=one_step_off", "algorithm.loss=reinforce"]))
    with pytest.raises(PlanError, match="rejection_counts=after does nothing unless algorithm.rejection is chosen"):
        make_plan(load_config("quickstart", ["algorithm.rejection_counts=after"]))


def test_counting_after_rejection_takes_a_pass_of_its_own():
    size = load_config("quickstart", []).batch.batch_size
    keys = ["algorithm.old_logprobs=recompute", "algorithm.rejection=token_k1", f"batch.mini_batch_size={size}"]
    assert not has_old_pass(load_config("quickstart", keys))
    assert has_old_pass(load_config("quickstart", [*keys, "algorithm.rejection_counts=after"]))


def test_weights_are_those_of_the_configuration():
    columns, _, _ = draw([5, 3], 3)
    given = columns["old_logprobs"], columns["rollout_logprobs"], columns["loss_mask"], torch.tensor([0, 5, 8])
    assert configured_weights(AlgorithmConfig(), *given) is None
    config = AlgorithmConfig(correction="tis", correction_bounds=(0.0, 1.1))
    found = configured_weights(config, *given)
    ratio = (columns["old_logprobs"] - columns["rollout_logprobs"]).exp().clamp(max=1.1)
    torch.testing.assert_close(found, ratio * columns["loss_mask"])
