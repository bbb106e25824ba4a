"""KV cache in blocks of positions. Who holds which block, `block_manager.py` knows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rl_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Memory(Protocol):
    """Memory of a device at an address that stays. See `rl_csrc.cuda.mapped.MappedMemory`."""

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in it."""
        ...

    def take(self) -> None:
        """Hold the memory again, with any content."""
        ...

    def give_back(self) -> None:
        """Give it back to the driver; tensors in it must not be used."""
        ...

    def close(self) -> None:
        """Give its address back too."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Shape of the keys and values that one attention layer caches per position."""

    num_heads: int
    """Key/value heads."""
    key_dim: int
    """Size of a key."""
    value_dim: int
    """Size of a value."""


class KVCache:
    """Per layer keys [blocks, block_size, heads, key_dim] and values like them.

    A few blocks are moved by `index_select` and its kin: for indexing in brackets torch wakes its threads however
    little there is to do, and they then keep their cores for milliseconds, in which the model's own threads wait.

    Memory is zeroed when it is taken: positions that nobody has written are masked, and a mask cannot hide a NaN.

    With `new_memory`, called with a number of bytes, all layers lie in one stretch of memory that `release` gives back
    and the next `resize` takes again: the same number of blocks then lies where it lay, and graphs hold.
    """

    def __init__(
        self,
        shapes: dict[int, LayerShape],
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        new_memory: Callable[[int], Memory] | None = None,
    ) -> None:
        self._new_memory = new_memory
        self._memory: tuple[int, Memory] | None = None
        self.shapes = shapes
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.num_blocks = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def bytes_per_block(self) -> int:
        """Memory of one block, all layers, bytes."""
        numbers = sum(s.num_heads * (s.key_dim + s.value_dim) for s in self.shapes.values())
        return numbers * self.block_size * self.dtype.itemsize

    def most_blocks(self, num_bytes: int) -> int:
        """Blocks that so much memory holds; for 0 bytes, half of what is free on a GPU or a quarter of the host's.

        Raises:
            ConfigError: not one.
        """
        if not num_bytes and self.device.type == "cuda":
            num_bytes = torch.cuda.mem_get_info(self.device)[0] // 2
        elif not num_bytes:
            num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
        if num_bytes < self.bytes_per_block:
            raise ConfigError(
                f"kv_cache_bytes={num_bytes} holds no block of the cache, which takes {self.bytes_per_block}; raise it"
            )
        return num_bytes // self.bytes_per_block

    def resize(self, num_blocks: int) -> None:
        """Room for so many blocks; those that there are keep their content."""
        if num_blocks == self.num_blocks:
            return
        if self._new_memory is not None:
            self._lay_out(num_blocks, self._new_memory)
            return
        for layer, shape in self.shapes.items():
            room = (num_blocks, self.block_size, shape.num_heads)
            self.keys[layer] = self._moved(self.keys.get(layer), (*room, shape.key_dim))
            self.values[layer] = self._moved(self.values.get(layer), (*room, shape.value_dim))
        self.num_blocks = num_blocks

    def _lay_out(self, num_blocks: int, new_memory: Callable[[int], Memory]) -> None:
        if self._memory is not None and self._memory[0] == num_blocks:
            self._memory[1].take()
        else:
            self._close_memory()
            memory = new_memory(num_blocks * self.bytes_per_block)
            self._memory, at = (num_blocks, memory), 0
            for layer, shape in self.shapes.items():
                for part, size in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
                    whole = (num_blocks, self.block_size, shape.num_heads, size)
                    part[layer] = memory.tensor(at, whole, self.dtype)
                    at += part[layer].nbytes
        for part in (*self.keys.values(), *self.values.values()):
            part.zero_()
        self.num_blocks = num_blocks

    def _close_memory(self) -> None:
        if self._memory is not None:
            self.keys.clear()
            self.values.clear()
            self._memory[1].close()
            self._memory = None

    @property
    def keeps_place(self) -> bool:
        """Whether blocks lie where they lay once they are released and taken again."""
        return self._new_memory is not None

    def _moved(self, old: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        new = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if old is not None:
            new[: old.shape[0]] = old
        return new

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks: (source, target) each."""
        if not pairs:
            return
        source, target = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        for part in (*self.keys.values(), *self.values.values()):
            part.index_copy_(0, target, part.index_select(0, source))

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for part in (*self.keys.values(), *self.values.values()):
            part.index_fill_(0, index, 0)

    def release(self) -> None:
        """Give all memory back."""
        self.num_blocks = 0
        if self._memory is not None:
            self._memory[1].give_back()
            return
        self.keys.clear()
        self.values.clear()

    def close(self) -> None:
        """Give all memory back for good."""
        self.release()
        self._close_memory()
