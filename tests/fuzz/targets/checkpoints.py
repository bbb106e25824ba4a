"""rl-trainer and rl-engine: state files and manifests of checkpoints."""

from _forms import files

from rl_trainer import checkpoints
from rl_trainer.errors import TrainerError

EXPECTED = (TrainerError,)


def seeds():
    yield b'{"step": 3, "position": 5, "seed": 0, "num_rows": 9, "engines": ["engine"], "config": {}}'
    yield b'{"files": {"shard-00000.safetensors": {"nbytes": 3, "digest": "00"}}, "digest": "00"}'

    yield b"[]"
    yield b"[" * 3000


def one(data):
    with files(
        **{f"checkpoint-3__{checkpoints.STATE_FILE}": data, "checkpoint-3__engine__manifest.json": data}
    ) as root:
        checkpoints.complete(root)
        checkpoints.damage(root / "checkpoint-3")
        checkpoints.newest_whole(root)
