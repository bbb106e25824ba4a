"""Sounds of rows, taken out of messages as data URLs."""

import base64
import io

import av
import pytest

from rl_agent.audio import audio_url
from rl_agent.errors import RowError
from rl_agent.media import take_images

pytestmark = pytest.mark.core


def test_a_sound_of_any_form_is_a_data_url(tmp_path):
    file = tmp_path / "a sound.flac"
    file.write_bytes(b"fLaC")
    want = f"data:audio/file;base64,{base64.b64encode(b'fLaC').decode()}"
    forms = [str(file), file.as_uri(), b"fLaC", {"bytes": b"fLaC", "path": None}, {"bytes": None, "path": str(file)}]
    assert {audio_url(form) for form in forms} == {want}
    assert audio_url("data:audio/mp3;base64,AA==") == "data:audio/mp3;base64,AA=="


def test_samples_are_a_wav_of_floats():
    made = {audio_url([[0.0, 0.5, -1.0], 8000]), audio_url({"array": [0.0, 0.5, -1.0], "sampling_rate": 8000})}
    (url,) = made
    with av.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as container:
        (frame,) = container.decode(audio=0)
        assert (frame.sample_rate, frame.to_ndarray().tolist()) == (8000, [[0.0, 0.5, -1.0]])


@pytest.mark.parametrize(
    "sound", ["https://a/b.wav", "no file", b"", 3, [[[0.5], [0.5]], 8000], [[2.0], 8000], [[0.5], 0], [[], 8000]]
)
def test_what_is_no_sound_is_refused(sound):
    with pytest.raises(RowError, match="audio .* is not"):
        audio_url(sound)


def test_places_and_sounds_of_a_row_agree():
    first, second = "data:audio/wav;base64,AA==", "data:audio/mp3;base64,AQ=="
    image = "data:image/png;base64,AA=="
    own = {"type": "input_audio", "input_audio": {"data": "AQ==", "format": "mp3"}}
    content = [{"type": "audio"}, {"type": "text", "text": "?"}, {"type": "image"}, own]
    messages, taken = take_images([{"role": "user", "content": content}], {"audios": [first], "images": [image]})
    assert taken == (first, image, second)
    assert [part["type"] for part in messages[0]["content"]] == ["audio", "text", "image", "audio"]
    with pytest.raises(RowError, match="the row has 2 audios, and its messages places for 1"):
        take_images([{"role": "user", "content": [{"type": "audio"}]}], {"audios": [first, second]})
