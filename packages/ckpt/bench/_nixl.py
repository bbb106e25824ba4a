"""NIXL's default use, without rl-ckpt: another process registers, reads and releases each tensor, unverified."""

import json
import os
import signal
import sys
import time

import torch

from rl_bench.processes import Child, say

POLL_S = 0.0002


def agent(name):
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(f"{name}-{os.getpid()}", nixl_agent_config(backends=["UCX"]))


class Pair:
    """Two processes that NIXL connects, and that stop until they are asked: its threads poll all the time.

    Args:
        sizes: Of the tensors, bytes.
        mine, theirs: The cores of the sending and of the reading process.
    """

    def __init__(self, sizes, mine, theirs):
        self._ends = []
        try:
            told = json.dumps(sizes)
            for role, cores in (("send", mine), ("take", theirs)):
                self._ends.append(Child(__file__, role, *cores))
                told = self._ends[-1].ask(told, "ready")
            self()
        except BaseException:
            self.close()
            raise

    def __call__(self):
        for end in self._ends:
            end.process.send_signal(signal.SIGCONT)
        self._ends[1].ask()
        for end in self._ends:
            end.process.send_signal(signal.SIGSTOP)

    def close(self):
        for end in self._ends:
            end.close()


def read(mine, local, remote, peer):
    """One read, to its end."""
    handle = mine.initialize_xfer("READ", local, remote, peer)
    state = mine.transfer(handle)
    while state == "PROC":
        time.sleep(POLL_S)
        state = mine.check_xfer_state(handle)
    mine.release_xfer_handle(handle)
    if state != "DONE":
        raise RuntimeError(f"NIXL's read ended in state {state}")


def be_served_first():
    """On a busy machine, without real-time priority: a thread that polls would starve the others of its process."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, -20)


def send(sizes):
    weights = [torch.randint(255, (num_bytes,), dtype=torch.uint8) for num_bytes in sizes]
    mine = agent("bench-sender")
    mine.register_memory(weights)
    say("ready", json.dumps([mine.get_agent_metadata().hex(), [(t.data_ptr(), t.nbytes) for t in weights]]))
    sys.stdin.read()


def take(metadata, addresses):
    from nixl._api import nixlBind

    mine = agent("bench-reader")
    peer = mine.add_remote_agent(bytes.fromhex(metadata))
    targets = [torch.zeros(num_bytes, dtype=torch.uint8) for _, num_bytes in addresses]
    remote = [(address, num_bytes, 0) for address, num_bytes in addresses]
    say("ready")
    for _ in sys.stdin:
        for target, one in zip(targets, remote, strict=True):
            registered = mine.register_memory([target])
            there = nixlBind.nixlXferDList(nixlBind.DRAM_SEG, [one])
            read(mine, mine.get_xfer_descs([target]), there, peer)
            mine.deregister_memory(registered)
        say("done")


def serve(mode, *cores):
    os.sched_setaffinity(0, map(int, cores))
    be_served_first()
    torch.set_num_threads(1)
    told = json.loads(sys.stdin.readline())
    if mode == "send":
        send(told)
    else:
        take(*told)


if __name__ == "__main__":
    serve(*sys.argv[1:])
