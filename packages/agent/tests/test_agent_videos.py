"""Videos in prompts: frames at even distances, each an image in its place."""

import asyncio
import base64
import io
import sys

import pytest

from rl_agent import RowError, create_loop, validate_output
from rl_agent.media import data_url, frame_urls, take_images
from rl_agent.testing import FakeGenerator, FakeTokenizer

TOKENIZER = FakeTokenizer()
FRAMES = [b"\x89PNG\r\n\x1a\n" + bytes([index]) for index in range(9)]  # nothing here decodes them
PLACE = {"type": "image"}


def encoded(num_frames):
    """A video of grey frames, frame i of brightness 20 * i, without loss."""
    import av
    from PIL import Image

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=5)
        stream.width = stream.height = 16
        stream.pix_fmt = "gray"
        for index in range(num_frames):
            container.mux(stream.encode(av.VideoFrame.from_image(Image.new("L", (16, 16), 20 * index))))
        container.mux(stream.encode())
    return buffer.getvalue()


def brightness(url):
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("L").getpixel((8, 8)) // 20


@pytest.mark.process
def test_a_file_gives_first_last_and_evenly_spaced_frames(tmp_path):
    video = encoded(9)
    for name in ("a.mkv", "a film.mkv"):
        (tmp_path / name).write_bytes(video)
    urls = frame_urls(video, 5)
    assert [brightness(url) for url in urls] == [0, 2, 4, 6, 8]
    assert urls == frame_urls(str(tmp_path / "a.mkv"), 5) == frame_urls((tmp_path / "a film.mkv").as_uri(), 5)
    assert urls == frame_urls("data:video/x-matroska;base64," + base64.b64encode(video).decode(), 5)
    assert len(frame_urls(video)) == 8
    assert [brightness(url) for url in frame_urls(video, 1)] == [0]


def test_a_list_of_frames_is_a_video_and_short_ones_give_all():
    assert frame_urls(FRAMES, 3) == tuple(data_url(FRAMES[index]) for index in (0, 4, 8))
    assert frame_urls(FRAMES[:2], 3) == tuple(map(data_url, FRAMES[:2]))


@pytest.mark.parametrize(
    ("video", "num_frames", "sentence"),
    [
        (b"no video", 8, "cannot be decoded"),
        ("http://x/y.mp4", 8, "nothing is downloaded"),
        ("data:video/mp4;base64,***", 8, "is not base64"),
        ([], 8, "or a list of frames"),
        (3, 8, "or a list of frames"),
        ([b"text"], 8, "PNG, JPEG"),
        (FRAMES, 0, "a positive number"),
        (FRAMES, "all", "a positive number"),
    ],
)
def test_what_is_no_video_is_told(video, num_frames, sentence):
    with pytest.raises(RowError, match=sentence):
        frame_urls(video, num_frames)


def test_a_file_without_a_decoder_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RowError, match=r"rl-agent\[videos\]"):
        frame_urls(b"some other video")


def test_places_take_videos_and_images_in_their_order():
    content = [PLACE, {"type": "video", "nframes": 2}, {"type": "text", "text": "?"}, {"type": "video_url",
               "video_url": {"url": FRAMES[4:]}, "nframes": 1}]  # fmt: skip
    messages, images = take_images(
        [{"role": "user", "content": content}], {"images": FRAMES[:1], "videos": [FRAMES[1:4]]}
    )
    assert images == tuple(map(data_url, (FRAMES[0], FRAMES[1], FRAMES[3], FRAMES[4])))
    assert messages[0]["content"] == [PLACE, PLACE, PLACE, content[2], PLACE]
    with pytest.raises(RowError, match="more places for videos than the 0 videos"):
        take_images([{"role": "user", "content": [{"type": "video"}]}], {})
    with pytest.raises(RowError, match="the row has 2 videos, and its messages places for 1"):
        take_images([{"role": "user", "content": [{"type": "video"}]}], {"videos": [FRAMES, FRAMES]})


@pytest.mark.parametrize("name", ["single_turn", "tool"])
def test_frames_reach_the_server_and_the_trajectory(name):
    from rl_agent.tools.calculator import calculator

    server = FakeGenerator(lambda _: [*TOKENIZER.encode("a cat"), 1])
    loop = create_loop(name, server, TOKENIZER, **({"tools": [calculator]} if name == "tool" else {}))
    prompt = [{"role": "user", "content": [{"type": "video", "nframes": 3}, {"type": "text", "text": "what?"}]}]
    output = asyncio.run(loop.run({"max_new_tokens": 64}, {"prompt": prompt, "videos": [FRAMES]}))
    validate_output(output)
    assert output.images == server.requests[0].images == frame_urls(FRAMES, 3)
    assert TOKENIZER.decode(output.prompt_token_ids).count(TOKENIZER.image) == 3
