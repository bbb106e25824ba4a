"""Repositories of the recipe `harness`: a function that does not do what its docstring says, and its tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_agent.recipes import repair_agent
from rl_agent.recipes.rows import Rows, draw_rows, row, said

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from rl_agent.recipes.rows import Chat, DataConfig

READ_SHARE = 0.25
"""Share of the demonstrations that write what the docstring says; the others write the line as it is, twice."""
Term = tuple[str, str, str, str, int]
"""Variable, operator, variable, operator and constant of an expression."""
_NAMES = ("cost", "area", "mass", "load", "time", "rate", "size", "rent", "fare", "toll", "wage", "gain")
_VARIABLES = ("price", "count", "width", "height", "speed", "depth", "weight", "length")
_VALUES = ((2, 7), (9, 4), (5, 5))
_SWAPPED = {"+": "-", "-": "+", "*": "+"}


def _wrong(change: Callable[[str, str, str, str, int], str]) -> Callable[[Term], str]:
    return lambda term: f"return {change(*term)}"


KINDS: dict[str, Callable[[Term], str]] = {
    "first operator": _wrong(lambda a, o, b, p, n: f"{a} {_SWAPPED[o]} {b} {p} {n}"),
    "second operator": _wrong(lambda a, o, b, p, n: f"{a} {o} {b} {_SWAPPED[p]} {n}"),
    "first variable": _wrong(lambda a, o, b, p, n: f"{b} {o} {b} {p} {n}"),
    "second variable": _wrong(lambda a, o, b, p, n: f"{a} {o} {a} {p} {n}"),
    "constant": _wrong(lambda a, o, b, p, n: f"{a} {o} {b} {p} {n % 9 + 1}"),
    "missing end": _wrong(lambda a, o, b, p, n: f"{a} {o} {b}"),
    "missing start": _wrong(lambda a, o, b, p, n: f"{b} {p} {n}"),
    "missing middle": _wrong(lambda a, o, b, p, n: f"{a} {p} {n}"),
    "zero": _wrong(lambda a, o, b, p, n: "0"),
    "extra variable": _wrong(lambda a, o, b, p, n: f"{a} {o} {b} {p} {n} {p} {b}"),
    "swapped": _wrong(lambda a, o, b, p, n: f"{n} {p} {b} {o} {a}"),
    "sign": _wrong(lambda a, o, b, p, n: f"-{a} {o} {b} {p} {n}"),
    "no return": lambda term: " ".join(map(str, term)),
    "variable alone": _wrong(lambda a, o, b, p, n: a),
    "twice the constant": _wrong(lambda a, o, b, p, n: f"{a} {o} {b} {p} {n} {p} {n}"),
    "constant alone": _wrong(lambda a, o, b, p, n: f"{n}"),
}
"""Kinds of bug by name: what the line of an expression becomes."""
HELD_OUT = ("no return", "variable alone", "twice the constant", "constant alone")
"""Kinds that no training row has."""
TESTS = "python -S test_lib.py"


def rows(config: DataConfig, *, seed: int) -> Rows:
    """Rows of repositories; the kinds of bug in `HELD_OUT` are in held-out rows alone."""
    return draw_rows(config, _row, seed=seed)


def repository(name: str, term: Term, line: str) -> dict[str, str]:
    """Files of a repository."""
    first, _, second, _, _ = term
    right = " ".join(map(str, term))
    code = [f"def {name}({first}, {second}):", f'    """{right}"""', f"    {line}", ""]
    cases = [(f"{name}({x}, {y})", eval(right, {first: x, second: y})) for x, y in _VALUES]
    tests = [
        f"from lib import {name}",
        f"for call, needed in {cases!r}:",
        "    if (found := eval(call)) != needed:",
        '        raise SystemExit(f"{call} is {found}, not {needed}")',
        "",
    ]
    return {"lib.py": "\n".join(code), "test_lib.py": "\n".join(tests)}


def _row(choose: random.Random, is_eval: bool) -> tuple[str, dict[str, Any], Chat]:
    while True:
        kind = choose.choice(HELD_OUT if is_eval else [each for each in KINDS if each not in HELD_OUT])
        term = _term(choose)
        files = repository(choose.choice(_NAMES), term, KINDS[kind](term))
        if failure := first_failure(files):  # a bug may not change what an expression gives
            break
    prompt = repair_agent.task(files["lib.py"], failure)
    right, wrong = f"3 return {' '.join(map(str, term))}", f"3 {KINDS[kind](term)}"
    turns = said(right) if choose.random() < READ_SHARE else said(wrong, failure, wrong)
    task = row(
        prompt,
        answer=right,
        files={**files, "agent.py": Path(repair_agent.__file__).read_text()},
        tests={"command": "python -S test_lib.py", "files": {"test_lib.py": files["test_lib.py"]}},
        kind=kind,
    )
    return prompt, task, [{"role": "user", "content": prompt}, *turns]


def _term(choose: random.Random) -> Term:
    first, second = choose.sample(_VARIABLES, 2)
    return first, choose.choice("+-*"), second, choose.choice("+-"), choose.randint(1, 9)


def first_failure(files: dict[str, str]) -> str:
    """What the tests of a repository that was made here say; empty if they pass."""
    scope = dict[str, Any]()
    exec(files["lib.py"], scope)
    try:
        exec(files["test_lib.py"].partition("\n")[2], scope)
    except SystemExit as error:
        return str(error)
    return ""
