"""Completions as Markdown: which code of a text is judged, and where thinking ends and the answer begins."""

import asyncio

import pytest

from rl_trainer.config.schema import RewardPart, RewardSection
from rl_trainer.errors import PlanError
from rl_trainer.rewards import Scorer, Thinking
from rl_trainer.rewards.completions import code_of
from rl_trainer.rewards.scorer import check_rule

CODE = "def add(a, b):\n    return a + b\n"


def fence(language="python", code=CODE, mark="```"):
    return f"{mark}{language}\n{code}{mark}\n"


@pytest.mark.parametrize(
    "text",
    [
        *(fence(name) for name in ("python", "Python", "python3", "PY", "py", "", " python", "python title=a.py")),
        fence("{.python}"),
        fence("python:solution.py"),
        fence("python").replace("\n", "\r\n"),
        fence("python").replace("\n", "\r"),
        fence(mark="~~~"),
        fence(mark="````"),
        "Install:\n" + fence("bash", "pip install numpy\n") + "Then:\n" + fence(),
        fence() + "It prints:\n" + fence("", "5\n"),
        fence() + "It prints:\n" + fence("text", "x = 5\n"),
        fence("") + "It prints:\n" + fence("", "5\n[1, 2]\n"),
        fence() + "Run it:\n" + fence("console", "$ python a.py\n"),
        fence("javascript", "let a = 1\n") + fence(),
        fence()[:-4],
        f"<answer>\n{fence()}</answer>",
        fence("python", "broken(\n") + fence(),
        "1. The code:\n\n   " + fence().replace("\n", "\n   "),
        "- so\n  " + fence().replace("\n", "\n  "),
        "   " + fence().replace("\n", "\n   "),
        "    " + fence().replace("\n", "\n    "),
        "> " + fence().rstrip().replace("\n", "\n> "),
    ],
)
def test_the_python_block_of_a_text_is_judged(text):
    assert code_of(text).replace("\r\n", "\n").rstrip() == CODE.rstrip()


@pytest.mark.parametrize("string", ['s = "```"', "s = '''a ``` b'''", 's = f"```python{1}```"'])
def test_a_fence_within_a_string_ends_no_block(string):
    assert code_of(fence("python", f"{string}\n{CODE}")) == f"{string}\n{CODE}"


@pytest.mark.parametrize("text", ["", "add = lambda a, b: a + b", "`add`", fence("bash", "ls\n"), fence("cpp")])
def test_a_text_without_a_block_of_python_has_no_code(text):
    assert code_of(text) is None


class Tokenizer:
    """Tokenizer that has a chat template, as text and rendered."""

    def __init__(self, template, prompt="<|assistant|>"):
        self.chat_template, self._prompt = template, prompt

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize, **kwargs):
        assert add_generation_prompt
        assert not tokenize
        return self._prompt + ("<think>\n\n</think>\n\n" if kwargs.get("enable_thinking") is False else "")


@pytest.mark.parametrize(
    ("tokenizer", "end", "text", "answer"),
    [
        (Tokenizer("{{ x }}</think>"), None, "<think>1</think>2", "2"),
        (Tokenizer("{{ x }}</think>"), None, "2", "2"),
        (Tokenizer("{{ x }}</think>"), None, "<think>1", ""),
        (Tokenizer("{{ x }}</think>", "<|assistant|><think>\n"), None, "1</think>2", "2"),
        (Tokenizer("{{ x }}</think>", "<|assistant|><think>\n"), None, "1", ""),
        (Tokenizer("{{ x }}</think>"), None, "<think>1</think>2<think>3", ""),
        (Tokenizer("{{ x }}</think>"), None, "<think>1</think>2<think>3</think>4", "4"),
        (Tokenizer("{{ x }}[/THINK]"), None, "[THINK]1[/THINK]2", "2"),
        (Tokenizer("{{ x }}[/THINK]"), None, "[THINK]1", ""),
        (Tokenizer("{{ x }}"), None, "<think>1</think>2", "2"),
        (Tokenizer(None), None, "<think>1</think>2", "2"),
        (Tokenizer("{{ x }}"), "</plan>", "<plan>1</plan>2", "2"),
        (Tokenizer("{{ x }}"), "</plan>", "2", "2"),
        (Tokenizer("{{ x }}"), "### Answer", "1 ### Answer 2", " 2"),
        (Tokenizer("{{ x }}"), "### Answer", "1", ""),
    ],
)
def test_the_answer_is_what_follows_the_thinking(tokenizer, end, text, answer):
    assert Thinking.of(tokenizer, end).answer(text) == answer


def test_a_prompt_that_closes_the_thinking_leaves_none_open():
    tokenizer = Tokenizer("{{ x }}</think>", "<|assistant|>")
    assert Thinking.of(tokenizer, None, {"enable_thinking": False}).answer("2") == "2"


def score(parts, text, truth, thinking=None, source="mine"):
    async def run():
        scorer = Scorer(RewardSection(parts=parts), thinking=thinking)
        try:
            async with asyncio.timeout(120):
                return await scorer.score(text, {"data_source": source, "reward_model": {"ground_truth": truth}})
        finally:
            await scorer.close()

    return asyncio.run(run())


@pytest.mark.process
@pytest.mark.parametrize("rule", ["math", "gsm8k", "exact_match"])
def test_rules_read_the_answer_alone(rule):
    part = {"a": RewardPart(kind="rule", rule=rule)}
    thinking = Thinking(start="<plan>", end="</plan>")
    assert score(part, "<plan>72</plan>73", "73", thinking).reward == 1
    assert score(part, "<plan>72</plan>73", "72", thinking).reward == 0
    assert score(part, "<plan>72", "72", thinking).reward == 0


@pytest.mark.process
def test_rules_of_form_and_those_of_verl_read_all():
    parts = {
        "form": RewardPart(kind="rule", rule="format", options={"tags": ["think", "answer"]}),
        "verl": RewardPart(kind="rule", rule="verl/default"),
    }
    text = "<think>#### 72</think><answer>73</answer>"
    assert score(parts, text, "72", source="openai/gsm8k").components == {"form": 1.0, "verl": 1.0}


@pytest.mark.process
@pytest.mark.parametrize(
    ("rule", "source", "text", "reward"),
    [
        (None, "apps", f"so\n{fence()}", 1.0),
        (None, "taco", fence(code=CODE.replace("+", "-")), 0.0),
        ("verl/default", "codecontests", CODE, 1.0),
        ("verl/prime_code", "mine", fence(code=CODE.replace("a + b", "3")), 0.5),
    ],
)
def test_rows_of_code_contests_call_their_function(rule, source, text, reward):
    truth = {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["[3]", "[1, 2]"]}
    part = {"a": RewardPart(kind="rule", rule=rule)}
    check_rule("reward.parts.a", part["a"])
    assert score(part, text, truth, source=source).reward == reward


@pytest.mark.process
def test_methods_and_lists_of_lines_are_read_as_verl_reads_them():
    method = fence(code="class Solution:\n    def add(self, a, b):\n        return (a, b)\n")
    part = {"a": RewardPart(kind="rule", rule="code")}
    assert score(part, method, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[1, 2]]}).reward == 1
    echo = fence(code="print(input())\nprint(input())\n")
    assert score(part, echo, {"inputs": [["1", "2"]], "outputs": [["1", "2"]]}).reward == 1
    assert score(part, echo, {"inputs": ["1\n2"], "outputs": ["1\x0c2"]}).reward == 0


def test_options_of_a_rule_of_verl_are_refused():
    with pytest.raises(PlanError, match="options.is_partial does nothing with rule=verl/prime_code"):
        check_rule("reward.parts.a", RewardPart(kind="rule", rule="verl/prime_code", options={"is_partial": True}))
