"""Sounds of omni thinkers (Qwen2.5-Omni, Qwen3-Omni): columns of a row, and tokens of a sound.

Plan, engine, servers and trainer ask the same functions. A sound is a run of placeholders in a prompt between the
tokens that open and close it; its log-mel spectrogram has a frame every 10 ms.
"""

from __future__ import annotations

import base64
import binascii
import io
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

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


def audio_arguments(pieces: Sequence[Tensor]) -> dict[str, Tensor]:
    """Keyword arguments of the model for sounds, each as `[frames, mels]`: padded to the longest, and a mask."""
    lengths = torch.tensor([len(piece) for piece in pieces], device=pieces[0].device)
    padded = torch.nn.utils.rnn.pad_sequence([*pieces], batch_first=True).transpose(1, 2)
    mask = torch.arange(padded.shape[2], device=lengths.device) < lengths[:, None]
    return {"input_features": padded, "feature_attention_mask": mask}


def omni_positions(trunk: Any, given_ids: Tensor, sizes: Mapping[str, Tensor]) -> Tensor:
    """`[3, T]` positions (time, height, width) of one row, for thinkers.

    Args:
        trunk: The base model, of transformers.
        given_ids: `[T]` int64 token ids, -1 where a model sampled the token.
        sizes: Columns of grids, of seconds and of `LENGTHS`, those that the row has.
    """
    names = {"second_per_grid_ts": "second_per_grids", LENGTHS: "audio_seqlens"}
    renamed = {names.get(name, name): value for name, value in sizes.items()}
    return trunk.get_rope_index(given_ids[None], attention_mask=torch.ones_like(given_ids)[None], **renamed)[0][:, 0]


RATE = 16_000
"""Samples per second that audio towers take."""


def is_audio(url: str) -> bool:
    """Whether a data URL is of a sound."""
    return url.startswith("data:audio/")


def decode_audio(url: str, most_s: float) -> np.ndarray:
    """Decode a sound to `[samples]` float32, mono, `RATE` samples a second. Frames are decoded one by one.

    Args:
        url: A data URL (RFC 2397) in base64, of a file in any format that FFmpeg reads.
        most_s: Longest sound that is taken, seconds.

    Raises:
        ValueError: it cannot be decoded, is empty, or longer; says which. PyAV is not installed (pip line).
    """
    try:
        import av
        from av.error import FFmpegError
    except ImportError as error:
        raise ValueError("sounds are decoded by PyAV, which is not installed: pip install av") from error
    most, length, parts = int(most_s * RATE), 0, list[np.ndarray]()
    try:
        encoded = base64.b64decode(url.partition(",")[2], validate=True)
        with av.open(io.BytesIO(encoded), "r") as container:
            mono = av.AudioResampler(format="flt", layout="mono", rate=RATE)
            frames = itertools.chain(container.decode(audio=0), [None])  # None empties the resampler
            for part in (made.to_ndarray()[0] for frame in frames for made in mono.resample(frame)):
                parts.append(part)
                length += len(part)
                if length > most:
                    raise ValueError(f"it is longer than {most_s:g} s; cut it")
    except (FFmpegError, IndexError, binascii.Error) as error:  # the second where there are only other streams
        raise ValueError(f"it cannot be decoded: {error}") from error
    if not length:
        raise ValueError("it has no samples")
    return np.concatenate(parts)


class AudioProcessor:
    """Feature extractor of an omni model's folder, with tokens and columns of a sound. Calls may come from any thread.

    Raises:
        ImportError, OSError, ValueError: transformers cannot load it.
    """

    columns = AUDIO

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoConfig, AutoFeatureExtractor

        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self._config = getattr(config, "thinker_config", config)
        self.token_id = int(self._config.audio_token_id)
        """Id of the placeholder."""
        self._extract: Any = AutoFeatureExtractor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        self.most_s = self._extract.n_samples / RATE
        """Longest sound that is taken, seconds: transformers cuts a longer one."""

    def read(self, url: str) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """Tokens of a sound, and the values of its columns; frames as the family's processor computes them.

        Raises:
            ValueError: see `decode_audio`; it is too short for a token.
        """
        samples = decode_audio(url, self.most_s)
        found = self._extract(
            samples,
            sampling_rate=RATE,
            padding="max_length" if self._config.model_type == _THINKERS[0] else True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        frames = found["input_features"][0].T[found["attention_mask"][0].bool()]
        if (count := num_audio_tokens(self._config, len(frames))) < 1:
            raise ValueError(f"its {len(samples)} samples of {1000 / RATE:g} ms make no token; give a longer one")
        return (self.token_id,) * count, {FRAMES: frames, LENGTHS: torch.tensor([len(frames)])}

    def empty(self) -> dict[str, Tensor]:
        """Columns of a row without a sound."""
        return {FRAMES: torch.empty(0, self._extract.feature_size), LENGTHS: torch.empty(0, dtype=torch.int64)}
