"""Every file of a checkpoint has a digest: what is damaged is named, never loaded; and nothing in it is run."""

import json
import os
import pickle
import random
from pathlib import Path

import pytest
import torch

from rl_engine import (
    CheckpointError,
    EngineConfig,
    OptimizerConfig,
    create_engine,
    digest_files,
    find_damage,
    read_manifest,
    write_manifest,
)
from rl_engine.checkpoint import sharded
from rl_engine.distributed.world import World
from rl_engine.testing import write_tiny_model

ALONE = World(rank=0, size=1, device=torch.device("cpu"), owns_group=False)
TENSORS = {
    "model.a": torch.arange(35, dtype=torch.float32).reshape(5, 7),
    "model.b": torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4),
    "model.c": torch.arange(8.0)[::8],  # one element, with a stride
    "optim.step": torch.tensor(3.0),
    "rng.0": torch.arange(11, dtype=torch.uint8),
}


def write(folder):
    sharded.save(folder, TENSORS, sharded.Manifest(step=4, schedule_step=4, world_size=1), ALONE)
    return folder


def read(folder):
    found = {name: torch.full_like(tensor, 9) for name, tensor in TENSORS.items()}
    sharded.load(folder, found, ALONE)
    return found


@pytest.mark.promise("Every flipped bit of a checkpoint is found")
@pytest.mark.process
def test_every_flipped_bit_and_every_cut_is_found(tmp_path):
    folder = write(tmp_path / "checkpoint")
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in read(folder).items())
    for file in folder.iterdir():
        written = file.read_bytes()
        for position in range(len(written)):
            flipped = bytearray(written)
            flipped[position] ^= 1 << position % 8
            file.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=file.name):
                read(folder)
        for size in (0, 1, len(written) // 2, len(written) - 1):
            file.write_bytes(written[:size])
            assert file.name in find_damage(folder / "manifest.json")[0]
        file.write_bytes(written + b"\0")
        assert file.name in find_damage(folder / "manifest.json")[0]
        file.write_bytes(written)
    assert find_damage(folder / "manifest.json") == []


def test_an_edited_number_is_found_though_the_json_is_fine(tmp_path):
    file = write(tmp_path / "checkpoint") / "manifest.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"step": 3}) + "\n")
    assert find_damage(file) == [f"{file} is damaged: its digest is not that of what it says"]


def test_what_is_read_is_compared_with_what_was_written(tmp_path):
    """Files and manifest agree, and yet the tensor is another: as if it had been damaged on its way."""
    folder = write(tmp_path / "checkpoint")
    fields = read_manifest(folder / "manifest.json")
    digest = fields["stored"]["model.a"]["digest"]
    fields["stored"]["model.a"]["digest"] = f"{int(digest, 16) ^ 1:016x}"
    write_manifest(folder / "manifest.json", fields, fields["files"])
    assert find_damage(folder / "manifest.json") == []
    with pytest.raises(CheckpointError, match=r"model\.a of checkpoint .* was read as something else than was written"):
        read(folder)


def test_the_digest_of_a_tensor_does_not_depend_on_how_it_is_cut():
    draw = random.Random(3)
    for shape in [(), (1,), (17,), (5, 7), (4, 3, 6), (2, 3, 4, 5)]:
        for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float64):
            tensor = torch.randint(0, 255, shape).to(dtype)
            whole = sharded.digest_part(tensor, ((0,) * len(shape), shape), shape)
            for _ in range(5):
                boxes = [((0,) * len(shape), shape)]
                for _ in range(draw.randint(0, 3) if shape else 0):
                    boxes = [part for box in boxes for part in halves(box, draw)]
                shares = [
                    sharded.digest_part(
                        tensor[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))],
                        (offsets, sizes),
                        shape,
                    )
                    for offsets, sizes in boxes
                ]
                assert sum(shares) % 2**64 == whole
            if tensor.numel() > 1:
                other = tensor.flatten().roll(1).reshape(shape)
                assert torch.equal(other, tensor) or whole != sharded.digest_part(
                    other, ((0,) * len(shape), shape), shape
                )


def halves(box, draw):
    offsets, sizes = box
    axis = draw.randrange(len(sizes))
    cut = draw.randint(0, sizes[axis])
    for start, size in ((0, cut), (cut, sizes[axis] - cut)):
        if size:
            yield (
                tuple(at + start * (i == axis) for i, at in enumerate(offsets)),
                tuple(size if i == axis else n for i, n in enumerate(sizes)),
            )


class Evil:
    def __reduce__(self):
        return os.abort, ()


@pytest.mark.promise("Nothing in a checkpoint is unpickled")
@pytest.mark.process
def test_nothing_of_a_checkpoint_is_run(tmp_path):
    """Pickles in the place of any file, and beside them, with digests that are right."""
    config = EngineConfig(model_path=str(write_tiny_model(tmp_path / "model")), optimizer=OptimizerConfig(lr=1e-2))
    engine = create_engine("fsdp", config)
    engine.initialize()
    folder = tmp_path / "checkpoint"
    engine.save_checkpoint(folder, 1)
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "shard-00000.safetensors"}
    evil = pickle.dumps(Evil())
    fields = read_manifest(folder / "manifest.json")
    for name in ("shard-00000.safetensors", ".metadata", "__0_0.distcp"):
        (folder / name).write_bytes(evil)
    write_manifest(folder / "manifest.json", fields, digest_files(folder, ["shard-00000.safetensors", ".metadata"]))
    with pytest.raises(CheckpointError, match=r"shard-00000\.safetensors is damaged"):
        engine.load_checkpoint(folder)
    (folder / "manifest.json").write_bytes(evil)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        engine.load_checkpoint(folder)
    engine.close()


@pytest.mark.parametrize("name", ["/etc/hostname", "../other", "a/../../b"])
def test_a_manifest_names_files_of_its_own_folder_alone(tmp_path, name):
    write_manifest(tmp_path / "manifest.json", {}, {name: {"bytes": 1, "blake2b": "00"}})
    assert find_damage(tmp_path / "manifest.json") == [
        f"{tmp_path / 'manifest.json'} is damaged: its digest is not that of what it says"
    ]


@pytest.mark.process
def test_b2sum_gives_the_same_digests(tmp_path):
    import subprocess

    file = write(tmp_path / "checkpoint") / "shard-00000.safetensors"
    printed = subprocess.run(["b2sum", "-l", "256", file], capture_output=True, text=True, check=True).stdout
    assert printed.split()[0] == digest_files(file.parent)[file.name]["blake2b"]
    assert Path(file).stat().st_size == digest_files(file.parent)[file.name]["bytes"]
