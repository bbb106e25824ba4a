"""Reads a Hugging Face folder in slices: every rank those that its shards are made of, and no rank the whole model."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from rl_engine.checkpoint import hf_folder
from rl_engine.checkpoint.hf_folder import SCORE
from rl_engine.checkpoint.sharded import box_of, local_part
from rl_engine.types import Head, Mtp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from rl_engine.types import EngineConfig

_SCALES = "_scale_inv"


class SliceReader:
    """The safetensors files of a folder, checked against the tensors that the model wants. A context manager."""

    def __init__(
        self,
        folder: str | Path,
        wanted: Mapping[str, tuple[int, ...]],
        *,
        head: Head,
        is_tied: bool,
        mtp: Mtp = Mtp.REFUSE,
    ) -> None:
        """Open the files and compare names and shapes; no tensor is read.

        Args:
            folder: The model's.
            wanted: Names and shapes of the tensors that it has to have.
            head: A causal language model may lack the scalar ones.
            is_tied: The folder may have a head that is not wanted.
            mtp: Whether it may have layers for multi-token prediction, and they are wanted (`train`) or left out.

        Raises:
            ModelFolderError: a tensor is missing, left over or of another shape.
        """
        self._folder, self._stack = Path(folder), ExitStack()
        hf_folder.check_weights(self._folder, mtp=mtp)
        left_out = hf_folder.mtp_copies(self._folder) if mtp == Mtp.TRAIN else hf_folder.mtp_names(self._folder)
        self._file_of = _open_files(self._folder, self._stack)
        self._block = hf_folder.block_size(self._folder)
        scales = {name for name in self._file_of if self._block and name.removesuffix(_SCALES) in wanted}
        missing = set(wanted) - set(self._file_of)
        self._zeros = {SCORE: wanted[SCORE]} if missing == {SCORE} else {}  # a causal LM gets a new scalar head
        ignored = {"lm_head.weight"} if is_tied or (head != Head.LM and self._zeros) else set[str]()
        ignored |= {*left_out, *hf_folder.speech_names(self._folder)}
        extra = set(self._file_of) - set(wanted) - ignored - scales
        hf_folder.refuse_tensors(self._folder, "lacks", missing - set(self._zeros))
        hf_folder.refuse_tensors(
            self._folder, "has, beyond what the architecture takes,",
            (name for name in extra if not name.endswith("rotary_emb.inv_freq")),
        )  # fmt: skip
        shapes = {
            name: tuple(self._file_of[name].get_slice(name).get_shape()) for name in wanted if name in self._file_of
        }
        hf_folder.refuse_tensors(
            self._folder,
            "has with another shape",
            (name for name, shape in shapes.items() if shape != tuple(wanted[name])),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def __call__(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Part of one tensor, on the CPU, in the file's number format; float32 where that is quantised."""
        if name in self._zeros:
            return torch.zeros(self._zeros[name])[part]
        return _read(self._file_of, self._block, name, part)


def open_folder(config: EngineConfig, wanted: Mapping[str, tuple[int, ...]], *, is_tied: bool) -> SliceReader:
    """The reader of an engine's model folder; see `SliceReader`."""
    mtp = Mtp.FREEZE if config.mtp == Mtp.TRAIN and not config.trains_mtp else config.mtp
    return SliceReader(config.model_path, wanted, head=config.head, is_tied=is_tied, mtp=mtp)


def read_whole(folder: str | Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a folder by name, whole, float32 where they are quantised."""
    block = hf_folder.block_size(folder) if names else None
    with ExitStack() as stack:
        files = _open_files(Path(folder), stack)
        for name in names:
            if block is None or not name.endswith(_SCALES):
                part = (slice(None),) * len(files[name].get_slice(name).get_shape())
                yield name, _read(files, block, name, part)


def _open_files(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open safetensors file of every tensor."""
    file_of: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        opened = stack.enter_context(hf_folder.open_shard(file))
        file_of |= dict.fromkeys(opened.keys(), opened)
    return file_of


def _read(file_of: Mapping[str, Any], block: tuple[int, int] | None, name: str, part: tuple[slice, ...]) -> Tensor:
    """Part of one tensor, dequantised if it has scales, one for each `block`."""
    found = file_of[name].get_slice(name)[part]
    scales = file_of.get(f"{name}{_SCALES}")
    if block is None or scales is None:
        return found
    factors = scales.get_slice(f"{name}{_SCALES}")[:].to(torch.float32)
    for axis, (run, size) in enumerate(zip(part, block, strict=True)):
        rows = torch.arange(found.shape[axis]) + (run.start or 0)
        factors = factors.index_select(axis, rows // size)
    return found.to(torch.float32) * factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Position of one of the folder's tensors in one of the model's."""

    name: str
    """Name in the folder."""
    shape: tuple[int, ...]
    """Shape in the folder."""
    starts: tuple[int, ...]
    """First index along each axis of the model's tensor."""
    sizes: tuple[int, ...]
    """Length along each axis of the model's tensor."""
    axes: tuple[int | None, ...]
    """Axis of the folder's tensor along each axis of the model's; None where it has one index."""


def find_pieces(
    named: Mapping[str, Tensor], convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> dict[str, list[Piece]] | None:
    """The tensors of the folder that each tensor of the model is made of.

    Args:
        named: The model's tensors; shapes alone are looked at.
        convert: From one tensor of the model to those of the folder that it is made of.

    Returns:
        By name of the model's; None where a tensor is more than others side by side, stacked or transposed.
    """
    found: dict[str, list[Piece]] = {}
    known: dict[tuple[str, tuple[int, ...]], list[tuple[Any, ...]] | None] = {}  # the layers of a model are alike
    for name, tensor in named.items():
        shape = tuple(tensor.shape)
        empty = torch.empty(shape, device="meta")
        parts = convert({name: empty})
        first = next(iter(parts))
        if len(parts) == 1 and parts[first] is empty:
            axes = tuple(range(len(shape)))
            found[name] = [Piece(name=first, shape=shape, starts=(0,) * len(shape), sizes=shape, axes=axes)]
            continue
        kind = re.sub(r"\d+", "0", name), shape
        if kind not in known:
            known[kind] = _trace(name, shape, convert)
        traced = known[kind]
        if traced is None or len(traced) != len(parts):
            return None
        found[name] = [
            Piece(name=own, shape=tuple(part.shape), starts=starts, sizes=sizes, axes=axes)
            for (own, part), (starts, sizes, axes) in zip(parts.items(), traced, strict=True)
        ]
    return found


def shapes_of(pieces: Mapping[str, Sequence[Piece]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the folder's tensors."""
    return {piece.name: piece.shape for found in pieces.values() for piece in found}


def read_shards(
    named: Mapping[str, Tensor],
    pieces: Mapping[str, Sequence[Piece]],
    read: Callable[[str, tuple[slice, ...]], Tensor],
) -> None:
    """Fill this rank's part of every tensor in `named`, in place and in its own number format.

    Args:
        named: The model's tensors, sharded ones as DTensors.
        pieces: From `find_pieces`.
        read: Gives part of one tensor of the folder.
    """
    for name, tensor in named.items():
        local, (offsets, lengths) = local_part(tensor), box_of(tensor)
        for piece in pieces[name]:
            source, target = [slice(None)] * len(piece.shape), list[slice]()
            for axis, (start, size) in enumerate(zip(piece.starts, piece.sizes, strict=True)):
                low, high = max(offsets[axis], start), min(offsets[axis] + lengths[axis], start + size)
                target.append(slice(low - offsets[axis], high - offsets[axis]))
                if (at := piece.axes[axis]) is not None:
                    source[at] = slice(low - start, high - start)
            sizes = [part.stop - part.start for part in target]
            if any(size <= 0 for size in sizes):
                continue
            part = read(piece.name, tuple(source))
            order = [at for at in piece.axes if at is not None]
            order = [at for at in range(part.ndim) if at not in order] + order
            local[tuple(target)].copy_(part.permute(order).reshape(sizes))


def _trace(
    name: str, shape: tuple[int, ...], convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> list[tuple[Any, ...]] | None:
    """Trace the `starts`, `sizes` and `axes` of each folder tensor, by converting every element's own index."""
    dtype = torch.int16 if max(shape) <= torch.iinfo(torch.int16).max else torch.int32
    lines: dict[str, list[tuple[int, int, int | None]]] = {}
    for axis, size in enumerate(shape):
        view = [-1 if other == axis else 1 for other in range(len(shape))]
        index = torch.arange(size, dtype=dtype).view(view).expand(shape)
        for own, part in convert({name: index}).items():
            if (line := _line(part)) is None:
                return None
            lines.setdefault(own, []).append(line)
    found = [(tuple(row[0] for row in rows), tuple(row[1] for row in rows), tuple(row[2] for row in rows))
             for rows in lines.values()]  # fmt: skip
    covered = sum(int(torch.tensor(sizes).prod()) for _, sizes, _ in found)
    return found if covered == int(torch.tensor(shape).prod()) else None


def _line(part: Tensor) -> tuple[int, int, int | None] | None:
    """First index, length and axis of indices that run along one axis of `part` at most; None for others."""
    corner = part[(slice(0, 2),) * part.ndim]
    first, axis = int(corner[(0,) * part.ndim]), None
    for at in range(part.ndim):
        if corner.shape[at] == 1:
            continue
        step = int(corner.select(at, 1)[(0,) * (part.ndim - 1)]) - first
        if step == 1 and axis is None:
            axis = at
        elif step:
            return None
    length = 1 if axis is None else part.shape[axis]
    view = [-1 if at == axis else 1 for at in range(part.ndim)]
    wanted = torch.arange(first, first + length, dtype=part.dtype).view(view)
    return (first, length, axis) if torch.equal(part, wanted.expand(part.shape)) else None
