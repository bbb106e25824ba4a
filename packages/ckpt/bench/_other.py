"""A process of a benchmark: a line to it starts something, a line back ends it, and nobody waits for it for ever."""

import os
import select
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 60.0


class Other:
    """A module of this folder, started with arguments; its `serve` reads lines on stdin."""

    def __init__(self, module, *arguments):
        command = [sys.executable, "-m", f"packages.ckpt.bench.{module}", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self._said = b""

    def tell(self, what="go"):
        self.process.stdin.write(f"{what}\n".encode())
        self.process.stdin.flush()

    def hear(self, first="done"):
        """The rest of the next line that starts with this word; lines of libraries that log are passed over."""
        while True:
            line, end, rest = self._said.partition(b"\n")
            if end:
                self._said = rest
                if line.decode().split(" ")[0] == first:
                    return line.decode().partition(" ")[2]
            elif not select.select([self.process.stdout], [], [], TIMEOUT_S)[0]:
                raise TimeoutError(f"{self.process.args} said nothing for {TIMEOUT_S:g} s")
            elif not (more := os.read(self.process.stdout.fileno(), 1 << 16)):
                raise RuntimeError(f"{self.process.args} died")
            else:
                self._said += more

    def ask(self, what="go", first="done"):
        self.tell(what)
        return self.hear(first)

    def close(self):
        self.process.kill()
        self.process.communicate()


def say(*words):
    print(*words, flush=True)
