"""The most that processes take together."""

import os
import re
import threading
from pathlib import Path

from rl_agent.sandbox.process.isolation import descendants


def pss_of(pid):
    try:
        return int(re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)[1]) << 10
    except (OSError, TypeError):
        return 0


class Peak:
    """The most that this process's descendants take together while it is entered."""

    def __enter__(self):
        self.num_bytes = self.num_processes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self):
        while not self._is_over.wait(0.01):
            found = descendants(os.getpid())
            self.num_processes = max(self.num_processes, len(found))
            self.num_bytes = max(self.num_bytes, sum(map(pss_of, found)))

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()
