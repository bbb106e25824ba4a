"""Sounds: tokens of a number of frames, decoding, and positions."""

import base64
from types import SimpleNamespace

import numpy as np
import pytest

from rl_csrc.inference.audio import decode_audio, num_audio_tokens
from rl_rollout.testing import encoded_tone

pytestmark = pytest.mark.core

CONFIGS = {
    "qwen2_5_omni": SimpleNamespace(model_type="qwen2_5_omni_thinker"),
    "qwen3_omni_moe": SimpleNamespace(model_type="qwen3_omni_moe_thinker", audio_config=SimpleNamespace(n_window=50)),
}


@pytest.mark.parametrize(
    ("family", "frames", "tokens"),
    [
        ("qwen2_5_omni", 2, 0),  # one frame after the convolutions, of which two make a token
        ("qwen2_5_omni", 3, 1),
        ("qwen2_5_omni", 100, 25),
        ("qwen2_5_omni", 30_000, 7500),
        ("qwen3_omni_moe", 1, 1),
        ("qwen3_omni_moe", 9, 2),
        ("qwen3_omni_moe", 100, 13),
        ("qwen3_omni_moe", 130, 13 + 4),
    ],
)
def test_tokens_of_a_sound(family, frames, tokens):
    assert num_audio_tokens(CONFIGS[family], frames) == tokens


def url_of(encoded):
    return f"data:audio/file;base64,{base64.b64encode(encoded).decode()}"


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3"])
def test_a_file_is_decoded_to_one_rate(kind):
    """Half a second of 500 Hz, at another rate: the loudest of 1 Hz bins is that one, at the amplitude written."""
    samples = decode_audio(url_of(encoded_tone(kind, 500, seconds=0.5, rate=44_100)), 1.0)
    assert samples.dtype == np.float32
    assert abs(len(samples) - 8000) < 1200  # an mp3 has the padding of its encoder
    loudness = np.abs(np.fft.rfft(samples, 16_000))
    assert loudness.argmax() == pytest.approx(500, abs=2)
    assert np.abs(samples).max() == pytest.approx(16_000 / 2**15, rel=0.05)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (url_of(b""), "it cannot be decoded"),
        ("data:audio/wav;base64,*", "it cannot be decoded"),
        (url_of(encoded_tone("flac", 500, seconds=1.1)), "it is longer than 1 s; cut it"),
        (url_of(encoded_tone("flac", 500)[:60]), "it cannot be decoded"),
    ],
)
def test_a_bad_file_is_refused(url, message):
    with pytest.raises(ValueError, match=message):
        decode_audio(url, 1.0)
