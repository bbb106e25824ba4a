"""The published suite against storages with one planted mistake each: it fails for every one of them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PLANTED = Path(__file__).with_name("planted.py")
TRIAL = ["CacheOutlivesClear", "NackAcks"]
"""Mistakes that an earlier suite let pass, and that take no deadlines to find."""
NAMES = re.findall(r"^@planted\nclass (\w+)", PLANTED.read_text(), re.MULTILINE)
OTHERS = [name for name in NAMES if name not in ("NoMistake", *TRIAL)]


def verdicts(*names: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, str(PLANTED), "--planted", *names], capture_output=True, text=True, timeout=1500, check=False
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("VERDICTS ")]
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(found[0].removeprefix("VERDICTS "))


@pytest.mark.timeout(600)
def test_a_cache_that_outlives_clear_and_a_nack_that_acks_are_caught():
    assert [name for name, failed in verdicts(*TRIAL).items() if not failed] == []


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_every_other_planted_mistake_is_caught_and_none_is_no_mistake():
    assert len(OTHERS) >= 27
    found = verdicts("NoMistake", *OTHERS)
    assert found.pop("NoMistake") == ""
    assert [name for name, failed in found.items() if not failed] == []
