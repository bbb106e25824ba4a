"""One rank that loads a model and watches its own memory: `load_ranks.py FOLDER`."""

import sys
import threading
import time
from pathlib import Path

import torch

from rl_engine import EngineConfig, create_engine
from rl_engine.testing import ragged_batch


def anonymous():
    """Bytes that this process has allocated; mapped files are not among them."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def most_while(work):
    """What `work` allocates at most, bytes."""
    before, most, is_done = anonymous(), [0], threading.Event()

    def watch():
        while not is_done.is_set():
            most[0] = max(most[0], anonymous() - before)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        is_done.set()
        watcher.join()
    return most[0]


def main(folder):
    torch.set_num_threads(1)
    seen = {}
    batch = ragged_batch([[1, 2, 3]], [[4, 5]])
    for kind, backend in (("tiny", "fsdp"), ("dense", "fsdp"), ("dense", "torchtitan"), ("experts", "fsdp")):
        engine = create_engine(backend, EngineConfig(model_path=str(folder / kind), optimizer=None))
        grown = most_while(engine.initialize)
        scores = engine.forward_backward_batch(batch, None).columns["logprobs"].values().tolist()
        weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
        seen[f"{kind} {backend}"] = {"grown": engine.parts.built.world.exchange(grown), "scores": scores}
        if kind != "dense":
            seen[f"{kind} {backend}"]["weights"] = weights
        engine.close()
        last = engine
    del last
    return seen


if __name__ == "__main__":
    place = Path(sys.argv[1])
    found = main(place)
    import os

    if os.environ["RANK"] == "0":
        torch.save(found, place / "seen.pt")
