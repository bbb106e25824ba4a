"""Tests that failed and then passed alone: `unsteady.py FILE` records them; a third record in a week is a failure.

FILE is pytest's `lastfailed`. `--few FILE` only says by its exit code whether five or fewer failed. The record,
`tools/unsteady.txt`, is no part of a commit: a checkout has its own, and CI's goes from run to run by a cache.
"""

import json
import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

RECORD = Path(__file__).with_name("unsteady.txt")
MOST, A_WEEK = 3, timedelta(days=7)


def repeated(lines: list[str], today: date) -> list[str]:
    """Tests with `MOST` records or more in the week before `today`; a line is a date and a test."""
    records = [line.split(" ", 1) for line in lines]
    recent = [test for day, test in records if today - date.fromisoformat(day) < A_WEEK]
    return sorted({test for test in recent if recent.count(test) >= MOST})


def main(arguments: list[str], record: Path = RECORD) -> int:
    """The command; returns its exit code."""
    failed = json.loads(Path(arguments[-1]).read_text())
    if arguments[0] == "--few":
        return int(len(failed) > 5)
    today = datetime.now(UTC).date()
    lines = [*(record.read_text().splitlines() if record.exists() else []), *(f"{today} {test}" for test in failed)]
    record.write_text("".join(f"{line}\n" for line in lines))
    print("failed, and passed alone (tools/unsteady.txt):", *failed, sep="\n  ")
    if found := repeated(lines, today):
        print("for the third time in a week:", *found, sep="\n  ")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
