"""Every README's promises have tests; the page of the documentation is made from their marks."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "promises.py")))


@pytest.fixture(scope="module")
def promises():
    return tool.promises()


def test_every_readme_has_promises(promises):
    readmes = {file.parent.name for file in ROOT.glob("packages/*/README.md")}
    assert {each.package for each in promises} == readmes | {"all", "csrc"}
    assert len(promises) >= 250


def test_a_promise_is_made_once(promises):
    sentences = [(each.package, each.sentence) for each in promises]
    assert [each for each in sentences if sentences.count(each) > 1] == []


def test_every_named_test_of_a_suite_exists():
    for file, tests in tool.SUITES.items():
        assert [test for test in tests if f"def {test}(" not in (ROOT / file).read_text()] == []


def test_the_page_has_a_row_for_each_and_the_tier_of_its_test(promises):
    page = tool.page()
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(promises)
    assert "`tests/test_wheels.py::test_a_wheel_stands_alone` [wheels] |" in page
