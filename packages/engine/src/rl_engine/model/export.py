"""Tensors that leave an engine: full ones by name, shards of this rank, model folders, and checkpoints' state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from rl_engine.checkpoint import hf_folder
from rl_engine.checkpoint.hf_folder import DTYPES
from rl_engine.checkpoint.sharded import local_shards, whole
from rl_engine.checkpoint.slices import read_whole
from rl_engine.layers.peft_lora import write_adapter
from rl_engine.optimizer import optimizer_tensors
from rl_engine.types import Mtp, ShardSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from rl_engine.model.scorer import BuiltModel


class WeightExport:
    """Weights of a model in `precision`, under the names of its Hugging Face folder. Collective."""

    def __init__(self, built: BuiltModel) -> None:
        self._built = built
        self._specs: dict[str, ShardSpec] = {}
        """Of the shards that are tensors of the folder, by name."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors, with `exports_mtp` those of its layers too; an error of one rank is raised on all."""
        config = self._built.config
        with self._built.world.together():
            yield from self._tensors()
            if config.exports_mtp:
                copies = hf_folder.mtp_copies(Path(config.model_path))
                yield from ((name, tensor) for name, tensor in self.mtp_tensors() if name not in copies)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._whole(self._built.scorer.named_layers(ahead=False))

    def _whole(self, named: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named.items():
            # Detached: a graph that somebody keeps would keep the weights on the GPU through an offload.
            yield from self._built.scorer.to_folder({name: self.cast(whole(tensor.detach()))}).items()

    def shards(self) -> Iterator[tuple[ShardSpec, Tensor]]:
        """Shards of this rank."""
        scorer = self._built.scorer
        for spec, part in local_shards(scorer.named_layers(ahead=False), scorer.to_folder, self._specs):
            yield spec, self.cast(part)

    def mtp_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Layers for multi-token prediction: trained ones, without copies of embedding and head, or the folder's."""
        config = self._built.config
        if config.trains_mtp:
            yield from self._whole(self._built.scorer.named_layers(ahead=True))
        elif config.mtp != Mtp.REFUSE and self._built.world.rank == 0:
            yield from self._as_they_were(hf_folder.mtp_names(Path(config.model_path)))

    def _as_they_were(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the folder that are not trained."""
        for name, tensor in read_whole(self._built.config.model_path, names):
            yield name, self.cast(tensor)

    def cast(self, tensor: Tensor) -> Tensor:
        """Tensor in `precision`."""
        return tensor.to(DTYPES[self._built.config.precision]) if tensor.is_floating_point() else tensor

    def save(self, path: str | Path) -> None:
        """Write a model folder, or an adapter's: rank 0 writes, and the others take part in gathering."""
        world, config = self._built.world, self._built.config
        folder = Path(config.model_path)
        with world.together():
            weights = {name: tensor.cpu() for name, tensor in self._tensors() if world.rank == 0}
            if not config.exports_adapter:
                weights |= {name: tensor.cpu() for name, tensor in self.mtp_tensors() if world.rank == 0}
            if not config.exports_adapter and world.rank == 0 and (names := hf_folder.speech_names(folder)):
                weights |= self._as_they_were(names)
        for name in hf_folder.mtp_copies(folder) if config.trains_mtp and world.rank == 0 else ():
            embedding, head = weights["model.embed_tokens.weight"], weights.get("lm_head.weight")
            weights[name] = (embedding if head is None or ".embed_tokens." in name else head).clone()
        if world.rank == 0:
            self._write(path, weights)
        world.barrier()

    def _write(self, path: str | Path, weights: dict[str, Tensor]) -> None:
        config, peft = self._built.config, self._built.peft
        if peft is not None and config.exports_adapter:
            write_adapter(path, weights, peft, config.model_path)
            return
        model = hf_folder.empty_model(config.model_path, dtype=DTYPES[config.precision], head=config.head)
        hf_folder.write_model(path, model, weights, config.model_path)


class TrainingState:
    """Weights and optimizer state of this rank. Collective."""

    def __init__(self, built: BuiltModel) -> None:
        self._built = built

    def tensors(self) -> dict[str, Tensor]:
        """Checkpoint tensors of this rank: `restore` fills them, `take` then takes them over."""
        named = self._built.scorer.named_weights()
        state = {f"model.{name}": tensor for name, tensor in named.items()}
        if self._built.optimizer is not None:
            trained = [(name, tensor) for name, tensor in named.items() if isinstance(tensor, nn.Parameter)]
            state |= {
                f"optim.{name}": value for name, value in optimizer_tensors(self._built.optimizer, trained).items()
            }
        return state

    def described(self) -> dict[str, Tensor] | None:
        """Names and shapes of all ranks' checkpoint tensors; None: they are those of this rank."""
        return None

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Take what was read into `tensors()`, where that is not the live tensors themselves."""
