"""Every promise of `docs/develop/promises.md` names a test that exists, in the tier that it says."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROW = re.compile(
    r"^\| (?P<promise>[^|]+) \| (?P<package>[\w-]+) \| `(?P<file>[^`:]+)::(?P<test>\w+)`(?: \[(?P<tier>\w+)\])? \|$"
)
READMES = {"all": "README.md", "csrc": "csrc/README.md"}
"""By package; the others' stand in their folders."""


def rows():
    table = [line for line in (ROOT / "docs/develop/promises.md").read_text().splitlines() if line.startswith("| ")][1:]
    return [(line, ROW.match(line)) for line in table]


@cache
def suites_of(folder):
    """By name, the tests of a package or of its published suites, wherever in its folders, and their marks."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text()
        if ".venv" in file.parts or "def test_" not in text:
            continue
        tree = ast.parse(text)
        of_file = marks(next((n.value for n in tree.body if is_pytestmark(n)), None))
        for node in ast.walk(tree):
            inside = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
            for test in inside:
                if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith("test_"):
                    own = {mark for decorator in test.decorator_list for mark in marks(decorator)}
                    found.setdefault(test.name, []).append((file.name, of_file | own))
    return found


def is_pytestmark(node):
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "pytestmark"


def marks(node):
    """`slow` of `pytest.mark.slow`, and likewise of a list of such."""
    nodes = [] if node is None else ast.walk(node)
    return {n.attr for n in nodes if isinstance(n, ast.Attribute) and getattr(n.value, "attr", "") == "mark"}


def folder_of(file):
    """Of the package: a test that was moved within it is found all the same."""
    return ROOT / "/".join(Path(file).parts[: 2 if file.startswith("packages/") else 1])


def test_every_row_can_be_read():
    assert [line for line, found in rows() if found is None and "|---" not in line] == []


@pytest.mark.process
def test_every_promise_has_a_test_that_exists():
    named = [found for _, found in rows() if found]
    missing = [found["test"] for found in named if found["test"] not in suites_of(folder_of(found["file"]))]
    assert missing == [], "write the test, or take the promise out of the README"


def test_the_tier_of_every_test_is_told():
    tiers = {"slow", "integration", "wheels", "gpu"}
    wrong = [
        (found["test"], found["tier"])
        for _, found in rows()
        if found
        and "/src/" not in found["file"]  # a published suite has the tiers of those that take it
        and all(
            (marked & tiers or {None}) != {found["tier"]}
            for _, marked in suites_of(folder_of(found["file"])).get(found["test"], [])
        )
    ]
    assert wrong == []


def test_every_readme_has_promises():
    packages = {found["package"] for _, found in rows() if found}
    readmes = {file.parent.name for file in ROOT.glob("packages/*/README.md")}
    assert packages == readmes | set(READMES)
    assert len(rows()) >= 100
