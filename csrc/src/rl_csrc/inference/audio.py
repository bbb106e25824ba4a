"""Sounds of omni thinkers (Qwen2.5-Omni, Qwen3-Omni): columns of a row, and tokens of a sound.

Plan, engine, servers and trainer ask the same functions. A sound is a run of placeholders in a prompt between the
tokens that open and close it; its log-mel spectrogram has a frame every 10 ms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

FRAMES, LENGTHS = "input_features", "audio_feature_lengths"
"""Columns of a row's sounds: `[frames, mels]` float32, of all sounds end to end; `[sounds]` int64, frames of each."""
AUDIO = (FRAMES, LENGTHS)
_THINKERS = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
N = TypeVar("N", int, "Tensor")


def takes_audio(config: Mapping[str, Any]) -> bool:
    """Whether a model, by the values of its `config.json` (of an omni model, its thinker's), takes sounds."""
    return config.get("model_type") in _THINKERS


def num_audio_tokens(config: Any, frames: N) -> N:
    """Tokens of a sound of so many frames, after the convolutions of the audio tower; below 1 of too short a one.

    Args:
        config: The thinker's, of transformers.
        frames: Frames of the spectrogram: a number, or a tensor of them.
    """
    if config.model_type == _THINKERS[0]:
        return ((frames - 1) // 2 - 1) // 2 + 1
    chunk = 2 * config.audio_config.n_window
    rest = frames % chunk
    for _ in range(3):
        rest = (rest + 1) // 2
    return rest + frames // chunk * 13  # what three such convolutions make of 100 frames, which is every chunk's size
