"""Vision-language models whose positions have one axis, on the embedded server: greedy tokens are transformers'."""

import asyncio
import base64
import io
from dataclasses import replace

import pytest
import torch
from pictures import png
from PIL import Image

from rl_rollout import GenerateRequest, RequestError, SamplingParams, ServerConfig, create_server
from rl_rollout.testing import write_tiny_vl_model

pytestmark = pytest.mark.process  # seconds of computation

WIDE, TALL, SMALL = png(24, 8, 0), png(8, 24, 1), png(8, 8, 2)
LLAVA, START, END, CONTEXT, BREAK = 52, 52, 53, 54, 53
RUNS = {
    "llava": {WIDE: [LLAVA] * 4, TALL: [LLAVA] * 4, SMALL: [LLAVA] * 4},
    "internvl": {  # of a wide or tall image three tiles and the whole, of a square one itself
        WIDE: [START, *[CONTEXT] * 4, END],
        TALL: [START, *[CONTEXT] * 4, END],
        SMALL: [START, CONTEXT, END],
    },
    "mistral3": {WIDE: [52] * 3 + [54], TALL: [52, BREAK, 52, BREAK, 52, 54], SMALL: [52, 54]},
}
"""Tokens of each image, by family."""
PLACE = {"llava": 52, "internvl": CONTEXT, "mistral3": 52}
PROMPTS = [((5, 6), WIDE, (7, 8)), ((5,), TALL, (9,), SMALL, (10, 11)), ((5, 6), TALL, (7, 8)), ((12, 13, 14),)]


def opened(url):
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")


def oracle(family, folder, prompt, count):
    """What transformers' generate writes."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"internvl": {"crop_to_patches": True}, "mistral3": {"patch_size": 8}}.get(family, {})
    images = [opened(part) for part in prompt if isinstance(part, str)]
    inputs = {}
    if images:
        found = AutoImageProcessor.from_pretrained(folder)(images=images, return_tensors="pt", **options)
        inputs = {
            name: found[name]
            for name in ("pixel_values", "image_sizes")
            if name in found and (name[0] == "p" or family == "mistral3")
        }
    ids = [token for part in prompt for token in (RUNS[family][part] if isinstance(part, str) else part)]
    row = torch.tensor([ids])
    settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None}
    found = model.generate(row, **inputs, attention_mask=torch.ones_like(row), **settings)
    return tuple(found[0, len(ids) :].tolist())


def request_of(name, family, prompt, *, is_whole=False):
    place = {url: run if is_whole else [PLACE[family]] for url, run in RUNS[family].items()}
    ids = tuple(token for part in prompt for token in (place[part] if isinstance(part, str) else part))
    images = tuple(part for part in prompt if isinstance(part, str))
    sampling = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=ids, images=images, sampling_params=sampling)


@pytest.mark.parametrize("family", RUNS)
def test_a_family_writes_what_transformers_writes(tmp_path, family):
    folder = write_tiny_vl_model(tmp_path / "model", family=family)

    async def answers():
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1))
        await server.start()
        try:
            assert server.capabilities.takes_images
            requests = [
                request_of(f"{i}{is_whole}", family, prompt, is_whole=is_whole)
                for is_whole in (False, True)
                for i, prompt in enumerate(PROMPTS)
            ]
            torn = request_of("torn", family, PROMPTS[0], is_whole=True)
            ids = torn.prompt_token_ids
            torn = replace(torn, prompt_token_ids=(*ids[:4], 20, *ids[4:]))
            with pytest.raises(RequestError, match="tokens of image 0 are not one after the other"):
                await server.generate(torn)
            return [output.token_ids for output in await asyncio.gather(*map(server.generate, requests))]
        finally:
            await server.stop()

    wanted = [oracle(family, folder, prompt, 16) for prompt in PROMPTS]
    assert len(set(wanted)) == len(PROMPTS)  # images are seen
    assert asyncio.run(answers()) == wanted * 2
