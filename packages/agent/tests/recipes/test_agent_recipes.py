"""Tasks of the recipes: rows, demonstrations that the loops would show the same way, and rewards."""

import asyncio
import math
import shutil
from collections import Counter
from functools import cache
from types import SimpleNamespace

import pytest

from rl_agent import PluginError, create_loop, validate_output
from rl_agent.recipes import forms, kuhn, lake, repair, repair_agent, search
from rl_agent.testing import FakeGenerator, FakeTokenizer

TOKENIZER = FakeTokenizer()
MODULES = {"gym": lake, "search": search, "self_play": kuhn, "harness": repair, "gui": forms}
LOOPS = {
    "gym": ("gym", {"environment": "gymnasium:FrozenLake-v1"}),
    "search": ("tool", {"tools": ["search"]}),
    "harness": ("harness", {"command": "python -S agent.py"}),
    "gui": ("gui", {}),
}
HAS_BROWSER = shutil.which("chromium") is not None


@cache
def rows_of(name, seed=0, eval_size=12, **options):
    config = SimpleNamespace(format=name, eval_size=eval_size, options=options)
    return MODULES[name].rows(config, seed=seed)


def task_of(name, row):
    """What a policy could learn by heart: the map, the fact, the deal, the kind of bug, the labels."""
    return {
        "gym": lambda: str(row["environment_args"]["desc"]),
        "self_play": lambda: row["environment_args"]["deal"] + row["seat"],
        "search": lambda: row["fact"],
        "harness": lambda: row["kind"],
        "gui": lambda: row["html"],
    }[name]()


@pytest.mark.process
@pytest.mark.parametrize("name", MODULES)
def test_rows_follow_from_the_seed_and_the_held_out_do_not(name):
    first, again, other = rows_of(name), rows_of.__wrapped__(name), rows_of(name, seed=1)
    assert first == again
    assert first.train != other.train
    assert first.eval == other.eval
    assert len(first.eval) == 12
    assert not any("demonstrations" in row for row in first.eval)
    assert sum(len(row["demonstrations"]) for row in first.train) == (8000 if name == "gui" else 2000)


@pytest.mark.process
@pytest.mark.parametrize("name", ["gym", "harness", "gui", "search"])
def test_no_held_out_task_is_trained_on(name):
    held_out = {task_of(name, row) for row in rows_of(name, eval_size=24).eval}
    for rows in (rows_of(name), rows_of(name, seed=1)):  # made once, by the test above
        trained = {task_of(name, row) for row in rows.train}
        assert not trained & held_out
        assert len(trained) >= 8


@pytest.mark.parametrize("name", MODULES)
def test_rows_of_a_recipe_have_no_options(name):
    with pytest.raises(PluginError, match=r"data.options has 'size', but data.format=\w+ takes none; leave it out"):
        rows_of(name, size=3)


def follow(name, rows):
    """Plays demonstrations through the recipe's loop; returns rewards and what was shown."""
    kind, options = LOOPS[name]

    async def main():
        found = []
        for row in rows:
            turns = iter([message["content"] for message in row["demonstrations"][0] if message["role"] == "assistant"])
            server = FakeGenerator(lambda _, turns=turns: [*TOKENIZER.encode(next(turns)), 1])
            loop = create_loop(kind, server, TOKENIZER, **options)
            try:
                async with asyncio.timeout(120):
                    output = await loop.run({"max_new_tokens": 1000}, row)
            finally:
                await loop.close()
            output = output[0] if isinstance(output, list) else output
            validate_output(output)
            found.append((output, TOKENIZER.decode(output.prompt_token_ids + output.completion_token_ids)))
        return found

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("gym", 40, marks=pytest.mark.process),
        pytest.param("search", 40, marks=pytest.mark.process),
        pytest.param("harness", 16, marks=pytest.mark.process),
        pytest.param(
            *("gui", 16),
            marks=[pytest.mark.integration, pytest.mark.skipif(not HAS_BROWSER, reason="there is no chromium")],
        ),
    ],
)
def test_a_demonstration_is_what_the_loop_shows(name, count):
    """Otherwise the warm start would teach a format that never comes up again; and some of them solve the task."""
    if name == "gui":
        pytest.importorskip("playwright", reason="uv sync --group frameworks")
    rows = rows_of(name).train[:count]
    found = follow(name, rows)
    for row, (_, shown) in zip(rows, found, strict=True):
        said = TOKENIZER.apply_chat_template(row["demonstrations"][0], tokenize=False)
        said = said.replace("Read each label, fill in", "Fill in")  # a hint, which no row has
        assert shown.rstrip("\n").endswith(said.rstrip("\n")) or name == "gym"
        assert said.rstrip("\n") in shown
    rewards = [output.reward for output, _ in found]
    if name == "search":
        truths = [row["reward_model"]["ground_truth"] for row in rows]
        rewards = [float(output.text == truth) for (output, _), truth in zip(found, truths, strict=True)]
    assert {0.0, 1.0} <= {*rewards} <= {0.0, 1 / 3, 1.0}


def test_a_path_around_the_holes_is_a_shortest_one():
    assert lake.path(("SHFF", "FHFF", "FHFF", "FFFG")) == [1, 1, 1, 2, 2, 2]
    assert lake.path(("SHFF", "FHFF", "FHFF", "FFHG")) == []


def test_bm25_scores_are_those_of_the_formula():
    index = search.Bm25(["a b b", "a c", "d"])
    rare, common = math.log(1 + 2.5 / 1.5), math.log(1 + 1.5 / 2.5)
    norm = 1.2 * (0.25 + 0.75 * 3 / 2)
    assert index.scores("b") == pytest.approx([rare * 2 * 2.2 / (2 + norm), 0, 0])
    assert index.scores("A c") == pytest.approx(
        [common * 2.2 / (1 + norm), common * 2.2 / (1 + 1.2) + rare * 2.2 / (1 + 1.2), 0]
    )


def test_a_search_needs_other_words_than_the_question():
    assert search.search("cooper lives").startswith("The cooper lives in ")
    assert search.search("barrels town") == "nothing found"
    assert len(search.facts()) == 120
    for trade, verb, value in search.facts():
        assert value in search.search(f"{trade} {verb}")


EQUILIBRIUM = {"J": 1 / 3, "Q": 0, "K": 1, "Jpb": 0, "Qpb": 2 / 3, "Kpb": 1, "Jp": 1 / 3, "Qp": 0, "Kp": 1}
EQUILIBRIUM |= {"Jb": 0, "Qb": 1 / 3, "Kb": 1}


@pytest.mark.parametrize(
    ("bets", "value"),
    [
        (EQUILIBRIUM, 0),
        (dict.fromkeys(kuhn.SITUATIONS, 0.5), 11 / 24),
        (dict.fromkeys(kuhn.SITUATIONS, 0), 1),
        (dict.fromkeys(kuhn.SITUATIONS, 1), 1 / 3),
    ],
)
def test_exploitability_is_exact(bets, value):
    assert kuhn.exploitability(bets) == pytest.approx(value)


def test_each_seat_of_the_equilibrium_loses_nothing_more():
    assert kuhn.seat_exploitability(EQUILIBRIUM) == pytest.approx({"first": 0, "second": 0})
    first = {situation: 1.0 for situation in kuhn.SITUATIONS if situation[1:] in ("", "pb")}
    assert kuhn.seat_exploitability(EQUILIBRIUM | first) == pytest.approx({"first": 1 / 3 - 1 / 18, "second": 0})


@pytest.mark.parametrize(
    ("deal", "moves", "gains"),
    [
        ("QK", ["pass", "pass"], (-1, 1)),
        ("JK", ["bet", "pass"], (1, -1)),
        ("KQ", ["bet", "bet"], (2, -2)),
        ("KQ", ["pass", "bet", "pass"], (-1, 1)),
        ("JQ", ["pass", "bet", "bet"], (-2, 2)),
        ("KJ", ["raise", "pass"], (0, -1)),
        ("KJ", ["pass", ""], (1, -2)),
    ],
)
def test_a_game_of_kuhn_poker_is_paid_out(deal, moves, gains):
    game, paid = kuhn.Kuhn(deal), dict.fromkeys(kuhn.SEATS, 0.0)
    game.reset(seed=0)
    for move in [*moves, None, None]:
        shown, reward, is_over, _, _ = game.last()
        assert is_over == (move is None)
        assert deal[kuhn.SEATS.index(game.agent_selection)] in shown
        paid[game.agent_selection] += reward
        game.step(move)
    assert (tuple(paid.values()), game.agents) == (gains, [])


@pytest.mark.process
def test_every_kind_of_bug_fails_its_tests_and_the_fix_passes():
    config = SimpleNamespace(format="repair", eval_size=64, options={})
    rows = repair.rows(config, seed=3)
    kinds = Counter(row["kind"] for row in rows.train + rows.eval)
    assert len(kinds) == 16
    assert len({row["kind"] for row in rows.train}) == 12
    for row in [*rows.train[:50], *rows.eval]:
        files = row["files"]
        fixed = repair_agent.edited(files["lib.py"], row["reward_model"]["ground_truth"])
        assert repair.first_failure(files)
        assert repair.first_failure({**files, "lib.py": fixed}) == ""


@pytest.mark.parametrize("reply", ["", "return 3", "9 return 3", "0 return 3"])
def test_a_reply_that_is_no_edit_changes_nothing(reply):
    assert repair_agent.edited("def f():\n    return 2\n", reply) is None
    assert repair_agent.edited("def f():\n    return 2\n", "2 return 3") == "def f():\n    return 3\n"
