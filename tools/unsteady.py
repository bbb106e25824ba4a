"""Tests that failed and then passed alone: `unsteady.py FILE` records them; a third record in a week is a failure.

FILE is pytest's `lastfailed`. `--few FILE` only says by its exit code whether five or fewer failed.
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


def main() -> int:
    """The command; returns its exit code."""
    failed = json.loads(Path(sys.argv[-1]).read_text())
    if sys.argv[1] == "--few":
        return int(len(failed) > 5)
    today = datetime.now(UTC).date()
    lines = [*(RECORD.read_text().splitlines() if RECORD.exists() else []), *(f"{today} {test}" for test in failed)]
    RECORD.write_text("".join(f"{line}\n" for line in lines))
    print("failed, and passed alone (tools/unsteady.txt):", *failed, sep="\n  ")
    if found := repeated(lines, today):
        print("for the third time in a week:", *found, sep="\n  ")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
