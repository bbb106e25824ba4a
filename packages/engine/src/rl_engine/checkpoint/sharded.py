"""Checkpoint folders: every rank's tensors in a safetensors file, and a manifest that is written last.

    shard-00000.safetensors ...   what each rank wrote, under names such as `model.lm_head.weight@0,0`
    manifest.json                 step, and of every tensor dtype, shape, digest and where its parts lie

A folder without `manifest.json` does not exist as far as loading is concerned. Tensors are stored whole or as boxes
with their offsets, so that any world size reads what any other wrote. Nothing in a folder is code, and nothing in it is
unpickled. `load` compares the files with their digests, and then the tensors that were read with theirs: a tensor's
digest is that of its elements in order, whichever ranks wrote or read which part of it.
"""

from __future__ import annotations

import json
import math
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_csrc import digest_finish, digest_sum
from rl_engine.checkpoint.hf_folder import previous_folder, replace_folder, sync_to_disk
from rl_engine.errors import CheckpointError, EngineError, naming
from rl_engine.types import ShardSpec
from rl_engine.types.manifest import find_damage, new_digest, read_manifest, write_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rl_engine.distributed.world import World

MANIFEST = "manifest.json"
_FORMAT = "rl-engine-checkpoint/2"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Number formats by the names that safetensors gives them."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAID = ("step", "schedule_step", "world_size")
_ELEMENTS_AT_ONCE = 1 << 20
_MASK = (1 << 64) - 1

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Manifest of a checkpoint: step, schedule, tensors and random states."""

    step: int
    """The caller's step."""
    schedule_step: int
    """Position in the learning-rate schedule."""
    world_size: int
    """Ranks that wrote it."""
    shapes: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Global shape of every tensor but the states of random number generators; read, not written."""


# Writing


def save(path: str | Path, tensors: Mapping[str, Tensor], manifest: Manifest, world: World) -> None:
    """Write a checkpoint folder; it appears complete or not at all. Collective.

    Raises:
        CheckpointError: a file cannot be written, a rank is gone, or ranks give different paths or steps; on every
            rank.
    """
    target = Path(path).absolute()
    try:
        _save(target, tensors, manifest, world)
    except CheckpointError:
        raise
    except EngineError as error:  # a peer is gone
        raise CheckpointError(f"Checkpoint {target} cannot be written: {error}") from error


def _save(target: Path, tensors: Mapping[str, Tensor], manifest: Manifest, world: World) -> None:
    draft = target.with_name(f".{target.name}.draft")
    said = world.exchange((str(target), manifest.step))
    if (other := next((mine for mine in said if mine != said[0]), None)) is not None:
        raise CheckpointError(f"Ranks save different checkpoints (path and step): {said[0]} and {other}.")

    def prepare() -> None:
        _recover(target)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)

    on_rank_0(prepare, target, world)
    mine = _share(tensors, world)
    name = f"shard-{world.rank:05d}.safetensors"
    written: dict[str, Any] | None = None
    problem = None
    try:
        written = write_shard(draft / name, mine) if mine else None
    except OSError as error:
        problem = f"Checkpoint {target} cannot be written: {error}"
    parts = [(key, list(box[0]), list(box[1]), digest_part(part, box, shape)) for key, box, shape, part in mine]
    answers = world.exchange((problem, name, written, parts))
    if (problem := next((answer[0] for answer in answers if answer[0]), None)) is not None:
        raise CheckpointError(problem)
    contents = _contents(manifest, _described(tensors, world), answers)
    files = {file: entry for _, file, entry, _ in answers if entry is not None}

    def finish() -> None:
        write_manifest(draft / MANIFEST, contents, files)
        sync_to_disk(draft / MANIFEST)
        replace_folder(draft, target)

    on_rank_0(finish, target, world)


def on_rank_0(work: Callable[[], None], target: Path, world: World) -> None:
    """Let rank 0 do its part of writing `target`; its failure is raised on every rank. Collective."""
    problem = None
    if world.rank == 0:
        try:
            work()
        except OSError as error:
            problem = f"Checkpoint {target} cannot be written: {error}"
    problem = world.exchange(problem)[0]
    if problem is not None:
        raise CheckpointError(problem)


def _share(tensors: Mapping[str, Tensor], world: World) -> list[tuple[str, Box, tuple[int, ...], Tensor]]:
    """Parts that this rank writes: name, box, whole shape, numbers. Replicated parts are written by one rank."""
    held = {(name, box_of(tensor)): tensor for name, tensor in tensors.items()}
    load = [0] * world.size
    owners: dict[tuple[str, Box], int] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, keys in enumerate(world.exchange(list(held))):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    for key, ranks in holders.items():
        owner = min(ranks, key=lambda rank: load[rank])
        owners[key] = owner
        load[owner] += math.prod(key[1][1])
    return [
        (name, box, tuple(tensor.shape), local_part(tensor))
        for (name, box), tensor in held.items()
        if owners[name, box] == world.rank and math.prod(box[1])
    ]


def _described(tensors: Mapping[str, Tensor], world: World) -> dict[str, tuple[str, list[int]]]:
    """Dtype and whole shape of every rank's tensors by name. Collective."""
    mine = {name: (_DTYPES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()}
    return {name: entry for shapes in world.exchange(mine) for name, entry in shapes.items()}


def _contents(
    manifest: Manifest, shapes: Mapping[str, tuple[str, list[int]]], answers: Sequence[Any]
) -> dict[str, Any]:
    """Contents of the manifest."""
    stored: dict[str, dict[str, Any]] = {
        name: {"dtype": dtype, "shape": shape, "digest": 0, "parts": []} for name, (dtype, shape) in shapes.items()
    }
    for _, file, _, parts in answers:
        for name, offsets, sizes, digest in parts:
            stored[name]["parts"].append([file, offsets, sizes])
            stored[name]["digest"] += digest
    for name, entry in stored.items():
        held, whole = sum(math.prod(sizes) for _, _, sizes in entry["parts"]), math.prod(entry["shape"])
        if held != whole:
            raise CheckpointError(f"The ranks hold {held} elements of {name}, which has {whole}; nothing was written.")
        entry["digest"] = _finished(entry["digest"], whole)
    said = {name: getattr(manifest, name) for name in _SAID}
    return {"format": _FORMAT, **said, "stored": stored}


def write_shard(file: Path, parts: Sequence[tuple[str, Box, tuple[int, ...], Tensor]]) -> dict[str, Any]:
    """Write a safetensors file, one tensor after the other, and sync it; returns its size and digest.

    The digest is of what was meant to be written, and not of what the file system gives back.
    """
    header: dict[str, Any] = {}
    position = 0
    for name, box, _, part in parts:
        size = part.numel() * part.element_size()
        entry = {"dtype": _DTYPES[part.dtype], "shape": list(box[1]), "data_offsets": [position, position + size]}
        header[_key(name, box[0])] = entry
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    digest = new_digest()
    size = 0
    with naming(file), file.open("wb") as stream:
        for piece in (len(text).to_bytes(8, "little"), text, *(_raw(part) for _, _, _, part in parts)):
            stream.write(piece)
            digest.update(piece)
            size += len(piece)
    sync_to_disk(file)
    return {"bytes": size, "blake2b": digest.hexdigest()}


# Reading


def read_step(path: str | Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of another format.
    """
    fields = _read_fields(Path(path).absolute())
    shapes = {name: entry["shape"] for name, entry in fields["stored"].items() if not name.startswith("rng.")}
    return Manifest(**{name: fields[name] for name in _SAID}, shapes=shapes)


def _read_fields(target: Path) -> dict[str, Any]:
    file = target / MANIFEST
    if not file.is_file():
        file = previous_folder(target) / MANIFEST
    if not file.is_file():
        raise CheckpointError(
            f"{target} holds no complete checkpoint (no {MANIFEST}). Give the folder of an earlier step."
        )
    try:
        fields = read_manifest(file)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Give the folder of an earlier step.") from error
    if fields.get("format") != _FORMAT:
        raise CheckpointError(f"{file} is not of format {_FORMAT}; this version of rl-engine cannot read it.")
    return fields


def load(path: str | Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Fill `tensors` in place from a checkpoint, all of them or none. Collective.

    Raises:
        CheckpointError: a file is damaged, a tensor is absent or of another shape, or what was read is not what was
            written; on every rank.
    """
    target = Path(path).absolute()
    if world.rank == 0:
        _recover(target)
    world.barrier()
    read: dict[str, Tensor] = {}
    parts: list[tuple[str, Box, int]] = []
    problem = None
    try:
        fields = _read_fields(target)
        mine = sorted(fields["files"])[world.rank :: world.size]
        if damage := find_damage(target / MANIFEST, mine):
            raise CheckpointError(f"{damage[0]}. Give the folder of an earlier step.")
        shards = _Shards(target, fields["stored"])
        for name, tensor in tensors.items():
            box = box_of(tensor)
            read[name] = shards.read(name, box)
            parts.append((name, box, digest_part(read[name], box, tuple(tensor.shape))))
    except (CheckpointError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        problem = str(error) if isinstance(error, CheckpointError) else f"Checkpoint {target} cannot be read: {error!r}"
    answers = world.exchange((problem, parts))
    problems = [text for text, _ in answers if text]
    if not problems:
        problems = _differing(target, _read_fields(target)["stored"], [part for _, mine in answers for part in mine])
    if problems:
        raise CheckpointError(problems[0])
    with torch.no_grad():
        for name, tensor in tensors.items():
            local_part(tensor).copy_(read[name])


def _differing(target: Path, stored: Mapping[str, Any], parts: Sequence[tuple[str, Box, int]]) -> list[str]:
    """A sentence for each tensor that was read as something else than was written.

    One that no rank, or not all of it, was asked for (the generators of a rank that is not there) says nothing.
    """
    found: dict[str, dict[Box, int]] = {}
    problems: list[str] = []
    for name, box, digest in parts:
        if found.setdefault(name, {}).setdefault(box, digest) != digest:
            problems.append(
                f"Ranks read {name} of checkpoint {target} differently: a file system shows them two states."
            )
    for name, boxes in found.items():
        whole = math.prod(stored[name]["shape"])
        is_whole = sum(math.prod(sizes) for _, sizes in boxes) == whole
        if is_whole and _finished(sum(boxes.values()), whole) != stored[name]["digest"]:
            problems.append(f"{name} of checkpoint {target} was read as something else than was written.")
    return problems


class _Shards:
    """The safetensors files of a checkpoint, opened as they are needed."""

    def __init__(self, folder: Path, stored: Mapping[str, Any]) -> None:
        self._folder, self._stored = folder, stored
        self._opened: dict[str, Any] = {}

    def read(self, name: str, box: Box) -> Tensor:
        """The elements of a box, on the CPU, in the number format that they were written in."""
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"Checkpoint {self._folder} has no tensor {name}.")
        result = torch.empty(box[1], dtype=next(key for key, value in _DTYPES.items() if value == stored["dtype"]))
        filled = 0
        for file, offsets, sizes in stored["parts"]:
            low = [max(a, b) for a, b in zip(box[0], offsets, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(*box, offsets, sizes, strict=True)]
            if any(start >= stop for start, stop in zip(low, high, strict=True)):
                continue
            key = _key(name, offsets)
            part = (
                self._open(file).get_slice(key)[_within(low, high, offsets)]
                if low
                else self._open(file).get_tensor(key)
            )
            result[_within(low, high, box[0])] = part
            filled += part.numel()
        if filled != result.numel():
            raise CheckpointError(f"Checkpoint {self._folder} has {filled} of {result.numel()} elements of {name}.")
        return result

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._opened:
            try:
                self._opened[file] = safe_open(self._folder / file, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{self._folder / file} is damaged ({error}).") from error
        return self._opened[file]


def check_tensors(path: str | Path, manifest: Manifest, wanted: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint that lacks one of `wanted` or has it in another shape.

    Raises:
        CheckpointError: names the first such tensor.
    """
    for name, tensor in wanted.items():
        shape = manifest.shapes.get(name)
        if shape is None:
            raise CheckpointError(
                f"Checkpoint {path} has no tensor {name}: it belongs to another model, or to a frozen engine."
            )
        if shape != list(tensor.shape):
            raise CheckpointError(
                f"Checkpoint {path} belongs to another model: {name} has shape {shape}, "
                f"this model's is {list(tensor.shape)}."
            )
    extra = [name for name in manifest.shapes if name.startswith("model.") and name not in wanted]
    if extra:
        raise CheckpointError(
            f"Checkpoint {path} belongs to another model: it has {extra[0]}, which this model has not."
        )


def _recover(target: Path) -> None:
    """Finish a replacement that was killed between its two renames."""
    previous = previous_folder(target)
    if previous.is_dir() and not target.exists():
        previous.rename(target)


# Parts of tensors, and their digests


def box_of(tensor: Tensor) -> Box:
    """Box of this rank in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(sizes)


def local_part(tensor: Tensor) -> Tensor:
    """Local part of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def digest_part(part: Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """Share of a part in the digest of its tensor; shares of parts that do not overlap add up modulo 2**64.

    The digest is `rl_csrc.digest` of the elements' bits, each widened to 64, in row-major order.
    """
    return (
        sum(
            digest_sum(run.view(_BITS[run.element_size()]).to(torch.int64), offset=8 * (first + start)) & _MASK
            for first, row in _runs(part.contiguous(), box, shape)
            for start, run in (
                (at, row[at : at + _ELEMENTS_AT_ONCE]) for at in range(0, row.numel(), _ELEMENTS_AT_ONCE)
            )
        )
        & _MASK
    )


def _runs(part: Tensor, box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
    """The part as runs of neighbouring elements of the whole tensor: the first one's index there, and the run `[N]`."""
    offsets, sizes = box
    cut = max((axis for axis in range(len(shape)) if sizes[axis] != shape[axis]), default=0)
    rows = part.reshape(math.prod(sizes[:cut]), -1) if part.numel() else ()
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    inner = offsets[cut] * strides[cut] if shape else 0
    for number, row in enumerate(rows):
        first, rest = inner, number
        for axis in reversed(range(cut)):
            rest, index = divmod(rest, sizes[axis])
            first += (offsets[axis] + index) * strides[axis]
        yield first, row


def _finished(total: int, num_elements: int) -> str:
    return f"{digest_finish(total & _MASK, 8 * num_elements):016x}"


def _within(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """The box from `low` to `high`, counted from `origin`."""
    return tuple(slice(start - at, stop - at) for start, stop, at in zip(low, high, origin, strict=True))


def _key(name: str, offsets: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


def _raw(part: Tensor) -> memoryview:
    """The bytes of a part, in row-major order."""
    plain = part.cpu().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data  # reshape keeps one element's stride


def whole(tensor: Tensor) -> Tensor:
    """Full tensor of a sharded one. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shards(
    named: Mapping[str, Tensor],
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    known: dict[str, ShardSpec] | None = None,
) -> Iterator[tuple[ShardSpec, Tensor]]:
    """Shards of this rank of every tensor in `named`; nothing is communicated.

    Args:
        named: The model's tensors, sharded ones as DTensors.
        convert: From one tensor of the model to those of the folder that it is made of. A tensor that is several, such
            as all experts of a layer, takes twice its whole size for a moment.
        known: Specs that were found before, by name: of a model that is sharded as it was. Those found now are added.
    """
    known = {} if known is None else known
    for name, tensor in named.items():
        local = local_part(tensor)
        if name in known:
            yield known[name], local
            continue
        offsets, sizes = box_of(tensor)
        if list(convert({name: torch.empty(tensor.shape, device="meta")})) == [name]:
            known[name] = ShardSpec(name=name, shape=tuple(tensor.shape), offsets=offsets, sizes=sizes)
            yield known[name], local
            continue
        part = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        whole = local.new_zeros(tensor.shape)
        held = torch.zeros(tensor.shape, dtype=torch.int8, device=local.device)
        whole[part], held[part] = local, 1
        mask = convert({name: held})
        for own, full in convert({name: whole}).items():
            yield from _cut(own, full, mask[own])


def _cut(name: str, full: Tensor, mask: Tensor) -> Iterator[tuple[ShardSpec, Tensor]]:
    """The box where `mask` is 1: what was a slice of the model's tensor is one of the folder's."""
    found = mask.nonzero()
    if not len(found):
        return
    low, high = found.amin(0), found.amax(0) + 1
    part = tuple(slice(start, stop) for start, stop in zip(low.tolist(), high.tolist(), strict=True))
    spec = ShardSpec(
        name=name, shape=tuple(full.shape), offsets=tuple(low.tolist()), sizes=tuple((high - low).tolist())
    )
    yield spec, full[part].contiguous()


# Random numbers


def rng_state(device: torch.device) -> Tensor:
    """State of this rank's random number generators, uint8."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _set_rng(state: Tensor, device: torch.device) -> None:
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:].clone(), device)


# The engine's side


def restore(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    world: World,
    seed: int,
    described: Mapping[str, Tensor] | None = None,
) -> Manifest:
    """Fill `tensors` in place and set this rank's random number generators. Collective.

    A rank that was not there when the checkpoint was written seeds itself anew, from `seed`.

    Args:
        path: The checkpoint.
        tensors: Tensors of the model and the optimizer that this rank holds.
        world: All ranks.
        seed: The engine's.
        described: Names and whole shapes of what all ranks hold; by default those of `tensors`.

    Raises:
        CheckpointError: as `read_step`, `check_tensors` and `load`; nothing is changed.
    """
    manifest = read_step(path)
    check_tensors(path, manifest, tensors if described is None else described)
    name = f"rng.{world.rank}"
    rng = {name: rng_state(world.device)} if world.rank < manifest.world_size else {}
    load(path, {**tensors, **rng}, world)
    if rng:
        _set_rng(rng[name], world.device)
    else:
        torch.manual_seed(hash((seed, manifest.step, world.rank)) % 2**63)
    return manifest


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread where `is_async`. Every rank calls it in the same order.

    A failure of the thread is raised by the next `save` or `wait`.
    """

    def __init__(self, world: World, *, is_async: bool, timeout_s: float) -> None:
        """Join the ranks. Collective where `is_async`: the thread has its own process group."""
        self._device, self._world, self._timeout_s = world.device, world, timeout_s
        self._pool = ThreadPoolExecutor(1, "rl-engine checkpoint") if is_async else None
        if is_async and world.size > 1:
            group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self._world = replace(world, group=group, device=torch.device("cpu"))
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}
        self._writing: tuple[str, Future[None]] | None = None

    def save(self, path: str | Path, tensors: Mapping[str, Tensor], step: int, schedule_step: int) -> None:
        """Write `tensors` and the state of this rank's random number generators; see `save`. Collective.

        Raises:
            CheckpointError: it cannot be written, or the one before was not.
        """
        self.wait()
        manifest = Manifest(step=step, schedule_step=schedule_step, world_size=self._world.size)
        tensors = {**tensors, f"rng.{self._world.rank}": rng_state(self._device)}
        if self._pool is None:
            save(path, tensors, manifest, self._world)
            return
        staged = {name: self._copy(tensor) for name, tensor in tensors.items()}
        self._writing = str(path), self._pool.submit(save, path, staged, manifest, self._world)

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            CheckpointError: the save failed, or has not ended within the deadline.
        """
        if self._writing is None:
            return
        target, future = self._writing
        try:
            failure = future.exception(self._timeout_s)
        except TimeoutError:
            raise CheckpointError(
                f"Checkpoint {target} is still being written after {self._timeout_s:.0f} s. "
                "Look at the file system, or raise timeout_s."
            ) from None
        self._writing = None
        if failure is not None:
            raise CheckpointError(
                f"Checkpoint {target} was not written ({failure}); the one before it, if any, is as it was."
            ) from failure

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy of a tensor on the CPU, so that the next step may change the original; a shard stays a shard."""
        if not isinstance(tensor, DTensor):
            return tensor.detach().to("cpu", copy=True)
        mesh = tensor.device_mesh
        if mesh.device_type != "cpu" and mesh not in self._meshes:
            self._meshes[mesh] = DeviceMesh("cpu", mesh.mesh.cpu(), mesh_dim_names=mesh.mesh_dim_names)
        return DTensor.from_local(
            tensor.to_local().detach().to("cpu", copy=True),
            self._meshes.get(mesh, mesh),
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
