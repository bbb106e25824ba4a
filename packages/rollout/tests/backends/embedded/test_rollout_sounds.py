"""Omni thinkers on the embedded server: greedy tokens are transformers', of text, images and sounds."""

import asyncio
import base64
import io
from dataclasses import replace

import pytest
import torch
from pictures import png
from PIL import Image

from rl_csrc.inference.audio import decode_audio
from rl_rollout import GenerateRequest, RequestError, SamplingParams, ServerConfig, UnsupportedError, create_server
from rl_rollout.testing import encoded_tone, write_tiny_omni_model, write_tiny_vl_model

pytestmark = pytest.mark.process  # seconds of computation

FAMILIES = ("qwen2_5_omni", "qwen3_omni_moe")
START, IMAGE, END, OPEN, SOUND, CLOSE = 52, 53, 55, 56, 57, 58


def sound(*args, **options):
    """A data URL of a tone."""
    return f"data:audio/{args[0]};base64,{base64.b64encode(encoded_tone(*args, **options)).decode()}"


LOW, HIGH, SHORT = sound("wav", 300), sound("flac", 4000, seconds=1.3, rate=44_100), sound("mp3", 900, seconds=0.4)
WIDE = png(24, 8, 0)
SEEN, HEARD = (START, IMAGE, END), (OPEN, SOUND, CLOSE)
CASES = [
    ((5, 6, *HEARD, 7, 8), (LOW,)),
    ((5, 6, *HEARD, 7, 8), (HIGH,)),  # the ids of the first, and another sound
    ((5, *SEEN, 9, *HEARD, 10, *HEARD, 11), (WIDE, SHORT, LOW)),
    ((5, *HEARD, 9, *SEEN, 10), (SHORT, WIDE)),
    ((5, *SEEN, 9), (WIDE,)),
    ((12, 13, 14), ()),
]


def inputs_of(folder, kind, ids, media):
    """What the family's own processors make of a prompt."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    inputs, runs = {}, {IMAGE: [], SOUND: []}
    pictures = [Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))) for url in media if "image" in url]
    if pictures:
        inputs |= dict(AutoImageProcessor.from_pretrained(folder)(images=pictures, return_tensors="pt"))
        runs[IMAGE] = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
    if samples := [decode_audio(url, 4.0) for url in media if "audio" in url]:
        padding = "max_length" if kind == "qwen2_5_omni" else True
        options = {"padding": padding, "truncation": False, "return_attention_mask": True, "return_tensors": "pt"}
        found = AutoFeatureExtractor.from_pretrained(folder)(samples, sampling_rate=16_000, **options)
        mask = found["attention_mask"]
        inputs |= {"input_features": found["input_features"], "feature_attention_mask": mask}
        counts = mask.sum(1).tolist()
        if kind == "qwen2_5_omni":
            runs[SOUND] = [((count - 1) // 2 + 1 - 2) // 2 + 1 for count in counts]
        else:
            runs[SOUND] = [13 * (count // 100) + -(-(count % 100) // 8) for count in counts]
    left = {token: iter(counts) for token, counts in runs.items()}
    return [token for each in ids for token in [each] * (next(left[each]) if each in left else 1)], inputs


def oracle(folder, kind, case, count):
    """What transformers' generate writes."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    config = getattr(config, "thinker_config", config)
    model = AutoModelForImageTextToText.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    ids, inputs = inputs_of(folder, kind, *case)
    row = torch.tensor([ids])
    settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None}
    found = model.generate(row, **inputs, attention_mask=torch.ones_like(row), **settings)
    return tuple(found[0, len(ids) :].tolist())


def request_of(name, ids, media):
    sampling = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=ids, images=media, sampling_params=sampling)


def serve(folder, use):
    async def run():
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1))
        await server.start()
        try:
            return await use(server)
        finally:
            await server.stop()

    return asyncio.run(run())


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_thinker_writes_what_transformers_writes(tmp_path, kind, is_whole):
    folder = write_tiny_omni_model(tmp_path / "model", family=kind, is_whole=is_whole)
    cases = CASES[1:3] if is_whole else CASES
    wanted = [oracle(folder, kind, case, 16) for case in cases]
    assert len(set(wanted)) == len(cases)  # the sounds are heard

    async def answers(server):
        assert server.capabilities.takes_audio
        requests = [request_of(f"{turn}{i}", *case) for turn in "ab" for i, case in enumerate(cases)]
        return [output.token_ids for output in await asyncio.gather(*map(server.generate, requests))]

    assert serve(folder, answers) == wanted * 2


def test_a_sound_that_cannot_be_heard_is_refused(tmp_path):
    folder = write_tiny_omni_model(tmp_path / "model")
    cases = {
        sound("wav", 300, seconds=4.5): "image 0 is a sound: it is longer than 4 s; cut it",
        sound("wav", 300, seconds=0.01): "make no token; give a longer one",
        "data:audio/wav;base64,AAAA": "image 0 is a sound: it cannot be decoded",
    }

    async def refusals(server):
        for url, message in cases.items():
            with pytest.raises(RequestError, match=message):
                await server.generate(request_of("r", *(CASES[0][0], (url,))))
        with pytest.raises(RequestError, match=r"0 images and 1 places for them \(token 57\)"):
            await server.generate(request_of("r", (5, *SEEN, *HEARD, 7), (WIDE,)))
        with pytest.raises(RequestError, match=r"has places for images \(token 57\)"):
            await server.generate(request_of("r", CASES[0][0], ()))

    serve(folder, refusals)


def test_a_model_without_ears_refuses_sounds(tmp_path):
    async def refusal(server):
        with pytest.raises(UnsupportedError, match="sounds"):
            await server.generate(replace(request_of("r", (5, *SEEN, 7), (WIDE,)), images=(LOW,)))

    serve(write_tiny_vl_model(tmp_path / "model"), refusal)
