"""Command-line agent of the recipe `harness`, of the standard library alone: it edits a line, and runs the tests.

It works in the folder that it starts in, on `lib.py`, and speaks OpenAI's chat API to `OPENAI_BASE_URL`.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

MAX_EDITS = 2


def task(code: str, said: str) -> str:
    """First message: the file with numbered lines, and what the tests say."""
    lines = [f"{number} {line.strip()}" for number, line in enumerate(code.splitlines(), start=1) if line]
    return "\n".join([*lines, said])


def edited(code: str, reply: str) -> str | None:
    """The file after the edit of a reply, `NUMBER LINE`; None if it is none."""
    number, _, line = reply.strip().partition(" ")
    lines = code.splitlines()
    if not number.isdecimal() or not 1 <= int(number) <= len(lines):
        return None
    old = lines[int(number) - 1]
    lines[int(number) - 1] = old[: len(old) - len(old.lstrip())] + line
    return "\n".join(lines) + "\n"


def main() -> None:
    """Edit until the tests pass, or edits run out."""
    file = Path("lib.py")
    said = _failure()
    messages = [{"role": "user", "content": task(file.read_text(), said)}]
    for _ in range(MAX_EDITS):
        reply = _ask(messages)
        new = edited(file.read_text(), reply)
        if new is not None:
            file.write_text(new)
        said = _failure()
        if not said:
            return
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": said}]


def _failure() -> str:
    """Last line that the tests say; empty if they pass."""
    tests = subprocess.run(
        [sys.executable, "-S", "test_lib.py"], capture_output=True, text=True, timeout=60, check=False
    )
    return "" if tests.returncode == 0 else (tests.stderr.splitlines() or ["no tests"])[-1]


def _ask(messages: list[dict[str, str]]) -> str:
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=600)
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages})
    connection.request("POST", f"{url.path}/chat/completions", body, headers)
    response = connection.getresponse()
    text = response.read()
    if response.status != http.client.OK:
        raise SystemExit(f"the model answered {response.status}: {text[:500]!r}")
    return json.loads(text)["choices"][0]["message"]["content"] or ""


if __name__ == "__main__":
    main()
