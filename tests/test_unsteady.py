"""The record of tests that failed and passed alone."""

import runpy
from datetime import date
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "unsteady.py"))


def test_the_third_failure_in_a_week_counts():
    lines = ["2026-11-01 a", "2026-11-27 a", "2026-11-28 a", "2026-11-22 b", "2026-11-24 b", "2026-11-28 b"]
    assert TOOL["repeated"](lines, date(2026, 11, 28)) == ["b"]
    assert TOOL["repeated"]([*lines, "2026-11-28 a"], date(2026, 11, 28)) == ["a", "b"]
