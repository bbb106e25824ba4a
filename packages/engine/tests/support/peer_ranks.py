"""One of two ranks, of which one calls something else, and then goes away: `peer_ranks.py FOLDER BACKEND`."""

import os
import sys
from pathlib import Path

import torch

from rl_engine import EngineConfig, EngineError, ParallelConfig, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch

DATA = ragged_batch([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]])


def message(call):
    try:
        call()
    except EngineError as error:
        return str(error)
    return None


def main(folder, backend):
    torch.set_num_threads(1)
    layout = ParallelConfig(tp=2) if backend == "megatron" else ParallelConfig()  # whose weights have to be gathered
    engine = create_engine(backend, EngineConfig(model_path=str(folder / "model"), parallel=layout, timeout_s=60.0))
    engine.initialize()
    is_other = os.environ["RANK"] == "1"
    seen = {
        "gradient": message(lambda: engine.forward_backward_batch(DATA, sft_loss, forward_only=is_other)),
        "loss": message(lambda: engine.forward_backward_batch(DATA, None if is_other else sft_loss, forward_only=True)),
        "path": message(lambda: engine.save_checkpoint(folder / f"checkpoint-{is_other}", 1)),
    }
    engine.forward_backward_batch(DATA, sft_loss)

    def leave(output, rows):
        if is_other:
            os._exit(0)
        return sft_loss(output, rows)

    seen["pass"] = message(lambda: engine.forward_backward_batch(DATA, leave))
    seen["step"] = message(engine.optimizer_step)
    seen["export"] = message(lambda: list(engine.get_per_tensor_param()[0]))
    seen["model"] = message(lambda: engine.save_model(folder / "trained"))
    torch.save(seen, folder / "seen.pt")
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
