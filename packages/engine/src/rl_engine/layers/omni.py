"""Images, videos and sounds of omni thinkers (Qwen2.5-Omni, Qwen3-Omni) in a packed batch, and the choice by model.

A row's sounds are placeholder tokens in it; their log-mel frames ride along as `input_features`, `[frames, mels]` end
to end, and their lengths as `audio_feature_lengths`. See `rl_engine.layers.multimodal` for the rest.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from rl_csrc.inference.audio import FRAMES, LENGTHS, audio_arguments, num_audio_tokens, omni_positions, takes_audio
from rl_csrc.inference.images import GRIDS, image_columns
from rl_engine.batch.packed import to_device
from rl_engine.errors import BatchError
from rl_engine.layers.multimodal import ImageInputs, MultimodalInputs, modalities_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from rl_engine.batch.packed import PackedRows
    from rl_engine.batch.row_batch import RowBatch

_BLANK_FRAMES = 4
"""Frames of the shortest sound that both families make a token of, rounded up."""


def multimodal_inputs(model: PreTrainedModel) -> MultimodalInputs | ImageInputs | None:
    """Inputs of a model that takes images; None of another."""
    values = model.config.to_dict()
    columns = image_columns(values)
    if GRIDS in columns:
        inputs = OmniInputs if takes_audio(values) else MultimodalInputs
        return inputs(model) if hasattr(model.base_model, "get_rope_index") else None
    return ImageInputs(model, columns) if columns else None


class OmniInputs(MultimodalInputs):
    """Image, video and audio inputs of a thinker.

    Both towers run in every micro-batch, on blanks if need be, and the audio tower first: ranks gather the parameters
    of both in one order.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._config: Any = model.config
        self._token_id, self._mels = model.config.audio_token_id, model.config.audio_config.num_mel_bins
        self._takes_seconds = True
        self._hear = self._trunk.get_audio_features
        self._features: Tensor | None = None
        """`[tokens, H]` of the current micro-batch's sounds."""
        self._padding = _RowPadding(self._trunk.audio_tower)
        self._trunk.get_audio_features = self._heard

    def _heard(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the model's call of the audio tower."""
        del args, kwargs
        return SimpleNamespace(last_hidden_state=self._features)

    def passes_in(self, rows: PackedRows) -> int:
        """See `MultimodalInputs`: blanks are among the arguments."""
        del rows
        return self.num_passes

    def check(self, batch: RowBatch) -> None:
        """See `MultimodalInputs`, and refuse rows whose sounds do not fit."""
        super().check(batch)
        marks = batch.count_given(self._token_id)
        given = [name for name in (FRAMES, LENGTHS) if batch.has(name)]
        if len(given) < 2:
            if given or int(marks.sum()):
                raise BatchError(f"Rows with audio tokens ({self._token_id}) need {FRAMES} and {LENGTHS}; give both.")
            return
        (frames, num_frames), (lengths, counts) = batch.ragged(FRAMES), batch.ragged(LENGTHS)
        if frames.shape[1:] != (self._mels,) or lengths.ndim != 1:
            raise BatchError(
                f"{FRAMES} has values of shape {[*frames.shape]} and {LENGTHS} of {[*lengths.shape]}; wanted "
                f"(frames, {self._mels}) and (sounds,)."
            )
        row_of = torch.arange(batch.num_rows, device=lengths.device).repeat_interleave(counts)
        total, wanted = (
            torch.zeros_like(marks).index_add_(0, row_of, each)
            for each in (lengths, num_audio_tokens(self._config, lengths))
        )
        starts = batch.count_given(self._config.audio_start_token_id)
        wrong = (total != num_frames) | (wanted != marks) | (counts != starts)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise BatchError(
                f"Row {row} has {int(counts[row])} sounds of {int(total[row])} frames, which make {int(wanted[row])} "
                f"tokens, but {int(num_frames[row])} frames, {int(marks[row])} audio tokens ({self._token_id}) and "
                f"{int(starts[row])} tokens that open a sound ({self._config.audio_start_token_id})."
            )

    def _size_columns(self, batch: RowBatch) -> list[str]:
        return [*super()._size_columns(batch), *([LENGTHS] if batch.has(LENGTHS) else [])]

    def _positions(self, given_ids: Tensor, sizes: dict[str, Tensor]) -> Tensor:
        return omni_positions(self._trunk, given_ids, sizes).T

    def arguments(self, rows: PackedRows) -> dict[str, Any]:
        """See `MultimodalInputs`; the sounds' features are made here."""
        found, device = super().arguments(rows), rows.token_ids.device
        given, lengths = rows.given_ids, rows.visual.get(LENGTHS)
        if given is None:
            given = torch.full_like(rows.token_ids, -1)
        fed = None if rows.shared is None else to_device(rows.shared.fed, device)
        if lengths is None or not len(lengths):
            pieces, widths = [torch.zeros(_BLANK_FRAMES, self._mels, device=device)], [_BLANK_FRAMES]
        else:
            pieces = rows.visual[FRAMES].split(lengths.tolist())
            widths = [max(map(len, own)) for own in _by_row(pieces, rows.sounds) for _ in own]
            if fed is not None:
                kept = self._kept(self._token_id, num_audio_tokens(self._config, lengths), given, fed).tolist()
                pieces, widths = [pieces[index] for index in kept], [widths[index] for index in kept]
        self._given.ids = (given if fed is None or rows.given_ids is None else given[fed])[None]
        sounds = audio_arguments(pieces)
        self._padding.pad_to(widths, torch.tensor([*map(len, pieces)], device=device))
        features = self._hear(**sounds, return_dict=True).last_hidden_state
        for _ in range(self.num_passes - len(modalities_in(rows))):
            features = features + self.blank(device)
        self._features = features
        return found | sounds


def _by_row(pieces: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    left = iter(pieces)
    return [[next(left) for _ in range(count)] for count in counts]


class _RowPadding:
    """Pads sounds to the longest of their row, up to a chunk, as when rows are run one by one.

    The convolutions of Qwen3-Omni carry what padding becomes after the first of them into a sound's last tokens. Those
    of Qwen2.5-Omni do not.
    """

    def __init__(self, tower: Any) -> None:
        self._tower = tower
        self._widths: dict[int, Iterator[Tensor]] = {}
        """Widths of chunks after so many convolutions, call by call."""
        self._is_needed = hasattr(tower, "conv2d1")
        for halvings, conv in enumerate((tower.conv2d1, tower.conv2d2) if self._is_needed else (), start=1):
            conv.register_forward_hook(partial(self._cut, halvings))

    def pad_to(self, widths: Sequence[int], counts: Tensor) -> None:
        """Set the width of each sound, and its frames, before the tower runs on them."""
        if not self._is_needed:
            return
        chunk = 2 * self._tower.n_window
        width = torch.tensor(widths, device=counts.device).clamp(max=chunk).repeat_interleave(-(-counts // chunk))
        for halvings in (1, 2):
            width = (width + 1) // 2
            self._widths[halvings] = iter(width.split(self._tower.conv_chunksize))

    def _cut(self, halvings: int, conv: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        del conv, inputs
        width = next(self._widths[halvings])
        return output * (torch.arange(output.shape[-1], device=output.device) < width[:, None, None, None])
