"""KV cache: keys and values of every layer in blocks of positions. `block_manager.py` tracks who holds which block."""

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
    """Device memory that can be unmapped and mapped again at the same address: `rl_csrc.cuda.mapped.MappedMemory`."""

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """View of the memory as a tensor."""
        ...

    def take(self) -> None:
        """Map the memory again, with arbitrary content; does nothing where it is mapped."""
        ...

    def give_back(self) -> None:
        """Unmap the memory and return it to the driver; its tensors must not be used meanwhile."""
        ...

    def close(self) -> None:
        """Return memory and address range for good."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Shape of the keys and values that one attention layer caches per position."""

    num_heads: int
    """Number of key/value heads."""
    key_dim: int
    """Size of a key."""
    value_dim: int
    """Size of a value."""


class KVCache:
    """KV cache: per layer keys [blocks, block_size, heads, key_dim] and values [blocks, block_size, heads, value_dim].

    Blocks are copied by `index_select` and `index_copy_`: indexing in brackets wakes torch's threads however little
    there is to do, and they then spin on their cores for milliseconds, which the model's own threads lack.

    Memory is zeroed when it is allocated: positions that nobody has written are masked, and a mask does not hide a NaN.

    With `new_memory`, an allocator that is called with a number of bytes, all layers lie in one allocation. `release`
    unmaps it and the next `resize` to the same number of blocks maps it at the same address: CUDA graphs stay valid.
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
        """Number of blocks in so many bytes; 0 means half of a GPU's free memory, or a quarter of the host's.

        Raises:
            ConfigError: the memory is too small for one block.
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
        """Allocate so many blocks. Existing blocks keep their content, but not where `keeps_place`."""
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
        """Whether blocks have the same address after `release` and `resize`."""
        return self._new_memory is not None

    def _moved(self, old: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        new = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if old is not None:
            new[: old.shape[0]] = old
        return new

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as (source, target) pairs."""
        if not pairs:
            return
        source, target = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        for part in (*self.keys.values(), *self.values.values()):
            part.index_copy_(0, target, part.index_select(0, source))

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for part in (*self.keys.values(), *self.values.values()):
            part.index_fill_(0, index, 0)

    def release(self) -> None:
        """Free all memory; `resize` allocates it again."""
        self.num_blocks = 0
        if self._memory is not None:
            self._memory[1].give_back()
            return
        self.keys.clear()
        self.values.clear()

    def close(self) -> None:
        """Free all memory and its addresses for good."""
        self.release()
        self._close_memory()
