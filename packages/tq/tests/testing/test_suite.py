"""The published suite against storages with one planted mistake each: it fails for every one of them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PLANTED = Path(__file__).with_name("planted.py")
NAMES = re.findall(r"^@planted\nclass (\w+)", PLANTED.read_text(), re.MULTILINE)


def verdicts(*names: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, str(PLANTED), "--planted", *names], capture_output=True, text=True, timeout=1500, check=False
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("VERDICTS ")]
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(found[0].removeprefix("VERDICTS "))


@pytest.mark.promise("The suite that every storage passes finds planted mistakes")
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_every_planted_mistake_is_caught_and_none_is_no_mistake():
    assert len(NAMES) >= 30
    found = verdicts(*NAMES)
    assert found.pop("NoMistake") == ""
    assert [name for name, failed in found.items() if not failed] == []
