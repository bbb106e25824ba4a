"""Parts of layers recomputed or offloaded: seconds of an update, and bytes of activations that its device keeps.

All choices take their steps in turns. Without a GPU seconds are the process's on a processor, which other processes of
the machine do not lengthen, and offloaded activations are copied within the host's memory: no bus is in their seconds.
"""

import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks

from rl_bench import Role, Run
from rl_engine import EngineConfig, create_engine
from rl_engine.losses import sft_loss
from rl_engine.model import module_engine
from rl_engine.testing import ragged_batch, write_tiny_model

SIZES = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
ROWS, PROMPT, COMPLETION, UPDATES = 8, 64, 192, 7
CLOCK = time.perf_counter if torch.cuda.is_available() else time.process_time
CHOICES = {
    "nothing": {},
    **{f"recompute={part}": {"recompute": (part,)} for part in ("norm", "attention", "mlp")},
    "recompute=norm, attention, mlp": {"recompute": ("norm", "attention", "mlp")},
    "activation_checkpointing": {"activation_checkpointing": True},
    **{f"activation_offload={part}": {"activation_offload": (part,)} for part in ("norm", "attention", "mlp")},
    "activation_offload": {"activation_offload": True},
}


def main(run: Run) -> None:
    draw, updates = random.Random(0), 3 if run.quick else UPDATES
    run.parameters(model=SIZES, rows=ROWS, prompt=PROMPT, completion=COMPLETION, updates=updates)
    texts = [[[draw.randrange(4, 70) for _ in range(size)] for _ in range(ROWS)] for size in (PROMPT, COMPLETION)]
    batch, seconds, kept = ragged_batch(*texts), {name: [] for name in CHOICES}, {}
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(_offload_without_a_gpu())
        folder = write_tiny_model(Path(place) / "model", **SIZES)
        engines = {name: _built(str(folder), choice, stack) for name, choice in CHOICES.items()}
        for update in range(updates + 1):
            for name, engine in engines.items():
                if update == 0:
                    kept[name] = _kept_bytes(engine, batch)
                    continue
                start = CLOCK()
                _step(engine, batch)
                seconds[name].append(CLOCK() - start)
    for name in CHOICES:
        role = Role.PEER if name == "nothing" else Role.OURS
        run.record("update", name, seconds[name], unit="s", role=role)
        run.record("activations kept on the device", name, [kept[name] / 2**20], unit="MiB", role=role)


class _offload_without_a_gpu:  # noqa: N801 - a context
    """Let engines copy what would leave a GPU, which they refuse without one."""

    def __enter__(self):
        self.before, module_engine.has_gpu = module_engine.has_gpu, lambda: True

    def __exit__(self, *_):
        module_engine.has_gpu = self.before


def _built(folder, choice, stack):
    engine = create_engine("fsdp", EngineConfig(model_path=folder, prefix_sharing=False, **choice))
    engine.initialize()
    stack.callback(engine.close)
    return engine


def _step(engine, batch):
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, sft_loss)
        engine.optimizer_step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _kept_bytes(engine, batch) -> int:
    """Bytes that autograd saves in one pass and no inner hook takes, but for parameters."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in engine.parts.built.scorer.parameters()}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        _step(engine, batch)
    return sum(storage.nbytes() for place, storage in saved.items() if place not in weights)
