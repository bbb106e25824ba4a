"""One rank of the tests with Megatron-Bridge's wheel: `bridge_ranks.py FOLDER WHEEL`."""

import sys
import types
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import EngineConfig, OptimizerConfig, ParallelConfig, Precision, create_engine

_spec = spec_from_file_location("engine_ranks", Path(__file__).with_name("engine_ranks.py"))
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
SIZES = {
    "vocab_size": 79, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "sliding_window": None,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYOUTS = {"tp2": ParallelConfig(tp=2), "pp2": ParallelConfig(pp=2)}
OPTIMIZER = OptimizerConfig(lr=1.0, eps=1.0, weight_decay=0.01, max_grad_norm=1e9)  # near plain gradient descent


def write_model(folder, kind, **changes):
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **(SIZES | changes))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def take_steps(folder, backend, rows=slice(None), keep=None, **changes):
    """Loss and norm of two steps, and the weights after them."""
    options = {"precision": Precision.FLOAT64, "optimizer": OPTIMIZER, "max_tokens_per_gpu": 50, "timeout_s": 120.0}
    engine = create_engine(backend, EngineConfig(model_path=str(folder), **(options | changes)))
    engine.initialize()
    data = ranks.batch_of(ranks.draw_rows(5)[rows])
    steps = [ranks.one_step(engine, data) for _ in range(2)]
    weights = ranks.weights(engine)
    if keep is not None:
        engine.save_model(keep)
    engine.close()
    return steps, weights


class Names(types.ModuleType):
    """A module in which every name is a class that does nothing, and has such classes itself."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class AnyName(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Nothing(torch.nn.Module, metaclass=AnyName):
    pass


def import_bridge():
    """With names in the place of Transformer Engine, which megatron-core has looked for by then."""
    import rl_engine.backends.megatron  # noqa: F401

    engine, pytorch = Names("transformer_engine"), Names("transformer_engine.pytorch")
    engine.pytorch = pytorch
    sys.modules |= {"transformer_engine": engine, "transformer_engine.pytorch": pytorch}
    from megatron.bridge.models.conversion import model_bridge

    del sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"]
    return model_bridge


def main(folder, wheel):
    torch.set_num_threads(1)
    sys.path.insert(0, wheel)
    import_bridge()
    holder = ranks.build(folder / "model", optimizer=None)  # makes the process group; the others join it
    rank = holder._world.rank
    seen = {}
    for layout, parallel in LAYOUTS.items():
        place = folder / f"{layout} model"
        seen[layout] = take_steps(folder / "model", "megatron", slice(rank, None, 2), place, parallel=parallel)
    holder.close()
    if rank == 0:
        torch.save(seen, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
