"""Conventions of names: tests have short names that say what the code does."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = [*sorted((ROOT / "packages").iterdir()), ROOT / "csrc"]
LONGEST_NAME = 60


def test_names_of_tests_have_at_most_sixty_characters():
    folders = [package / part for package in PACKAGES for part in ("src", "tests")] + [ROOT / "tests", ROOT / "bench"]
    names = [
        f"{file.relative_to(ROOT)}: {name}"
        for folder in folders
        for file in folder.rglob("*.py")
        for name in re.findall(r"def (test_\w+)", file.read_text())
        if len(name) > LONGEST_NAME
    ]
    assert not names, "\n".join(names)
