"""NIXL as one would use it without rl-ckpt: the sender registers its tensors, the other process reads them.

`each` is NIXL's default use: every tensor is registered, read and released by itself. `once` registers all of them once
and reads them in one call. Neither verifies anything.
"""

import json
import os
import sys
import time

import torch
from packages.ckpt.bench._other import Other, say

POLL_S = 0.0002


def agent(name):
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(f"{name}-{os.getpid()}", nixl_agent_config(backends=["UCX"]))


class Sender:
    """The tensors, registered."""

    def __init__(self, weights):
        self._agent = agent("bench-sender")
        self._agent.register_memory(list(weights.values()))
        places = [(tensor.data_ptr(), tensor.nbytes) for tensor in weights.values()]
        self.told = json.dumps([self._agent.get_agent_metadata().hex(), places])


def reader(sender, mode, cores):
    """A process that reads them whenever it is asked."""
    other = Other("_nixl", mode, *cores)
    other.tell(sender.told)
    other.hear("ready")
    return other


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


def serve(mode, *cores):
    from nixl._api import nixlBind

    os.sched_setaffinity(0, map(int, cores))
    torch.set_num_threads(1)
    mine = agent("bench-reader")
    metadata, places = json.loads(sys.stdin.readline())
    peer = mine.add_remote_agent(bytes.fromhex(metadata))
    targets = [torch.zeros(num_bytes, dtype=torch.uint8) for _, num_bytes in places]
    remote = [(address, num_bytes, 0) for address, num_bytes in places]
    if mode == "once":
        mine.register_memory(targets)
        local, everything = mine.get_xfer_descs(targets), nixlBind.nixlXferDList(nixlBind.DRAM_SEG, remote)
    say("ready")
    for _ in sys.stdin:
        if mode == "once":
            read(mine, local, everything, peer)
        else:
            for target, place in zip(targets, remote, strict=True):
                registered = mine.register_memory([target])
                there = nixlBind.nixlXferDList(nixlBind.DRAM_SEG, [place])
                read(mine, mine.get_xfer_descs([target]), there, peer)
                mine.deregister_memory(registered)
        say("done")


if __name__ == "__main__":
    serve(*sys.argv[1:])
