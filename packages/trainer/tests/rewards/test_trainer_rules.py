"""Rules by name: what each says of a completion, which options it has, and code that runs in a sandbox."""

import asyncio
import json

import pytest

from rl_trainer.config import load_config
from rl_trainer.config.schema import AgentSection, RewardPart, RewardSection
from rl_trainer.errors import DataError, InputError, PlanError, RewardError
from rl_trainer.planning.preflight import check
from rl_trainer.rewards import Scorer, resolve_reward
from rl_trainer.rewards.code import sandbox_facts
from rl_trainer.rewards.rules import ISOLATED, RULES, isolated
from rl_trainer.rewards.scorer import check_rule


def row(truth="4", source="math"):
    return {"data_source": source, "reward_model": {"ground_truth": truth}}


def parts(**rules):
    """A reward of rules: `name=(rule, options)`."""
    made = {name: RewardPart(kind="rule", rule=rule, options=options) for name, (rule, options) in rules.items()}
    return checked(RewardSection(parts=made))


def checked(section):
    for name, part in section.parts.items():
        check_rule(f"reward.parts.{name}", part)
    return section


def scores(section, *texts, truth="4"):
    async def main():
        scorer = Scorer(section)
        try:
            async with asyncio.timeout(240):
                await scorer.start()
                works = (scorer.score(text, row(truth)) for text in texts)
                return await asyncio.gather(*works, return_exceptions=True)
        finally:
            await scorer.close()

    return asyncio.run(main())


@pytest.mark.process
@pytest.mark.parametrize(
    ("rule", "options", "text", "truth", "reward"),
    [
        ("exact_match", {}, " 12\n", "12", 1.0),
        ("exact_match", {}, "1 2", "12", 0.0),
        ("exact_match", {}, "Paris", "paris", 0.0),
        ("exact_match", {"ignore_case": True}, "Paris", "paris", 1.0),
        ("math", {}, "so the answer is \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("math", {}, "\\boxed{3}", "4", 0.0),
        ("math", {}, "no answer at all", "4", 0.0),
        ("gsm8k", {}, "She has 5 and 67, so 72", "72", 1.0),
        ("gsm8k", {}, "\\boxed{72}", "72", 1.0),
        ("gsm8k", {}, "72 then 73", "72", 0.0),
        ("gsm8k", {}, "1,072", "72", 0.0),
        ("gsm8k", {}, "", "72", 0.0),
        ("regex", {"pattern": "(?i)yes"}, "well, YES", "-", 1.0),
        ("regex", {"pattern": "(?i)yes"}, "no", "-", 0.0),
        ("regex", {"pattern": "answer: (.*)"}, "answer: 3\nno, answer: 4 ", "4", 1.0),
        ("regex", {"pattern": "answer: (.*)"}, "answer: 4\nno, answer: 3", "4", 0.0),
        ("regex", {"pattern": "(4)?$"}, "5", "", 1.0),
        ("format", {}, "<think>so</think>\n<answer>4</answer>\n", "-", 1.0),
        ("format", {}, "<think>so</think> 4 <answer>4</answer>", "-", 0.0),
        ("format", {}, "<think>so</think><answer>4</answer>!", "-", 0.0),
        ("format", {}, "<answer>4</answer><think>so</think>", "-", 0.0),
        ("format", {}, "<think>a</think><think>b</think><answer>4</answer>", "-", 0.0),
        ("format", {}, "so</think><answer>4</answer>", "-", 0.0),
        ("format", {"is_open": True}, "so</think><answer>4</answer>", "-", 1.0),
        ("format", {"is_open": True}, "<think>so</think><answer>4</answer>", "-", 0.0),
        ("format", {"tags": ["a"]}, "<a>x</a>", "-", 1.0),
        ("format", {}, "<think></think><answer>4</answer>", "-", 0.0),
        ("format", {}, "<think>so</think><answer> \r\n</answer>", "-", 0.0),
        ("format", {"is_open": True}, "</think><answer>4</answer>", "-", 0.0),
        ("format", {}, "<think>so\r\n</think>\u2028<answer>4</answer>\x85", "-", 1.0),
        ("exact_match", {}, "a\r\nb\r\n", "a\nb", 1.0),
        ("exact_match", {}, "a\u2028b", "a\nb", 1.0),
        ("regex", {"pattern": r"(?m)^answer: (\d+)$"}, "answer: 4\r\ndone", "4", 1.0),
        ("regex", {"pattern": r"answer: (.*)"}, "answer: 4\u2028done", "4", 1.0),
        ("regex", {"pattern": r"answer: (.*)"}, "answer: 4 or 5", "4", 0.0),
    ],
)
def test_what_a_rule_says(rule, options, text, truth, reward):
    parts(only=(rule, options))
    assert RULES[rule](text, row(truth), **options) == reward


@pytest.mark.parametrize(("rule", "truth"), [("exact_match", None), ("math", None), ("gsm8k", None), ("math", "")])
def test_a_row_without_an_answer_has_no_score_rather_than_zero(rule, truth):
    with pytest.raises(RewardError, match="ground truth"):
        RULES[rule]("\\boxed{4}", row(truth))


def test_rules_by_data_source():
    assert resolve_reward("reasoning_gym/chain_sum") == "exact_match"
    assert resolve_reward("gsm8k") == resolve_reward("openai/gsm8k") == "gsm8k"
    assert resolve_reward("DigitalLearningGmbH/MATH-lighteval") == resolve_reward("aime2024") == "math"


@pytest.mark.parametrize("source", ["anything/else", "GSM8K", "my/gsm8k", "reasoning_gym", ""])
def test_an_unknown_data_source_has_no_rule_by_accident(source):
    told = f"data_source={source!r} have no rule of their own; known are reasoning_gym/.*, gsm8k, .*"
    with pytest.raises(DataError, match=told + r"reward\.parts\.answer\.rule=math"):
        resolve_reward(source)


@pytest.mark.promise("Rows of an unknown `data_source` are refused before anything starts")
@pytest.mark.parametrize(
    ("overrides", "is_known"),
    [
        ([], False),
        (["reward.parts.answer.kind=rule"], False),
        (["reward.parts.answer.kind=rule", "reward.parts.answer.rule=math"], True),
        (["reward.parts.answer.kind=loop"], True),
    ],
)
@pytest.mark.process
def test_an_unknown_data_source_is_refused_before_the_start(overrides, is_known):
    rows = [{"prompt": [{"role": "user", "content": "1 + 1"}], "data_source": "mine", "reward_model": {}}]
    config = load_config("quickstart", overrides)
    if is_known:
        check(config, rows)
    else:
        with pytest.raises(DataError, match="rows of data_source='mine' have no rule of their own"):
            check(config, rows)


def test_an_isolated_rule_is_the_one_of_its_name():
    asked = {"rule": "regex", "options": {"pattern": "a(.)"}, **row("b")}
    assert isolated("ab", asked) == 1.0
    assert set(ISOLATED) < set(RULES)


@pytest.mark.process
def test_named_rules_are_weighted_and_runaway_patterns_killed():
    made = {
        "right": RewardPart(kind="rule", rule="regex", options={"pattern": "<answer>(.*)</answer>"}, weight=2.0),
        "form": RewardPart(kind="rule", rule="format", weight=0.5),
        "own": RewardPart(kind="rule"),
    }
    (found,) = scores(RewardSection(parts=made), "<think>\\boxed{4}</think><answer>4</answer>")
    assert found.components == {"right": 1.0, "form": 1.0, "own": 1.0}
    assert found.reward == 3.5
    slow = RewardPart(kind="rule", rule="regex", options={"pattern": "(?:a+)+$"})
    late = scores(RewardSection(parts={"slow": slow}, timeout_s=1.0), "a" * 60 + "b")
    assert isinstance(late[0], TimeoutError)


ADD = "def add(a, b):\n    return a + b"
ECHO = "n = int(input())\nfor i in range(n):\n    print(i * i)"
ASSERTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0"


def fenced(code):
    return f"First:\n```python\nnonsense(\n```\nso\n```python\n{code}\n```\nDone."


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "truth", "reward"),
    [
        (ADD, ASSERTS, 1.0),
        (ADD.replace("+", "-"), ASSERTS, 0.0),
        (f"{ADD}\nimport sys\nsys.exit(0)", ASSERTS, 0.0),
        (f"{ADD}\nimport os\nos._exit(0)", ASSERTS, 0.0),
        ("def add(", ASSERTS, 0.0),
        (ECHO, {"inputs": ["3\n", "1\n"], "outputs": ["0\n1\n4", "0\n"]}, 1.0),
        (ECHO, json.dumps({"inputs": ["3\n"], "outputs": ["0 \n1\n4\n\n"]}), 1.0),
        (f"{ECHO}\nimport sys\nsys.exit(0)", {"inputs": ["1"], "outputs": ["0"]}, 1.0),
        ("import sys\nsys.stdout.write(input())", {"inputs": ["7"], "outputs": ["7"]}, 1.0),
        (ECHO, {"inputs": ["3\n", "1\n"], "outputs": ["0\n1\n4", "1\n"]}, 0.0),
    ],
)
def test_code_has_to_pass_its_tests(code, truth, reward):
    (found,) = scores(parts(works=("code", {"timeout_s": 60})), fenced(code), truth=truth)
    assert found.reward == reward


@pytest.mark.process
def test_code_that_hangs_or_takes_too_much_fails_its_test_alone():
    options = {"timeout_s": 60, "memory_mb": 256, "is_partial": True}
    tests = ["assert add(1, 1) == 2", "x = bytearray(1 << 30)", "assert 0", "assert add(2, 2) == 4"]
    found, plain = scores(parts(works=("code", options)), fenced(ADD), "no code", truth=tests)
    assert (found.reward, plain.reward) == (0.5, 0.0)
    (hung,) = scores(parts(works=("code", {"timeout_s": 0.5})), fenced(ADD), truth="while True: pass")
    assert hung.reward == 0.0
    (wrong,) = scores(parts(works=("code", {})), fenced(ADD), truth={"inputs": ["1"], "outputs": []})
    assert isinstance(wrong, RewardError)
    assert "of as many texts each" in str(wrong)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            {"rule": "exact"},
            "rule='exact' is not a rule; there are code, exact_match, format, gsm8k, math, qa, regex, verl/",
        ),
        ({"rule": "regex"}, r"options lacks pattern, without which there is no rule=regex"),
        ({"rule": "regex", "options": {"pattern": "("}}, r"options.pattern='\(' cannot be used: .* not a regular"),
        ({"rule": "regex", "options": {"pattern": "(a)(b)"}}, "has 2 groups; one, around the answer, or none"),
        ({"rule": "math", "options": {"pattern": "a"}}, "options.pattern does nothing with rule=math"),
        ({"rule": "format", "options": {"tags": []}}, "options.tags=.* cannot be used: .*at least 1"),
        ({"rule": "code", "options": {"timeout_s": 0}}, "options.timeout_s=0 cannot be used: .*greater than 0"),
        ({"rule": "code", "options": {"timeout_s": "5"}}, "options.timeout_s='5' cannot be used: .*valid number"),
        ({"rule": "code", "options": {"needs": ["net"]}}, "options.needs=.* cannot be used: .*'network'"),
        ({"options": {"pattern": "a"}}, "are those of a rule, and reward.parts.a.rule names none"),
        ({"kind": "loop", "rule": "math"}, "reward.parts.a.rule does nothing with kind=loop, only with rule"),
        ({"kind": "loop", "options": {"a": 1}}, "reward.parts.a.options does nothing with kind=loop"),
    ],
)
def test_an_unknown_rule_or_option_is_reported_before_the_start(part, words):
    with pytest.raises(PlanError, match=words):
        checked(RewardSection(parts={"a": RewardPart(**{"kind": "rule", **part})}))


def test_a_rule_by_command_line_needs_its_package_installed(monkeypatch):
    given = ["reward.parts.a.kind=rule", "reward.parts.a.rule=math"]
    config = load_config("quickstart", given)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="reward.parts.a.rule=math and its like need math-verify: pip install"):
        check(config, [])


@pytest.mark.process
def test_a_run_with_code_rewards_reports_the_sandbox_limits():
    graded = parts(works=("code", {}))
    ((what, how),) = sandbox_facts(graded, AgentSection())
    assert what == "code"
    assert "memory of all its processes is held by" in how
    assert sandbox_facts(RewardSection(), AgentSection(loop="tool", options={"tools": ["python"]}))[0][1] == how
    assert sandbox_facts(RewardSection(), AgentSection()) == []


@pytest.mark.parametrize(
    ("sandbox", "said"),
    [
        ("docker", "no sandbox 'docker' is installed"),
        ({"kind": "podman", "network": "none"}, "which network=none shuts off; leave it out"),
        ({"kind": "process", "image": "x"}, "sandbox process has no image 'x'"),
        ({"kind": "bubblewrap", "size": 3}, "sandbox bubblewrap has no 'size'; it has: file_bytes, folder_bytes"),
    ],
)
def test_a_sandbox_that_code_cannot_have_ends_the_plan(sandbox, said):
    graded = RewardSection(parts={"tests": RewardPart(kind="rule", rule="code", options={"sandbox": sandbox})})
    with pytest.raises(InputError, match=said):
        sandbox_facts(graded, AgentSection())
    with pytest.raises(InputError, match=said):
        sandbox_facts(RewardSection(), AgentSection(loop="tool", options={"tools": ["python"], "sandbox": sandbox}))
