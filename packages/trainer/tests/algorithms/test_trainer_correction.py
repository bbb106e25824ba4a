import math

import pytest
import torch
from tensordict import TensorDict

from rl_engine.types import BatchCounts, ModelOutput
from rl_trainer.algorithms import PolicyLossFunction
from rl_trainer.algorithms.rollout_correction import (
    correction_weights,
    finished_metrics,
    mismatch_metrics,
    rejection_mask,
)
from rl_trainer.config.schema import AlgorithmConfig

ROLLOUT = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5]))
OLD = torch.log(torch.tensor([0.25, 0.9, 0.1, 0.5, 0.75]))  # ratios 0.5, 1.8, 0.2, 1, 1.5
MASK = torch.tensor([1, 1, 0, 1, 1])
ROWS = torch.tensor([0, 3, 5])


def weights(**options):
    defaults = {"correction": "tis", "level": "token", "low": 0.6, "high": 1.5}
    return correction_weights(OLD, ROLLOUT, MASK, ROWS, **(defaults | options))


def test_tis_truncates_each_token_s_ratio():
    torch.testing.assert_close(weights(), torch.tensor([0.5, 1.5, 0.0, 1.0, 1.5]))


def test_icepop_drops_what_is_outside():
    torch.testing.assert_close(weights(correction="icepop", high=1.6), torch.tensor([0.0, 0.0, 0.0, 1.0, 1.5]))


def test_a_sequence_has_the_product_of_its_model_tokens():
    torch.testing.assert_close(weights(level="sequence", high=9.0), torch.tensor([0.9, 0.9, 0.0, 1.5, 1.5]))


def test_masked_positions_are_never_looked_at():
    old, rollout = OLD.clone(), ROLLOUT.clone()
    old[2], rollout[2] = math.nan, math.inf
    for level in ("token", "sequence"):
        got = correction_weights(old, rollout, MASK, ROWS, correction="tis", level=level, low=0.5, high=2.0)
        assert got.isfinite().all()
    assert all(m.isfinite() for m in mismatch_metrics(old, rollout, MASK, None, 4).values())


def test_equal_policies_have_no_mismatch_and_weights_of_one():
    ones = correction_weights(OLD, OLD, MASK, ROWS, correction="icepop", level="sequence", low=0.9, high=1.1)
    assert ones.tolist() == [1, 1, 0, 1, 1]
    metrics = mismatch_metrics(OLD, OLD, MASK, ones, 4)
    assert metrics.pop("correction_mean") == 1
    assert all(value == 0 for value in metrics.values())


def test_mismatch_by_hand_and_shares_add_up():
    whole = mismatch_metrics(OLD, ROLLOUT, MASK, weights(), 4)
    ratios = [0.5, 1.8, 1.0, 1.5]
    assert math.isclose(whole["mismatch_k1"], -sum(math.log(r) for r in ratios) / 4, rel_tol=1e-5)
    assert math.isclose(whole["mismatch_k3"], sum(r - 1 - math.log(r) for r in ratios) / 4, rel_tol=1e-5)
    assert math.isclose(whole["mismatch_chi2"], sum(r * r - 1 for r in ratios) / 4, rel_tol=1e-5)
    assert math.isclose(whole["mismatch_abs"], (0.25 + 0.4 + 0 + 0.25) / 4, rel_tol=1e-5)
    halves = [mismatch_metrics(OLD[s], ROLLOUT[s], MASK[s], weights()[s], 4) for s in (slice(0, 3), slice(3, 5))]
    for name, value in whole.items():
        torch.testing.assert_close(halves[0][name] + halves[1][name], value)
    derived = finished_metrics({name: float(value) for name, value in whole.items()})
    perplexities = [math.exp(-sum(math.log(p) for p in some) / 4) for some in ([0.25, 0.9, 0.5, 0.75], [0.5] * 4)]
    assert math.isclose(derived["mismatch_ppl_ratio"], perplexities[0] / perplexities[1], rel_tol=1e-5)
    assert math.isclose(derived["mismatch_ess"], sum(ratios) ** 2 / sum(r * r for r in ratios) / 4, rel_tol=1e-5)


def test_truncated_share_and_bypass_mismatch_are_reported():
    offsets = torch.tensor([0, 5])
    columns = {"old_logprobs": OLD, "rollout_logprobs": ROLLOUT, "advantages": torch.ones(5), "loss_mask": MASK}
    rows = TensorDict(
        {name: torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in columns.items()}, batch_size=[1]
    )
    counts = BatchCounts(tokens=4.0, sequences=1.0)
    output = ModelOutput(token_logprobs=OLD, entropy=None, cu_seqlens=offsets, counts=counts)
    shares = {}
    for name, low in (("tis", 0.0), ("icepop", 0.6)):
        config = AlgorithmConfig(correction=name, correction_bounds=(low, 1.6))
        shares[name] = float(PolicyLossFunction(config=config)(output, rows)[1]["correction_clipped"])
    assert shares == {"tis": 0.25, "icepop": 0.5}  # 1.8; 0.5 and 1.8
    rows["old_logprobs"] = rows["rollout_logprobs"]
    _, metrics = PolicyLossFunction(config=AlgorithmConfig(old_logprobs="rollout"))(output, rows)
    assert math.isclose(metrics["mismatch_k1"], mismatch_metrics(OLD, ROLLOUT, MASK, None, 4)["mismatch_k1"])


def test_an_unlikely_sampler_token_leaves_the_mismatch_finite():
    found = mismatch_metrics(torch.zeros(1), torch.tensor([-200.0]), torch.ones(1), None, 1)
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize(
    ("level", "divergence", "low", "high", "kept"),
    [
        ("token", "k1", 0.5, 2.0, [1, 0, 0, 1, 0]),  # ratios 1, 3, -, 1, 1/3
        ("sequence", "k1", 0.3, 2.0, [0, 0, 0, 1, 1]),  # 3 and 1/3
        ("sequence_mean", "k1", 0.5, 2.0, [1, 1, 0, 1, 1]),  # their square roots
        ("sequence_max", "k1", 0.5, 10.0, [0, 0, 0, 0, 0]),  # 3 both ways, and 1/3 is too little
        ("sequence_max", "k1", 0.3, 3.1, [1, 1, 0, 1, 1]),
        ("token", "k2", 0.0, 0.5, [1, 0, 0, 1, 0]),  # 0, 0.603, -, 0, 0.603
        ("sequence", "k3", 0.0, 0.5, [0, 0, 0, 1, 1]),  # 0.901 and 0.432
    ],
)
def test_rejection_by_hand(level, divergence, low, high, kept):
    ratio = torch.tensor([1.0, 3.0, 1e9, 1.0, 1 / 3])
    mask, cu = torch.tensor([1, 1, 0, 1, 1]), torch.tensor([0, 3, 5])
    got = rejection_mask(ratio.log(), torch.zeros(5), mask, cu, level=level, divergence=divergence, low=low, high=high)
    assert got.int().tolist() == kept
