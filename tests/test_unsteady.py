"""The record of tests that failed and passed alone."""

import json
import runpy
from datetime import date
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "unsteady.py"))


def test_the_third_failure_in_a_week_counts():
    lines = ["2026-11-01 a", "2026-11-27 a", "2026-11-28 a", "2026-11-22 b", "2026-11-24 b", "2026-11-28 b"]
    assert TOOL["repeated"](lines, date(2026, 11, 28)) == ["b"]
    assert TOOL["repeated"]([*lines, "2026-11-28 a"], date(2026, 11, 28)) == ["a", "b"]


def test_each_run_adds_its_tests_to_the_record(tmp_path, capsys):
    failed, record = tmp_path / "lastfailed", tmp_path / "unsteady.txt"
    failed.write_text(json.dumps({"tests/test_a.py::test_one": True}))
    assert [TOOL["main"]([str(failed)], record) for _ in range(3)] == [0, 0, 1]
    assert [line.split(" ")[1] for line in record.read_text().splitlines()] == ["tests/test_a.py::test_one"] * 3
    assert "for the third time in a week:\n  tests/test_a.py::test_one" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "code"), [(5, 0), (6, 1)])
def test_many_failures_are_not_run_again(tmp_path, count, code):
    (tmp_path / "lastfailed").write_text(json.dumps({f"test_{number}": True for number in range(count)}))
    assert TOOL["main"](["--few", str(tmp_path / "lastfailed")], tmp_path / "unsteady.txt") == code
    assert not (tmp_path / "unsteady.txt").exists()
