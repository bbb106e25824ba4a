"""Losses in plain torch, and what masks or reweighs any loss: values and gradients worked by hand."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rl_engine.testing import write_tiny_model
from rl_engine.types import BatchCounts, ModelOutput
from rl_trainer.algorithms import POLICY_LOSSES, PolicyLossFunction
from rl_trainer.algorithms.critic_losses import ProcessRewardLoss
from rl_trainer.algorithms.kl_controller import AdaptiveEntropy
from rl_trainer.algorithms.rollout_correction import correction_weights
from rl_trainer.algorithms.selection import beyond_moment, high_entropy
from rl_trainer.checkpoints import RunState
from rl_trainer.config import load_config
from rl_trainer.config.schema import AlgorithmConfig, TeacherSection
from rl_trainer.errors import ConfigError, PlanError
from rl_trainer.pipeline.roles import has_old_pass
from rl_trainer.planning.plan import make_plan
from rl_trainer.planning.preflight import check_engines
from rl_trainer.setup import entropy_of


def learned(lengths, *, ratios, advantages, old=-2.0, entropy=None, columns=None, per_row=None, **keys):
    """Loss, gradient of the log-probs, and metrics of rows whose tokens have these ratios to the old policy.

    The sampler is the old policy unless `columns` has its log-probs; token losses are added up unless `keys` says else.
    """
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    logprobs = (torch.tensor(ratios).log() + old).requires_grad_()
    values = {"old_logprobs": torch.full((len(ratios),), old), "advantages": torch.tensor(advantages)}
    values |= {"rollout_logprobs": values["old_logprobs"], "loss_mask": torch.ones(len(ratios))} | (columns or {})
    jagged = {name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in values.items()}
    mask = values["loss_mask"]
    counts = BatchCounts(tokens=float(mask.sum()), sequences=float(len(lengths)))
    output = ModelOutput(token_logprobs=logprobs, entropy=entropy, cu_seqlens=offsets, counts=counts)
    loss = PolicyLossFunction(config=AlgorithmConfig(**{"aggregation": "token-sum"} | keys), max_new_tokens=10)
    total, metrics = loss(output, TensorDict(jagged | (per_row or {}), batch_size=[len(lengths)]))
    total.backward()
    return total.item(), logprobs.grad, metrics


def test_each_token_is_weighed_by_its_own_recorded_logprob():
    """A completion of two versions, as over-sampling makes it: the sampler's log-probs of each token are its old ones.

    Policy 0.5, 0.3, 0.2; version 1 had sampled the first two with 0.4 and 0.2, version 2 the last with 0.25. With
    advantage 2 and clipping at 1.28 the ratios are 1.25, 1.5 -> 1.28, 0.8: loss -2 (1.25 + 1.28 + 0.8) = -6.66.
    """
    policy, recorded = [math.log(p) for p in (0.5, 0.3, 0.2)], [math.log(p) for p in (0.4, 0.2, 0.25)]
    ratios = [math.exp(p + 2.0) for p in policy]  # `learned` adds log-probs of -2
    columns = {"old_logprobs": torch.tensor(recorded)}
    keys = {"old_logprobs": "rollout", "loss_options": {"clip_low": 0.2, "clip_high": 0.28}}
    loss, grad, _ = learned([3], ratios=ratios, advantages=[2.0] * 3, columns=columns, **keys)
    assert loss == pytest.approx(-6.66, abs=1e-5)
    assert grad.tolist() == pytest.approx([-2.5, 0.0, -1.6], abs=1e-5)


@pytest.mark.promise("Losses, masks and selections by hand, and by their papers' limits")
def test_ce_gppo_by_hand():
    # Bounds 0.8 and 1.28. Token 1 fell with A < 0: 0.75 * 0.8 of it is kept; token 2 rose with A > 0: 1.28 of it. ppo
    # gives both no gradient. Tokens 3 and 4 moved the other way, and token 5 is within: -A rho, as ppo.
    ratios, advantages = [0.5, 1.5, 1.5, 0.5, 1.1], [-1.0, 2.0, -1.0, 2.0, 1.0]
    total, gradient, _ = learned([3, 2], ratios=ratios, advantages=advantages, loss="ce_gppo")
    terms = [0.75 * 0.8, -2 * 1.28, 1.5, -1.0, -1.1]
    assert total == pytest.approx(sum(terms), rel=1e-5)
    torch.testing.assert_close(gradient, torch.tensor(terms))
    plain = {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 0}
    clipped = learned([3, 2], ratios=ratios, advantages=advantages, loss="ppo", loss_options=plain)[1]
    torch.testing.assert_close(clipped, torch.tensor([0.0, 0.0, 1.5, -1.0, -1.1]))
    none = learned(
        [3, 2], ratios=ratios, advantages=advantages, loss="ce_gppo", loss_options={"beta_low": 0, "beta_high": 0}
    )
    torch.testing.assert_close(none[1], clipped)  # ppo, at the limit


def test_vespo_by_hand():
    # Row 1: W = 2 * 0.25 = 0.5, A = 1: W^2 exp(3 (1 - W)) = 0.25 e^1.5. Row 2: W = 2, A = -1: W^3 exp(2 (1 - W)) =
    # 8 e^-2. Row 3: W = 1, where every weight is 1.
    total, gradient, _ = learned(
        [2, 1, 1], ratios=[2.0, 0.25, 2.0, 1.0], advantages=[1.0, 1.0, -1.0, 0.5], loss="vespo"
    )
    first, second = 0.25 * math.exp(1.5), 8 * math.exp(-2)
    torch.testing.assert_close(gradient, torch.tensor([-first, -first, second, -0.5]))
    logs = [math.log(2) - 2, math.log(0.25) - 2, math.log(2) - 2, -2.0]
    assert total == pytest.approx(-first * (logs[0] + logs[1]) + second * logs[2] - 0.5 * logs[3], rel=1e-5)


def test_topr_by_hand():
    # A > 0: weight 1 whatever W. A < 0: W = 2 is cut to 1, W = 0.5 stays.
    _, gradient, _ = learned([1, 1, 2], ratios=[2.0, 2.0, 2.0, 0.25], advantages=[1.0, -1.0, -1.0, -1.0], loss="topr")
    torch.testing.assert_close(gradient, torch.tensor([-1.0, 1.0, 0.5, 0.5]))


@pytest.mark.parametrize("loss", ["vespo", "topr", "m2po"])
def test_sampler_ratios_ignore_the_old_policy(loss):
    columns = {"rollout_logprobs": torch.tensor([-2.0 - math.log(2), -2.0]), "selected": torch.zeros(2)}
    told = learned([1, 1], ratios=[1.0, 1.0], advantages=[-1.0, -1.0], columns=columns, loss=loss)[1]
    other = learned([1, 1], ratios=[1.0, 0.5], advantages=[-1.0, -1.0], columns=columns, loss=loss)[1]
    assert told[0] == pytest.approx({"vespo": 8 * math.exp(-2), "topr": 1.0, "m2po": 2.0}[loss], rel=1e-5)  # of W = 2
    assert told[1] == pytest.approx(1.0)
    assert other[1] == pytest.approx({"vespo": math.exp(1) / 8, "topr": 0.5, "m2po": 0.5}[loss], rel=1e-5)


def test_gspo_is_its_paper_s_token_variant():
    """2507.18071, equation 13: the completion's ratio in value, each token's own advantage and gradient."""
    # log-ratios 0.01 and 0.03: s = exp(0.02), within the bounds that are given; A differs by token.
    ratios, wide = [math.exp(0.01), math.exp(0.03)], {"clip_low": 0.1, "clip_high": 0.1}
    total, gradient, _ = learned([2], ratios=ratios, advantages=[1.0, -2.0], loss="gspo", loss_options=wide)
    s = math.exp(0.02)
    assert total == pytest.approx(-s * 1.0 + s * 2.0, rel=1e-5)
    torch.testing.assert_close(gradient, torch.tensor([-s, 2 * s]))
    # With one advantage it is gspo: the gradient of s A is s A / n at every token.
    keys = {"loss": "gspo", "loss_options": wide, "aggregation": "seq-mean-token-mean"}
    torch.testing.assert_close(learned([2], ratios=ratios, advantages=[1.0, 1.0], **keys)[1], torch.full((2,), -s / 2))


def test_luspo_is_gspo_added_up_over_tokens():
    """2602.05261: the completion's clipped term times its length, a mean over completions."""
    ratios, wide = [math.exp(0.01), math.exp(0.03), math.exp(-0.04)], {"clip_low": 0.1, "clip_high": 0.1}
    keys = {"loss": "gspo", "loss_options": wide, "aggregation": "seq-mean-token-sum"}
    total, gradient, _ = learned([2, 1], ratios=ratios, advantages=[1.0, 1.0, -1.0], **keys)
    first, second = math.exp(0.02), math.exp(-0.04)
    assert total == pytest.approx((-first * 2 + second * 1) / 2, rel=1e-5)
    torch.testing.assert_close(gradient, torch.tensor([-first / 2, -first / 2, second / 2]))


def test_luffy_by_hand():
    # Row 2 was given: p = e^-2, -A p / (p + 0.1), whose derivative by log p is -A 0.1 p / (p + 0.1)^2. Row 1 was
    # sampled: ppo, whose ratio 1.5 is clipped at 1.2.
    per_row = {"is_given": torch.tensor([False, True])}
    total, gradient, _ = learned(
        [2, 1], ratios=[1.5, 1.1, 1.0], advantages=[1.0, 1.0, 2.0], per_row=per_row, loss="luffy"
    )
    p = math.exp(-2)
    assert total == pytest.approx(-1.2 - 1.1 - 2 * p / (p + 0.1), rel=1e-5)
    torch.testing.assert_close(gradient, torch.tensor([0.0, -1.1, -2 * 0.1 * p / (p + 0.1) ** 2]))


def test_what_was_given_is_no_sample_of_the_server_s():
    """It counts as equal to it: neither corrected nor rejected, nor part of how far the two are apart."""
    sampler = {"rollout_logprobs": torch.tensor([-2.0 - math.log(1.5), 0.0])}
    keys = {"columns": sampler, "correction": "tis", "rejection": "token_k3", "loss": "ppo"}
    _, gradient, metrics = learned(
        [1, 1], ratios=[1.0, 1.0], advantages=[1.0, 1.0], per_row={"is_given": torch.tensor([False, True])}, **keys
    )
    torch.testing.assert_close(gradient, torch.tensor([-1.5, -1.0]))
    assert metrics["mismatch_k1"].item() == pytest.approx(-math.log(1.5) / 2, rel=1e-5)


def test_m2po_by_hand():
    # Tokens 1, 2 and 3 lead away (A > 0 and above the sampler, A < 0 and below), with second moments 0.01, 0.09, 0.25;
    # token 4 comes back, token 5 is not the model's. The mean of three is 0.117; without the largest 0.05; then 0.01.
    log_ratio = torch.tensor([0.1, 0.3, -0.5, 0.9, 3.0])
    advantages, mask = torch.tensor([1.0, 2.0, -1.0, -1.0, 1.0]), torch.tensor([1, 1, 1, 1, 0])
    for most, chosen in ((0.04, [0, 1, 1, 0, 0]), (0.051, [0, 0, 1, 0, 0]), (0.2, [0] * 5), (1e-9, [1, 1, 1, 0, 0])):
        assert beyond_moment(log_ratio, advantages, mask, m2_max=most).tolist() == chosen
    assert beyond_moment(log_ratio, advantages, torch.zeros(5), m2_max=0.04).tolist() == [0] * 5
    columns = {"selected": torch.tensor([0, 1])}
    keys = {"columns": columns, "loss": "m2po", "aggregation": "token-mean"}
    _, gradient, _ = learned([2], ratios=[3.0, 1.0], advantages=[1.0, 1.0], **keys)
    torch.testing.assert_close(gradient, torch.tensor([-1.5, 0.0]))  # not clipped; the mean is over both


def test_high_entropy_by_hand():
    entropy, mask = torch.tensor([0.1, 0.9, 0.5, 5.0, 0.3]), torch.tensor([1, 1, 1, 0, 1])
    for share, chosen in (
        (0.5, [0, 1, 1, 0, 0]),
        (0.2, [0, 1, 0, 0, 0]),
        (0.51, [0, 1, 1, 0, 1]),
        (1.0, [1, 1, 1, 0, 1]),
    ):
        assert high_entropy(entropy, mask, share=share).tolist() == chosen
    ties = high_entropy(torch.tensor([0.5, 0.5, 0.5, 0.0]), torch.ones(4), share=0.25)
    assert ties.tolist() == [1, 1, 1, 0]  # as uncertain as the one that was asked for
    assert high_entropy(entropy, torch.zeros(5), share=0.5).tolist() == [0] * 5


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 12, width=32), min_size=1, max_size=40), st.floats(0.01, 1))
def test_high_entropy_is_a_sort(values, share):
    entropy = torch.tensor(values)
    bound = entropy.sort(descending=True).values[max(math.ceil(share * len(values) - 1e-6), 1) - 1]
    assert high_entropy(entropy, torch.ones(len(values)), share=share).bool().equal(entropy >= bound)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=40), st.floats(1e-4, 2))
def test_what_m2po_leaves_is_small_and_no_more_could_be_left(values, most):
    log_ratio, advantages = torch.tensor(values), torch.ones(len(values))
    left = beyond_moment(log_ratio, advantages, torch.ones(len(values)), m2_max=most).bool()
    away, moments = log_ratio > 0, log_ratio.square()
    assert not left[~away].any()
    kept = moments[away & ~left].double()
    assert kept.numel() == 0 or kept.mean() <= most
    if left.any():
        smallest = moments[left].min()
        more = torch.cat([kept, moments[left & (moments == smallest)].double()])
        assert more.mean() > most


def test_top_entropy_takes_the_policy_gradient_alone():
    columns = {"is_high_entropy": torch.tensor([0, 1]), "ref_logprobs": torch.tensor([-2.5, -2.0])}
    keys = {"columns": columns, "top_entropy": 0.2, "kl_coef": 0.1, "kl_estimator": "k2", "aggregation": "token-mean"}
    _, gradient, _ = learned([2], ratios=[1.0, 1.0], advantages=[1.0, 1.0], **keys)
    torch.testing.assert_close(gradient, torch.tensor([0.1 * 0.5 / 2, -1.0 / 2]))  # the mean is over both


def test_the_off_policy_mask_by_hand():
    # Mean log(sampler / policy): row 1 (0.1 - 0.02) / 2 = 0.04; row 2 0.2, but A > 0; row 3 0.2 with A < 0: masked. The
    # KL of row 3 stays.
    ratios = [math.exp(-0.1), math.exp(0.02), math.exp(-0.2), math.exp(-0.2)]
    columns = {"ref_logprobs": torch.tensor([*(math.log(r) - 2 for r in ratios[:3]), -2.7])}
    keys = {"columns": columns, "kl_coef": 0.1, "kl_estimator": "k2", "loss_options": {"clip_dual": 0}}
    _, gradient, metrics = learned(
        [2, 1, 1], ratios=ratios, advantages=[-1.0, -1.0, 1.0, -1.0], off_policy_mask=0.1, **keys
    )
    torch.testing.assert_close(gradient, torch.tensor([ratios[0], ratios[1], -ratios[2], 0.1 * 0.5]))
    assert metrics["off_policy_masked"].item() == pytest.approx(1 / 4)


def test_the_unbiased_kl_by_hand():
    # rho k3 with rho = 2 and d = log(policy / ref) = log 2 - 2 + 2.5: k3 = exp(-d) - 1 + d; its derivative by the
    # log-prob is rho (k3 + 1 - exp(-d)) = rho d.
    d = math.log(2) + 0.5
    k3 = math.exp(-d) - 1 + d
    keys = {"columns": {"ref_logprobs": torch.tensor([-2.5])}, "kl_coef": 0.1, "kl_estimator": "k3*"}
    total, gradient, metrics = learned([1], ratios=[2.0], advantages=[0.0], **keys)
    assert total == pytest.approx(0.1 * 2 * k3, rel=1e-5)
    assert metrics["kl"].item() == pytest.approx(2 * k3, rel=1e-5)
    torch.testing.assert_close(gradient, torch.tensor([0.1 * 2 * d]))


def test_unbiased_kl_has_the_gradient_of_the_kl_as_a_mean():
    """Over all tokens that the sampler may draw, by their probability: that of KL(policy || reference)."""
    draw = torch.Generator().manual_seed(0)
    logits, sampler, ref = (torch.randn(6, generator=draw) for _ in range(3))
    sampler, ref = sampler.log_softmax(-1), ref.log_softmax(-1)
    exact = logits.clone().requires_grad_()
    policy = exact.log_softmax(-1)
    (policy.exp() * (policy - ref)).sum().backward()
    found = torch.zeros(6)
    for token in range(6):
        ratio = (logits.log_softmax(-1)[token] - sampler[token]).exp().item()
        columns = {"ref_logprobs": ref[token : token + 1]}
        keys = {"columns": columns, "kl_coef": 1.0, "kl_estimator": "k3*", "old": sampler[token].item()}
        gradient = learned([1], ratios=[ratio], advantages=[0.0], **keys)[1]
        score = torch.nn.functional.one_hot(torch.tensor(token), 6) - logits.softmax(-1)  # of log softmax
        found += sampler[token].exp() * gradient[0] * score
    torch.testing.assert_close(found, exact.grad, atol=1e-5, rtol=1e-4)


def test_the_adaptive_coefficient_of_the_entropy_by_hand():
    """2505.22312: up while the entropy is at most the target, down above it, and there is a bonus below it alone."""
    control = AdaptiveEntropy(coef=0.0, target=0.2, step=0.005)
    weights = []
    for entropy in (0.1, 0.2, 0.3, 0.1, 0.5, 0.5, 0.5, 0.5):
        weights.append(control.weight)
        control.update(entropy)
    assert weights == pytest.approx([0.0, 0.005, 0.01, 0.0, 0.01, 0.0, 0.0, 0.0])
    assert control.coef == 0.0
    control.update(0.0)  # nothing was learned from
    assert control.weight == 0.0
    fixed = AdaptiveEntropy(coef=0.3, target=0.0, step=0.005)
    fixed.update(5.0)
    assert fixed.weight == 0.3


def test_a_resumed_run_continues_its_kl_coefficient():
    config = load_config("gsm8k", ["algorithm.entropy_target=0.2", "algorithm.entropy_coef=0.1"])
    state = RunState(seed=0, num_rows=1)
    assert entropy_of(config, state).coef == 0.1
    assert entropy_of(config, dataclasses.replace(state, entropy_coef=0.0)).coef == 0.0
    fixed = load_config("gsm8k", ["algorithm.entropy_coef=0.1"])
    assert entropy_of(fixed, dataclasses.replace(state, entropy_coef=0.5)).coef == 0.1


def test_the_entropy_that_is_followed_is_a_mean_over_tokens():
    entropy = torch.tensor([0.2, 0.4, 0.9])
    keys = {"entropy": entropy, "entropy_target": 0.5, "aggregation": "seq-mean-token-sum"}
    columns = {"loss_mask": torch.tensor([1.0, 1.0, 0.0])}
    metrics = learned([2, 1], ratios=[1.0] * 3, advantages=[0.0] * 3, columns=columns, **keys)[2]
    assert metrics["token_entropy"].item() == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["algorithm.loss=vespo", "algorithm.correction=tis"], "corrects twice with algorithm.loss=vespo"),
        (["algorithm.loss=m2po", "algorithm.old_logprobs=rollout"], "set old_logprobs=recompute"),
        (["algorithm.loss=vespo", "algorithm.loss_options.lambda_neg=0"], "it has to be above 0"),
        (["algorithm.loss=ce_gppo", "algorithm.loss_options.beta_low=-1"], "it has to be 0 or more"),
        (["algorithm.top_entropy=0.2", "algorithm.old_logprobs=rollout"], "set old_logprobs=recompute"),
        (["algorithm.entropy_step=0.1"], "does nothing unless algorithm.entropy_target is positive"),
        (["algorithm.entropy_target=0.2", "algorithm.entropy_coef=2"], "keeps within 0 and 1"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_in_reward=true", "algorithm.kl_estimator=k3*"], "set kl_estimator=k3"),
        (
            ["algorithm.advantage_options.step_weight=1"],
            "is not read by algorithm.advantage=grpo; its options are: none",
        ),
        (["algorithm.loss=distill", "algorithm.off_policy_mask=0.1", "teacher.path=t"], "looks at no reward"),
        (["algorithm.loss=luffy"], "set batch.given"),
        (["batch.given=8"], "leaves none of batch.group_size=8 completions to be sampled"),
        (["batch.given=1", "algorithm.old_logprobs=rollout"], "completions that no server has sampled"),
        (
            ["batch.given=1", "algorithm.loss=topr"],
            "does not go with algorithm.loss=topr, whose ratio is that to the s",
        ),
        (["batch.given=1", "engine.router_replay=true"], "does not go with engine.router_replay"),
        (["teacher.coef=0.5"], "the policy is its own teacher: that takes teacher.context"),
        (["teacher.context=x", "engine.router_replay=true"], "its own teacher reads teacher.context too"),
        (["teacher.path=t", "teacher.by_source={a: u}", "teacher.url=http://x"], "teacher.url is one server"),
        (["teacher.path=t", "teacher.jsd_beta=0.1"], "does nothing unless teacher.divergence is jsd"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(settings, words):
    with pytest.raises((ConfigError, PlanError), match=words):
        make_plan(load_config("gsm8k", ["algorithm.loss_options={}", *settings]))


def test_a_sampler_ratio_loss_learns_from_older_weights():
    asynchronous = ["algorithm.loss_options={}", "pipeline=fully_async"]
    with pytest.raises(PlanError, match="learns from tokens of older weights"):
        make_plan(load_config("gsm8k", asynchronous))
    make_plan(load_config("gsm8k", [*asynchronous, "algorithm.loss=topr"]))


def test_entropies_before_the_update_take_a_pass_before_it():
    one_update = ["batch.mini_batch_size=64", "batch.batch_size=64"]
    assert not has_old_pass(load_config("gsm8k", one_update))
    assert has_old_pass(load_config("gsm8k", [*one_update, "algorithm.top_entropy=0.2"]))


ROWS = {"luffy": {"is_given": torch.tensor([True, True])}}
COLUMNS = {name: {"selected": torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])} for name in ("clip_cov", "m2po", "kl_cov")}


@pytest.mark.parametrize("loss", [name for name, loss in POLICY_LOSSES.items() if name != "distill"])
def test_a_row_without_advantages_has_no_gradient(loss):
    """Exactly 0, whatever the ratios; a loss that is otherwise is not said to scale with the advantage."""
    found = learned(
        [3, 2], ratios=[0.5, 1.5, 1.1, 0.2, 3.0], advantages=[1.0, -1.0, 2.0, 0.0, 0.0], loss=loss,
        columns=COLUMNS.get(loss), per_row=ROWS.get(loss),
    )  # fmt: skip
    gradient = found[1]
    assert bool((gradient[3:] == 0).all()) == POLICY_LOSSES[loss].scales_with_advantage
    assert bool((gradient[:3] != 0).any())


def test_what_pulls_rows_without_advantages_is_named():
    offsets = torch.tensor([0, 2, 4, 5])
    columns = {"advantages": torch.tensor([0.0, -0.0, 0.0, 2.0, 1.0]), "loss_mask": torch.tensor([1, 1, 1, 1, 0])}
    rows = {name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in columns.items()}
    rows = TensorDict(rows, batch_size=[3])

    def of(**keys):
        teacher = keys.pop("teacher", None)
        return PolicyLossFunction(config=AlgorithmConfig(**keys), teacher=teacher)

    assert of().has_gradient(rows).tolist() == [False, True, False]
    assert of(kl_coef=0.1, kl_in_reward=True).has_gradient(rows).tolist() == [False, True, False]
    for keys, why in (
        ({"kl_coef": 0.1}, "algorithm.kl_coef is 0.1"),
        ({"entropy_coef": 0.01}, "there is an entropy bonus"),
        ({"loss": "dro"}, "algorithm.loss is dro"),
        ({"loss": "kl_cov"}, "algorithm.loss is kl_cov"),
        ({"teacher": TeacherSection(path="x")}, "there is a teacher"),
    ):
        assert of(**keys).term_without_advantage == why
        assert of(**keys).has_gradient(rows) is None


@pytest.mark.process
def test_the_plan_says_which_rows_have_a_backward_pass(tmp_path):
    model = str(write_tiny_model(tmp_path))
    config = load_config("quickstart", ["model.warmup=null", f"model.path={model}"])
    assert check_engines(config, model, is_made=True)["backward_pass"] == "of rows with an advantage"
    config = load_config("quickstart", ["model.warmup=null", f"model.path={model}", "algorithm.kl_coef=0.01"])
    assert check_engines(config, model, is_made=True)["backward_pass"] == "of all rows: algorithm.kl_coef is 0.01"


def test_weights_and_selections_of_tokens_multiply():
    """Tokens left out by their entropy have no gradient whatever weight rollout correction gives them."""
    ratios, advantages = [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]
    sampler = torch.tensor([-2.5, -2.5, -1.5])  # the trainer's are -2: weights e^0.5 twice, and e^-0.5
    columns = {"is_high_entropy": torch.tensor([1.0, 0.0, 1.0]), "rollout_logprobs": sampler}
    keys = {"correction": "tis", "correction_bounds": [0.0, 2.0], "top_entropy": 0.5, "loss": "reinforce"}
    _, gradient, _ = learned([3], ratios=ratios, advantages=advantages, columns=columns, **keys)
    torch.testing.assert_close(gradient, torch.tensor([-math.exp(0.5), 0.0, -math.exp(-0.5)]))


@pytest.mark.parametrize(("logprob", "accuracy"), [(-1.0, 1.0), (-2.0, 0.0), (-3.0, 0.0)])
def test_a_process_reward_model_is_right_above_one_half(logprob, accuracy):
    """Its log-ratio to a reference of -2 has to be above 0 where the outcome is 1; at 0 it has not decided."""
    offsets = torch.tensor([0, 1])
    columns = {"loss_mask": [1.0], "ref_logprobs": [-2.0], "rewards": [1.0]}
    rows = {
        name: torch.nested.nested_tensor_from_jagged(torch.tensor(values), offsets) for name, values in columns.items()
    }
    counts = BatchCounts(tokens=1.0, sequences=1.0)
    output = ModelOutput(token_logprobs=torch.tensor([logprob]), cu_seqlens=offsets, counts=counts)
    _, metrics = ProcessRewardLoss()(output, TensorDict(rows, batch_size=[1]))
    assert float(metrics["process_accuracy"]) == accuracy


def test_icepop_keeps_the_ratios_at_its_bounds():
    old = torch.tensor([0.5, 1.0, 2.0, 2.5]).log()
    weights = correction_weights(
        old, torch.zeros(4), torch.ones(4), torch.tensor([0, 4]), correction="icepop", level="token", low=0.5, high=2.0
    )
    torch.testing.assert_close(weights, torch.tensor([0.5, 1.0, 2.0, 0.0]))
