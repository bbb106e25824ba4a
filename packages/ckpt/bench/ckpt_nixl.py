"""rl-ckpt beside NIXL as one would use it without rl-ckpt, and rl-ckpt's own transport over NIXL.

Two processes on one machine, tensors in the shapes of Qwen3-0.6B, done when the other process holds them in tensors of
its own. NIXL's default use registers, reads and releases one tensor after the other; the stronger peer registers all
tensors once and reads them in one call. Neither verifies anything. The child is `ckpt.py`'s where rl-ckpt moves.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from rl_bench import missing

POLL_S = 0.0002


def agent(name):
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def read(mine, local, remote, peer):
    """One read, to its end."""
    import time

    handle = mine.initialize_xfer("READ", local, remote, peer)
    state = mine.transfer(handle)
    while state == "PROC":
        time.sleep(POLL_S)
        state = mine.check_xfer_state(handle)
    mine.release_xfer_handle(handle)
    if state != "DONE":
        raise RuntimeError(f"NIXL's read ended in state {state}")


def child(mode, num_layers, vocab_size, *cores):
    """Read all tensors for every line on stdin; the first line says where they are."""
    sys.path.insert(0, str(Path(__file__).parent))
    from ckpt import tensors

    os.sched_setaffinity(0, map(int, cores))
    torch.set_num_threads(1)
    targets = list(tensors((int(num_layers), int(vocab_size)), torch.zeros).values())
    mine = agent(f"bench-{os.getpid()}")
    metadata, addresses = json.loads(sys.stdin.readline())
    peer = mine.add_remote_agent(bytes.fromhex(metadata))
    from nixl._api import nixlBind

    remote = [(address, target.nbytes, 0) for address, target in zip(addresses, targets, strict=True)]
    if mode == "once":
        mine.register_memory(targets)
        all_local = mine.get_xfer_descs(targets)
        all_remote = nixlBind.nixlXferDList(nixlBind.DRAM_SEG, remote)
    print("ready", flush=True)
    for _ in sys.stdin:
        if mode == "once":
            read(mine, all_local, all_remote, peer)
        else:
            for target, place in zip(targets, remote, strict=True):
                registered = mine.register_memory([target])
                place = nixlBind.nixlXferDList(nixlBind.DRAM_SEG, [place])
                read(mine, mine.get_xfer_descs([target]), place, peer)
                mine.deregister_memory(registered)
        print("done", flush=True)


class Reader:
    """This file as a process that reads the weights by NIXL."""

    def __init__(self, mode, size, cores, metadata, addresses):
        command = [sys.executable, __file__, mode, *map(str, size), *map(str, cores)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.process.stdin.write(json.dumps([metadata, addresses]) + "\n")
        self.hear("ready")

    def hear(self, expected):
        for line in self.process.stdout:  # NIXL's own log goes there as well
            if line.strip() == expected:
                return
        raise RuntimeError(f"the reading process {self.process.args} died")

    def __call__(self):
        self.process.stdin.write("go\n")
        self.hear("done")

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


def main(run):
    from packages.ckpt.bench.ckpt import halves

    before = os.sched_getaffinity(0)
    mine, theirs = halves()
    os.sched_setaffinity(0, mine)
    try:
        with ExitStack() as stack:
            measure(run, stack, theirs)
    finally:
        os.sched_setaffinity(0, before)


def measure(run, stack, cores):
    from packages.ckpt.bench.ckpt import Sending, copy_into, tensors

    size = (4, 9_496) if run.quick else (28, 122_880)  # with the shorter vocabulary: 1 GiB
    weights, copies = tensors(size, torch.randn), tensors(size, torch.zeros)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    run.parameters(num_bytes=num_bytes, num_tensors=len(weights), shapes="Qwen3-0.6B", dtype="bfloat16")
    os.environ["RL_CKPT_TOKEN"] = "of the benchmark"
    ours = {
        "rl-ckpt shm, receive_into": Sending(stack, "ckpt-into", size, f"shm://bench-nixl-{os.getpid()}", cores),
    }
    peers = dict.fromkeys(("NIXL default", "NIXL, registered once"), missing("nixl"))
    if not missing("nixl"):
        ours["rl-ckpt nixl, receive_into"] = Sending(stack, "ckpt-into", size, "nixl://127.0.0.1:0", cores)
        sender = agent(f"bench-sender-{os.getpid()}")
        sender.register_memory(list(weights.values()))
        metadata = sender.get_agent_metadata().hex()
        addresses = [tensor.data_ptr() for tensor in weights.values()]
        for name, mode in (("NIXL default", "each"), ("NIXL, registered once", "once")):
            peers[name] = Reader(mode, size, cores, metadata, addresses)
            stack.callback(peers[name].close)
    run.compare(
        "weights into another process",
        {name: lambda sending=sending: sending(weights) for name, sending in ours.items()},
        peers=peers,
        limit={"memcpy, one process": lambda: copy_into(copies, weights.items())},
        unit="GB/s",
        amount=num_bytes / 1e9,
        goal=">= 2 of best peer",
    )


if __name__ == "__main__":
    child(*sys.argv[1:])
