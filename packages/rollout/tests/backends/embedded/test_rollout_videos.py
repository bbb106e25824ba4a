"""Videos on the embedded server: greedy tokens are those of transformers' own forward pass."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from csrc.tests.support.video_reference import encoded, positions_of, url_of_file, url_of_frames
from pictures import png

from rl_csrc.inference.images import ImageProcessor
from rl_rollout import GenerateRequest, RequestError, SamplingParams, ServerConfig, connect_server, create_server
from rl_rollout.errors import UnsupportedError
from rl_rollout.testing import write_tiny_vl_model

pytestmark = pytest.mark.process  # seconds of computation

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS = {"qwen2_5_vl": {}, "qwen3_vl": {}, "qwen3_vl_moe": MIXTURE, "qwen3_5": {}}
START, IMAGE, VIDEO, END = 52, 53, 54, 55
FILM, PICTURE = (START, VIDEO, END), (START, IMAGE, END)


def frames(count, seed):
    return np.random.default_rng(seed).integers(0, 256, (count, 16, 24, 3), np.uint8)


FILE, LISTED = url_of_file(encoded(frames(12, 0), rate=6)), url_of_frames(frames(6, 1), 3)
OTHER, SLOW = url_of_file(encoded(frames(12, 2), rate=6)), url_of_file(encoded(frames(12, 0), rate=2), ";nframes=4")
WIDE = png(24, 8, 0)
CASES = [
    ((5, 6, *FILM, 7, 8), (FILE,)),
    ((5, 6, *FILM, 7, 8), (OTHER,)),  # the ids of the first, and another video
    ((5, *PICTURE, 9, *FILM, 10, *FILM, 11), (WIDE, LISTED, FILE)),
    ((5, *FILM, 9, *PICTURE, 11), (SLOW, WIDE)),
    ((12, 13, 14), ()),
]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("vl") / request.param
    return write_tiny_vl_model(path, family=request.param, max_position_embeddings=512, **KINDS[request.param])


@pytest.fixture(scope="module")
def served(folder):
    with asyncio.Runner() as runner:
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1))
        address = runner.run(server.start())
        yield runner.run, server, address.url
        runner.run(server.stop())


def request_of(name, ids, urls, **params):
    params = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(request_id=name, prompt_token_ids=ids, images=urls, sampling_params=SamplingParams(**params))


def inputs_of(folder, ids, urls):
    """Token ids and model inputs of a prompt, in the order in which its placeholders are."""
    from PIL import Image  # noqa: F401 - the processor's own decoder

    from rl_csrc.inference.videos import is_video
    from rl_rollout.multimodal import _decoded

    processor = ImageProcessor(folder)
    read = [processor.read_clip(url) if is_video(url) else processor.read(_decoded("", 0, url)) for url in urls]
    runs = iter([run for run, _ in read])
    written = [token for each in ids for token in (next(runs) if each in (IMAGE, VIDEO) else (each,))]
    columns = {name: value for name, value in processor.join([values for _, values in read]).items() if len(value)}
    row = torch.tensor([written])
    return row, columns | {"mm_token_type_ids": (row == IMAGE).int() + 2 * (row == VIDEO).int()}


def oracle(folder, ids, urls, count):
    """Greedy tokens of transformers' forward pass, at positions that are counted one by one."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    row, inputs = inputs_of(folder, ids, urls)
    kinds = inputs.pop("mm_token_type_ids")[0].tolist()
    if not urls:
        inputs = {}
    per_second = getattr(model.config.vision_config, "tokens_per_second", None)
    columns = {name: value for name, value in inputs.items() if name != "second_per_grid_ts"}
    positions = positions_of(kinds, inputs, per_second)[:, None]
    drawn, fed, cache = [], row, None
    for _ in range(count):  # a drawn placeholder is a token like any other
        with torch.inference_mode():
            output = model(fed, position_ids=positions, past_key_values=cache, use_cache=True, **columns)
        fed, cache, columns = output.logits[:, -1:].argmax(-1), output.past_key_values, {}
        positions = positions.max() + torch.ones(3, 1, 1, dtype=torch.int64)
        drawn.append(int(fed))
    return tuple(drawn)


def test_greedy_equals_transformers_with_mixed_neighbours(served, folder):
    run, server, _ = served
    assert server.capabilities.takes_videos
    wanted = [oracle(folder, *case, 16) for case in CASES]
    assert len(set(wanted)) == len(CASES)  # videos are seen: the first and the second have the same ids

    async def all_twice():
        requests = [request_of(f"{turn}{i}", *case) for turn in "ab" for i, case in enumerate(CASES)]
        return await asyncio.gather(*map(server.generate, requests))

    assert [output.token_ids for output in run(all_twice())] == wanted * 2


def test_whole_runs_and_http_give_the_same_tokens(served, folder):
    run, server, url = served
    short = run(server.generate(request_of("short", *CASES[2])))
    ids = tuple(inputs_of(folder, *CASES[2])[0][0].tolist())
    client = connect_server(url)

    async def remote():
        await client.start()
        found = await client.generate(request_of("whole", ids, CASES[2][1]))
        await client.stop()
        return found

    assert run(remote()).token_ids == short.token_ids


def test_videos_that_do_not_fit_are_refused(served):
    run, server, _ = served
    good = request_of("good", *CASES[0])
    for bad, message in (
        (replace(good, images=()), "the prompt has places for images .token 54. and the request none"),
        (replace(good, images=(WIDE,)), "1 images and 0 places for them .token 53"),
        (replace(good, images=("data:video/mp4;base64,AAAA",)), "image 0 is a video: a video of 3 bytes cannot be"),
        (replace(good, images=(FILE.replace("data:", "https:"),)), "must be a data URL"),
    ):
        with pytest.raises(RequestError, match=message):
            run(server.generate(bad))
    assert run(server.generate(good)).token_ids


def test_a_server_of_images_alone_refuses_videos(tmp_path):
    async def scenario():
        model = write_tiny_vl_model(tmp_path / "model", family="internvl")
        server = create_server("embedded", ServerConfig(model_path=str(model), num_threads=1))
        await server.start()
        try:
            await server.generate(request_of("0", (5, 54, 6), (FILE,)))
        finally:
            await server.stop()

    with pytest.raises(UnsupportedError, match="this server has no videos; leave it out"):
        asyncio.run(scenario())
