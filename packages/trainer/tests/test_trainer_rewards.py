import asyncio
import importlib

import pytest

from rl_trainer.rewards import Scorer, resolve_reward, rules
from rl_trainer.rewards.rules import exact_match, gsm8k_answer, math_equal


def row(truth, source="mine"):
    return {"data_source": source, "reward_model": {"ground_truth": truth}}


def test_exact_match_ignores_only_outer_space():
    assert exact_match(" 12\n", row("12")) == 1.0
    assert exact_match("1 2", row("12")) == 0.0


@pytest.mark.parametrize(
    ("text", "truth", "reward"),
    [
        ("so the answer is \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("no answer at all", "4", 0.0),
    ],
)
def test_math_equal(text, truth, reward):
    assert math_equal(text, row(truth)) == reward


@pytest.mark.parametrize(
    ("text", "reward"),
    [("She has 5 and 67, so 72", 1.0), ("\\boxed{72}", 1.0), ("72 then 73", 0.0), ("1,072", 0.0), ("", 0.0)],
)
def test_gsm8k_takes_the_box_or_the_last_number(text, reward):
    assert gsm8k_answer(text, row("72")) == reward


def test_rules_by_data_source():
    assert resolve_reward("reasoning_gym/chain_sum") is exact_match
    assert resolve_reward("gsm8k") is gsm8k_answer
    assert resolve_reward("anything/else") is math_equal


def test_a_stuck_rule_is_killed_and_the_next_score_works(monkeypatch, tmp_path):
    (tmp_path / "stuck_rule.py").write_text("import time\n\ndef stuck(text, row):\n    time.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    stuck = importlib.import_module("stuck_rule").stuck

    async def main():
        scorer = Scorer(timeout_s=20.0)
        assert await scorer.score("\\boxed{4}", row("4")) == 1.0
        scorer._timeout_s = 0.5
        with monkeypatch.context() as patch:
            patch.setattr("rl_trainer.rewards.scorer.resolve_reward", lambda source: stuck)
            patch.setattr("rl_trainer.rewards.scorer.ISOLATED", (stuck,))
            with pytest.raises(TimeoutError, match="stuck did not score a text of 1 characters within 0.5 s"):
                await scorer.score("x", row("4"))
        assert scorer._pool is None
        scorer._timeout_s = 20.0
        assert await scorer.score("\\boxed{5}", row("4")) == 0.0
        scorer.close()

    asyncio.run(main())


def test_every_isolated_rule_is_importable_by_name():
    assert all(getattr(rules, rule.__name__) is rule for rule in rules.ISOLATED)
