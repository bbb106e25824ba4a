"""Videos: sampling, patches and tokens are those of transformers' video processors, on encoded files."""

import io
import json

import numpy as np
import pytest
import torch
from csrc.tests.support.video_reference import CASES, FILE, encoded, frames_of, url_of_file, url_of_frames

from rl_csrc.inference import videos
from rl_csrc.inference.videos import VideoProcessor, read_video, video_columns

pytestmark = pytest.mark.core
IDS = {"vision_start_token_id": 52, "image_token_id": 53, "video_token_id": 54, "vision_end_token_id": 55}


def encode(text):
    """Ids of the tiny tokenizer of `rl_rollout.testing`, which has one for each character."""
    alphabet = "0123456789+-*/=() \nabcdefghijklmnopqrstuvwxyz?.,:"
    return [3 + alphabet.index(each) if each in alphabet else 2 for each in text]


def processor(folder, family, settings):
    kind = "Qwen3VLVideoProcessor" if family.startswith("qwen3") else "Qwen2VLVideoProcessor"
    text = json.dumps({"video_processor_type": kind, **settings})
    (folder / "video_preprocessor_config.json").write_text(text)
    return VideoProcessor(folder, {"model_type": family, **IDS}, encode)


@pytest.mark.parametrize("name", CASES)
def test_patches_and_tokens_equal_the_reference(tmp_path, name):
    family, _, rate, settings, count = CASES[name]
    want = {key.partition("/")[2]: value for key, value in np.load(FILE).items() if key.startswith(f"{name}/")}
    processed = processor(tmp_path, family, settings)
    url = url_of_frames(frames_of(name), rate, count)
    tokens, values = processed.read(url)
    assert processed.sampled(url)[1].indices == tuple(want["indices"])
    assert values["video_grid_thw"].tolist() == [want["grid"].tolist()]
    assert (19, 52, *tokens, 55, 20)[1:-1] == tuple(want["ids"][1:-1].tolist())
    mean, std = ([0.5] * 3,) * 2 if family.startswith("qwen3") else (
        [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    )  # fmt: skip
    patches = values["pixel_values_videos"]
    levels = (patches[::9].unflatten(1, (3, -1)) * torch.tensor(std)[:, None] + torch.tensor(mean)[:, None]) * 255
    # another kind of CPU may round a resized pixel to the level next to it
    assert (levels - torch.from_numpy(want["levels"]).float()).abs().max() < 1.01
    assert patches.double().sum().item() == pytest.approx(float(want["sum"]), abs=2e-3 * patches.numel())
    if family == "qwen2_5_vl":
        assert values["second_per_grid_ts"].tolist() == pytest.approx(want["seconds"].tolist())


SMALL = {"size": {"shortest_edge": 64, "longest_edge": 64 * 64}, "patch_size": 4}
FILES = {
    "h264": {"shape": (12, 24, 32), "rate": 10},
    "odd sizes": {"shape": (9, 23, 37), "rate": 3},
    "mpeg4": {"shape": (40, 48, 32), "rate": 25, "codec": "mpeg4"},
    "variable rate": {"shape": (10, 24, 32), "rate": 10, "times": [0, 1, 2, 3, 10, 11, 20, 21, 22, 30]},
    "matroska": {"shape": (8, 24, 32), "rate": 8, "kind": "matroska"},
}


def moving(count, height, width):
    """Frames [n, H, W, 3] uint8: a gradient that moves."""
    at = np.indices((count, height, width)).transpose(1, 2, 3, 0) * [7, 3, 5]
    return (at.cumsum(-1) % 256).astype(np.uint8)


@pytest.mark.process
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("name", FILES)
def test_an_encoded_file_gives_what_transformers_decodes(tmp_path, name, family):
    from transformers.video_utils import read_video_pyav

    how = dict(FILES[name])
    file = encoded(moving(*how.pop("shape")), **how)
    (tmp_path / "a.mp4").write_bytes(file)
    frames, facts = read_video_pyav(str(tmp_path / "a.mp4"), lambda metadata: np.arange(FILES[name]["shape"][0]))
    assert len(frames) == FILES[name]["shape"][0]
    processed = processor(tmp_path, family, SMALL | {"fps": 2})
    tokens, values = processed.read(url_of_file(file))
    assert tokens.count(54) * 4 == len(values["pixel_values_videos"])
    want, of_frames = processed.read(url_of_frames(frames, facts.fps))
    assert tokens == want
    for column, value in values.items():
        torch.testing.assert_close(value, of_frames[column], rtol=0, atol=0)
    counted = processed.sampled(url_of_file(file, ";nframes=6"))[1].indices
    assert len(counted) == 6
    assert len(processed.sampled(url_of_file(file, ";fps=100"))[1].indices) >= len(frames) - 1


def test_without_a_rate_in_the_folder_two_frames_a_second(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(
            {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 64, "max_pixels": 512, "patch_size": 4}
        )
    )
    processed = VideoProcessor(tmp_path, {"model_type": "qwen2_5_vl", **IDS}, encode)
    sampled = processed.sampled(url_of_frames(moving(40, 64, 64), 5))[1]
    assert len(sampled.indices) == 16  # of eight seconds
    assert (sampled.height, sampled.width) == (16, 16)
    assert sampled.seconds == pytest.approx(1.0)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SMALL | {"do_sample_frames": False}))
    processed = VideoProcessor(tmp_path, {"model_type": "qwen2_5_vl", **IDS}, encode)
    assert len(processed.sampled(url_of_frames(moving(9, 16, 16), 5))[1].indices) == 9
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": SMALL | {"do_resize": False}}))
    with pytest.raises(ValueError, match="do_resize of the video processor in .* is False; True is supported"):
        VideoProcessor(tmp_path, {"model_type": "qwen3_vl", **IDS}, encode)


def sound():
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    return file.getvalue()


@pytest.mark.process
def test_damaged_files_are_one_clear_error(tmp_path):
    whole = encoded(moving(12, 24, 32))
    fast = encoded(moving(60, 24, 32), codec="mpeg4", kind="avi")
    for file, message in (
        (b"no video", "a video of 8 bytes cannot be decoded"),
        (whole[: len(whole) // 2], "cannot be decoded"),  # its index is at the end
        (fast[: len(fast) * 2 // 3], "of the 60 frames that its header names; it is cut off"),
        (sound(), "has no video stream"),
        (encoded(moving(1, 24, 32)), "a video has 1 frames, and at least 2 are needed"),
        (encoded(moving(0, 24, 32), codec="mpeg4", kind="avi"), "0 frames|cannot be decoded|no frame rate"),
    ):
        with pytest.raises(ValueError, match=message):
            read_video(url_of_file(file))
    broken = bytearray(whole)
    start = whole.index(b"mdat") + 4
    broken[start : start + 400] = bytes(400)
    with pytest.raises(ValueError, match="cannot be decoded|gave fewer"):
        processor(tmp_path, "qwen3_vl", SMALL).read(url_of_file(bytes(broken)))


def test_bounds_and_urls_are_checked(tmp_path, monkeypatch):
    frames = moving(8, 16, 24)
    good = url_of_frames(frames, 4)
    processed = processor(tmp_path, "qwen3_vl", SMALL)
    for url, message in (
        ("https://x/y.mp4", "must be a data URL"),
        (good.replace(";base64", ""), "must be a data URL"),
        (good.replace("fps=4", "fps=0"), "positive numbers are needed"),
        (good.replace("fps=4", "fps=inf"), "positive numbers are needed"),
        (good.replace("fps=4", "fps=4;nframes=0"), "positive numbers are needed"),
        (good[:-40] + "," + good.partition("base64,")[2][:30], "base64|padding|cannot be read"),
        ("data:video/jpeg;base64,AAAA,AAAA", "a frame of a video cannot be read"),
        (good + "," + url_of_frames(moving(1, 8, 8), 4).partition(",")[2], "have the sizes"),
        (url_of_frames(moving(2, 1, 300), 4), "more than 200 times"),
    ):
        with pytest.raises(ValueError, match=message):
            processed.read(url)
    for name, bound, message in (
        ("MOST_BYTES", 100, r"has \d+ bytes, more than 100"),
        ("MOST_FRAMES", 7, "8 frames of 24 x 16 pixels; at most 7 frames"),
        ("MOST_PIXELS", 100, "and 100 pixels each"),
        ("MOST_VALUES", 500, "and 500 are the limit; lower its fps"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(videos, name, bound)
            with pytest.raises(ValueError, match=message):
                processor(tmp_path, "qwen3_vl", SMALL).read(good)


def test_families_that_take_videos():
    assert video_columns({"model_type": "qwen2_5_vl"})[-1] == "second_per_grid_ts"
    assert len(video_columns({"model_type": "qwen3_5_moe"})) == 2
    assert video_columns({"model_type": "internvl"}) == ()
