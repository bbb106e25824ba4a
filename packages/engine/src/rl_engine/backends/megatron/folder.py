"""Reads parts of the tensors of a Hugging Face folder, so that a rank loads no more than its own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from rl_engine.backends.megatron.weights import SCORE
from rl_engine.checkpoint import hf_folder
from rl_engine.types import Head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class SliceReader:
    """The safetensors files of a folder, checked against the tensors that the model wants. A context manager."""

    def __init__(self, folder: str | Path, wanted: Mapping[str, tuple[int, ...]], *, head: Head, is_tied: bool) -> None:
        """Open the files and compare names and shapes; no tensor is read.

        Raises:
            ModelFolderError: a tensor is missing, left over or of another shape.
        """
        self._folder, self._stack = Path(folder), ExitStack()
        self._file_of: dict[str, Any] = {}
        hf_folder.check_weights(self._folder)
        for file in sorted(self._folder.glob("*.safetensors")):
            opened = self._stack.enter_context(hf_folder.open_shard(file))
            self._file_of |= dict.fromkeys(opened.keys(), opened)
        missing = set(wanted) - set(self._file_of)
        self._zeros = {SCORE: wanted[SCORE]} if missing == {SCORE} else {}  # a causal LM gets a new scalar head
        ignored = {"lm_head.weight"} if is_tied or (head != Head.LM and self._zeros) else set[str]()
        extra = set(self._file_of) - set(wanted) - ignored
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
        """Part of one tensor, on the CPU, in the file's number format."""
        if name in self._zeros:
            return torch.zeros(self._zeros[name])[part]
        return self._file_of[name].get_slice(name)[part]
