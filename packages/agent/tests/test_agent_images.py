"""Images in prompts and in what tools answer: they reach the server and the trajectory as they were given."""

import asyncio
import base64
import io
import json
import random

import pytest

from rl_agent import (
    AgentRunner,
    Failure,
    ParsedTurn,
    RowError,
    TemplateError,
    Tool,
    ToolCall,
    ToolResult,
    create_loop,
    load_tokenizer,
    validate_output,
)
from rl_agent.chat_template import TurnTemplate
from rl_agent.media import data_url, take_images
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_rollout import ServerConfig, create_server
from rl_rollout.testing import write_tiny_model, write_tiny_vl_model

TOKENIZER = FakeTokenizer()
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))  # nothing here decodes it
JPEG = b"\xff\xd8\xff" + b"jpeg"
URL = "data:image/png;base64,QUJD"


def user(*parts):
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


class Camera(Tool):
    """Answers with a picture of what it is asked for."""

    def __init__(self, *images):
        super().__init__("look", "Look.", {"type": "object", "properties": {}})
        self.images = images

    async def call(self, arguments, session_id):
        return ToolResult(text="a view", images=self.images)


def says(*turns):
    turns = iter(turns)
    return FakeGenerator(lambda _: [*TOKENIZER.encode(next(turns)), 1])


LOOK = f"<tool_call>{json.dumps({'name': 'look', 'arguments': {}})}</tool_call>"


def test_an_image_is_its_bytes_whichever_way_it_comes(tmp_path):
    for name in ("a.png", "one cat.png"):
        (tmp_path / name).write_bytes(PNG)
    url = data_url(PNG)
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == PNG
    assert data_url(str(tmp_path / "a.png")) == url == data_url(url)
    assert data_url((tmp_path / "one cat.png").as_uri()) == url
    assert data_url(JPEG).startswith("data:image/jpeg;base64,")
    for wrong, sentence in (
        (b"text", "PNG, JPEG"),
        ("http://x/y.png", "nothing is downloaded"),
        (3, "not a data URL"),
        (base64.b64encode(PNG * 99).decode(), "image 'iVBOR"),
    ):
        with pytest.raises(RowError, match=sentence):
            data_url(wrong)


def test_placeholders_take_images_in_order_and_counts_agree():
    place = {"type": "image"}
    messages, images = take_images(
        [user(place, "a", {"type": "image_url", "image_url": {"url": URL}}, place)], {"images": [PNG, JPEG]}
    )
    assert images == (data_url(PNG), URL, data_url(JPEG))
    assert messages == [user(place, "a", place, place)]
    with pytest.raises(RowError, match="more places for images than the 1 images"):
        take_images([user(place, place)], {"images": [PNG]})
    with pytest.raises(RowError, match="the row has 2 images, and its messages places for 1"):
        take_images([user(place)], {"images": [PNG, JPEG]})


@pytest.mark.promise("Images travel as they were given")
@pytest.mark.parametrize("name", ["single_turn", "tool"])
def test_prompt_images_reach_the_server_and_the_trajectory(name):
    server = says("a cat")
    loop = create_loop(name, server, TOKENIZER, **({"tools": [Camera()]} if name == "tool" else {}))
    output = asyncio.run(
        loop.run({"max_new_tokens": 64}, {"prompt": [user({"type": "image"}, "what?")], "images": [PNG]})
    )
    validate_output(output)
    assert output.images == server.requests[0].images == (data_url(PNG),)
    assert TOKENIZER.decode(output.prompt_token_ids).count(TOKENIZER.image) == 1
    with pytest.raises(RowError, match="the row has 1 images"):
        asyncio.run(loop.run({}, {"prompt": [user("what?")], "images": [PNG]}))


def test_images_that_tools_answer_are_appended_and_stay_inputs():
    server = says(LOOK, LOOK + LOOK, "a cat")
    loop = create_loop("tool", server, TOKENIZER, tools=[Camera(JPEG)])
    output = asyncio.run(
        loop.run({"max_new_tokens": 512}, {"prompt": [user({"type": "image", "image": PNG}, "what?")]})
    )
    validate_output(output)
    assert [len(request.images) for request in server.requests] == [1, 2, 4]
    assert output.images == (data_url(PNG), *[data_url(JPEG)] * 3)
    ids = zip(output.completion_token_ids, output.loss_mask, strict=True)
    masks = [m for i, m in ids if TOKENIZER.decode([i]) == TOKENIZER.image]
    assert masks == [0, 0, 0], "an image is context, never trained on"
    last = server.requests[-1]
    spans = [TOKENIZER.decode(last.prompt_token_ids[start : end - 1]) for start, end in last.sampled_spans]
    assert spans == [LOOK, LOOK + LOOK], "where a placeholder would be the model's own"
    assert f"tool\n{TOKENIZER.image}a view<|im_end|>" in TOKENIZER.decode(output.completion_token_ids)


def test_an_image_after_the_last_generation_is_not_recorded():
    loop = create_loop("tool", says(LOOK), TOKENIZER, tools=[Camera(JPEG)], max_completion_tokens=len(LOOK) + 2)
    output = asyncio.run(loop.run({"max_new_tokens": 512}, {"prompt": [user("what?")]}))
    assert (output.extra_fields["end"], output.images) == ("max_completion_tokens", ())


def test_a_tool_that_answers_no_image_is_an_error_for_the_model():
    server = says(LOOK, "well")
    loop = create_loop("tool", server, TOKENIZER, tools=[Camera(b"junk")])
    output = asyncio.run(loop.run({"max_new_tokens": 512}, {"prompt": [user("what?")]}))
    assert output.metrics["num_tool_error"] == 1.0
    assert "error: an image starts with b'junk'" in TOKENIZER.decode(output.completion_token_ids)


VISION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLIND = VISION.replace("<|image_pad|>", "")


def test_a_template_shows_its_placeholders_or_is_refused(make_tokenizer):
    tools = [Camera().schema]
    answer = [{"role": "tool", "name": "look", "tool_call_id": "call00000", "content": [{"type": "image"}]}]
    seeing, blind = make_tokenizer("qwen", VISION), make_tokenizer("qwen", BLIND)
    template = TurnTemplate(seeing, tools)
    end = seeing.eos_token_id
    assert "<|image_pad|>" in seeing.decode(template.prompt([user({"type": "image"}, "a")]))
    assert "<|image_pad|>" in seeing.decode(template.continuation(answer, last_token_id=end, is_stopped=True))
    with pytest.raises(RowError, match="leaves out the images"):
        TurnTemplate(blind, tools).prompt([user({"type": "image"}, "a")])
    with pytest.raises(TemplateError, match="leaves out the images"):
        TurnTemplate(blind, tools).continuation(answer, last_token_id=end, is_stopped=True)


class Recorded:
    """Passes requests on to a server and keeps them."""

    def __init__(self, server):
        self.server, self.requests = server, []

    async def generate(self, request):
        self.requests.append(request)
        return await self.server.generate(request)


def photo(seed):
    """The bytes of a small PNG of noise."""
    pillow = pytest.importorskip("PIL.Image", reason="needs the extra rl-rollout[images]")
    file = io.BytesIO()
    pillow.frombytes("RGB", (16, 16), random.Random(seed).randbytes(3 * 16 * 16)).save(file, "png")
    return file.getvalue()


@pytest.mark.process
def test_a_vision_model_sees_prompt_and_tool_images_unchanged(tmp_path):
    """End to end on the embedded server: a random model, so the parser makes every turn call the camera."""
    before, shown, other = photo(0), photo(1), photo(2)
    path = str(write_tiny_vl_model(tmp_path))
    tokenizer = load_tokenizer(path)

    def parse(text):
        return ParsedTurn(content=text, calls=(ToolCall(name="look"),))

    async def run(server, image):
        recorded = Recorded(server)
        stops = tuple(range(2, 50))  # a random model stops soon
        loop = create_loop("tool", recorded, tokenizer, tools=[Camera(image)], parser=parse, max_turns=3)
        params = {"max_new_tokens": 32, "temperature": 0.0, "stop_token_ids": stops}
        output = await loop.run(params, {"prompt": [user({"type": "image"}, "1")], "images": [before]})
        validate_output(output)
        return output, recorded.requests

    async def main():
        server = create_server("embedded", ServerConfig(model_path=path, num_threads=1))
        await server.start()
        try:
            assert server.capabilities.takes_images
            return await run(server, shown), await run(server, other)
        finally:
            await server.stop()

    (output, requests), (another, _) = asyncio.run(main())
    assert [base64.b64decode(url.partition(",")[2]) for url in output.images] == [before, shown, shown]
    assert [request.images for request in requests] == [output.images[:n] for n in (1, 2, 3)]
    place = tokenizer.convert_tokens_to_ids("<image>")
    ids = (*output.prompt_token_ids, *output.completion_token_ids)
    assert ids.count(place) == 3, "one place each: the server alone writes them out"
    masks = [m for i, m in zip(output.completion_token_ids, output.loss_mask, strict=True) if i == place]
    assert masks == [0, 0]
    assert output.num_turns == 3
    turns = [o.rollout_logprobs for o in (output, another)]
    assert turns[0] != turns[1], "another picture, other probabilities: it was seen"


def test_a_server_that_takes_no_images_refuses_them(tmp_path):
    """The embedded server serves text models: nothing is generated as if the image were not there."""
    path = str(write_tiny_model(tmp_path))
    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = "{% for p in messages[0].content %}{{ '0' if p.type == 'image' else p.text }}{% endfor %}"

    async def main():
        server = create_server("embedded", ServerConfig(model_path=path, num_threads=1))
        await server.start()
        agents = AgentRunner(lambda name: create_loop(name, server, tokenizer))
        row = {"prompt": [user({"type": "image"}, "1")], "images": [PNG]}
        (result,) = [result async for result in agents.run([row], {"max_new_tokens": 4})]
        await server.stop()
        return result.outputs

    failure = asyncio.run(main())
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.is_retryable) == ("generation", False)
    assert "this server has no images" in failure.message
