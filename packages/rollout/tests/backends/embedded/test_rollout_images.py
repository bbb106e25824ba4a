"""Vision-language models on the embedded server: against transformers' own `generate`, and through every door."""

import asyncio
import base64
import io
from dataclasses import replace

import pytest
import torch
from pictures import png
from PIL import Image

from rl_rollout import (
    FinishReason,
    GenerateRequest,
    RequestError,
    Router,
    SamplingParams,
    ServerConfig,
    UnsupportedError,
    connect_server,
    create_server,
    placeholder_repeats,
)
from rl_rollout.router import rest_of
from rl_rollout.testing import FakeReceiver, FakeServer, load_weights, write_tiny_vl_model

pytestmark = pytest.mark.process  # seconds of computation

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS = {
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": MIXTURE,
    "qwen3_5": {},
    "qwen3_5_moe": MIXTURE | {"shared_expert_intermediate_size": 32},
}
START, IMAGE, VIDEO, END = 52, 53, 54, 55


WIDE, TALL, SMALL = png(24, 8, 0), png(8, 32, 1), png(8, 8, 2)  # 3, 4 and 1 features
PLACE = (START, IMAGE, END)
PER_TOKEN = ("token_ids", "logprobs", "weight_versions")
CASES = [
    ((5, 6, *PLACE, 7, 8), (WIDE,)),
    ((5, *PLACE, 9, *PLACE, 10, 11), (TALL, SMALL)),
    ((5, 6, *PLACE, 7, 8), (TALL,)),  # the ids of the first, and another image
    ((12, 13, 14), ()),
]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("vl") / request.param
    return write_tiny_vl_model(path, family=request.param, **KINDS[request.param])


@pytest.fixture(scope="module")
def served(folder):
    with asyncio.Runner() as runner:
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1))
        address = runner.run(server.start())
        yield runner.run, server, address.url
        runner.run(server.stop())


def request_of(name, ids, images, **params):
    params = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(
        request_id=name, prompt_token_ids=ids, images=images, sampling_params=SamplingParams(**params)
    )


def written_out(ids, counts):
    times = placeholder_repeats("r", ids, IMAGE, counts)
    return tuple(token for token, count in zip(ids, times, strict=True) for _ in range(count))


def oracle(folder, ids, images, count):
    """What transformers' generate writes, of images that its own processor prepares."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = {}
    if images:
        files = [Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))) for url in images]
        inputs = dict(AutoImageProcessor.from_pretrained(folder)(images=files, return_tensors="pt"))
        counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
        ids = written_out(ids, counts)
    row = torch.tensor([ids])
    inputs["mm_token_type_ids"] = (row == IMAGE).int()
    found = model.generate(
        row,
        **inputs,
        attention_mask=torch.ones_like(row),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
    )
    return tuple(found[0, len(ids) :].tolist())


@pytest.mark.process
def test_greedy_equals_transformers_with_mixed_image_neighbours(served, folder):
    run, server, _ = served
    assert server.capabilities.takes_images
    wanted = [oracle(folder, *case, 24) for case in CASES]
    assert len(set(wanted)) == len(CASES)  # the images are seen: the first and the third have the same ids

    async def all_twice():
        requests = [request_of(f"{turn}{i}", *case) for turn in "ab" for i, case in enumerate(CASES)]
        return await asyncio.gather(*map(server.generate, requests))

    assert [output.token_ids for output in run(all_twice())] == wanted * 2


def test_logprobs_cover_the_vocabulary_as_the_trainer_computes(served, folder):
    from transformers import AutoModelForImageTextToText

    run, server, _ = served
    ids = (12, 13, 14)
    asked = replace(request_of("scored", ids, (), temperature=0.7, seed=1), returns_prompt_logprobs=True)
    output = run(server.generate(replace(asked, num_top_logprobs=60)))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    row = torch.tensor([[*ids, *output.token_ids]])
    with torch.inference_mode():
        logits = model(row).logits[0, :-1]
    told = torch.tensor(output.prompt_logprobs + output.logprobs)
    temperature = torch.tensor([1.0] * 2 + [0.7] * 24)[:, None]
    want = (logits / temperature).log_softmax(-1)
    torch.testing.assert_close(told, want.gather(-1, row[0, 1:, None])[:, 0], atol=1e-4, rtol=0)
    assert all({IMAGE, VIDEO} < dict(top).keys() for top in output.top_logprobs)


def scored(folder, ids, images, completion):
    """Log-probs of a completion whose placeholders are ordinary tokens: vLLM and SGLang embed them as such."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    files = [Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))) for url in images]
    inputs = dict(AutoImageProcessor.from_pretrained(folder)(images=files, return_tensors="pt"))
    ids = written_out(ids, [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]])
    shown = torch.tensor([ids])
    with torch.inference_mode():
        cache = model(shown, **inputs, mm_token_type_ids=(shown == IMAGE).int(), use_cache=True)
        logits = [cache.logits[0, -1]]
        for token in completion[:-1]:  # one by one, as `generate` feeds them
            cache = model(torch.tensor([[token]]), past_key_values=cache.past_key_values, use_cache=True)
            logits.append(cache.logits[0, -1])
    return torch.stack(logits).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


@pytest.fixture(scope="module")
def drawn(served):
    """A request with an image, and an output with drawn placeholders in it."""
    run, server, _ = served
    for seed in range(80):
        request = request_of(f"drawn{seed}", *CASES[1], temperature=1.0, seed=seed, max_new_tokens=60)
        output = run(server.generate(request))
        if {IMAGE, VIDEO} <= set(output.token_ids[:20]) & set(output.token_ids[20:]):
            return request, output
    raise AssertionError("of these seeds, none draws placeholders in both parts")


@pytest.mark.process
def test_a_placeholder_that_is_drawn_is_a_token_like_any_other(served, folder, drawn):
    request, output = drawn
    want = scored(folder, request.prompt_token_ids, request.images, output.token_ids)
    torch.testing.assert_close(torch.tensor(output.logprobs), want, atol=1e-4, rtol=0)


def test_it_stays_one_where_a_request_goes_on_elsewhere(served, drawn):
    """The second part is prefilled, placeholders that were drawn among it."""
    run, _, url = served
    request, output = drawn
    done = replace(output, **{name: getattr(output, name)[:20] for name in PER_TOKEN})
    rest = replace(rest_of(request, done), request_id="rest")
    client = connect_server(url)  # spans travel

    async def both():
        await client.start()
        part = await client.generate(rest)
        blind = replace(rest, request_id="blind", sampled_spans=())
        with pytest.raises(RequestError, match=r"2 images and \d+ places for them .*name them in sampled_spans"):
            await client.generate(blind)
        await client.stop()
        return part

    part = run(both())
    assert part.token_ids == output.token_ids[20:]
    torch.testing.assert_close(torch.tensor(part.logprobs), torch.tensor(output.logprobs[20:]), atol=1e-4, rtol=0)


def test_it_stays_one_under_an_image_of_a_later_turn(served, folder, drawn):
    run, server, _ = served
    request, output = drawn
    later = (*request.prompt_token_ids, *output.token_ids[:20])
    span = (len(request.prompt_token_ids), len(later))
    asked = request_of("turn", (*later, 9, *PLACE, 8), (*request.images, WIDE))
    asked = replace(asked, sampled_spans=(span,), returns_prompt_logprobs=False)
    got = run(server.generate(asked))
    other = run(server.generate(replace(asked, request_id="other", images=(*request.images, png(24, 8, 5)))))
    assert got.token_ids != other.token_ids  # the later image is seen, in its own place
    again = run(server.generate(replace(asked, request_id="again")))
    assert again.token_ids == got.token_ids


@pytest.mark.parametrize(
    ("spans", "told"), [(((0, 99),), "within the 7 tokens"), (((4, 5), (2, 3)), "ascending"), (((-1, 2),), "ascending")]
)
def test_spans_that_are_none_are_refused(served, spans, told):
    run, server, _ = served
    with pytest.raises(RequestError, match=told):
        run(server.generate(replace(request_of("bad", *CASES[0]), sampled_spans=spans)))


def test_tokens_do_not_depend_on_who_writes_the_places_out(served):
    run, server, _ = served
    ids, images = CASES[1]
    short = run(server.generate(request_of("short", ids, images)))
    whole = run(server.generate(request_of("whole", written_out(ids, [4, 1]), images)))
    assert short.token_ids == whole.token_ids


def test_an_aborted_request_goes_on_from_where_it_was(served):
    run, server, _ = served
    ids, images = CASES[0]
    whole = run(server.generate(request_of("whole", ids, images)))
    part = run(server.generate(request_of("part", ids, images, max_new_tokens=9)))
    rest = run(server.generate(request_of("rest", ids + part.token_ids, images, max_new_tokens=15)))
    assert part.token_ids + rest.token_ids == whole.token_ids
    torch.testing.assert_close(torch.tensor(part.logprobs + rest.logprobs), torch.tensor(whole.logprobs))


def test_an_abort_meets_a_request_preparing_its_images(served):
    run, server, _ = served

    async def scenario():
        task = asyncio.create_task(server.generate(request_of("early", *CASES[0], max_new_tokens=200)))
        await asyncio.sleep(0)
        await server.abort(["early"])
        return await task

    assert run(scenario()).finish_reason is FinishReason.ABORT


@pytest.mark.process
def test_new_weights_under_disk_names_recompute_the_images(served, folder):
    run, server, _ = served
    weights = load_weights(folder)
    other = {name: tensor.roll(1, dims=0) if tensor.ndim > 1 else tensor for name, tensor in weights.items()}

    async def scenario():
        task = asyncio.create_task(server.generate(request_of("going", *CASES[0], max_new_tokens=200)))
        await server.generate(request_of("beside", *CASES[0], max_new_tokens=1))
        await server.pause("keep")
        await server.update_weights(FakeReceiver(other, 1), 1)
        await server.resume()
        going = await task
        num_old = going.weight_versions.count(0)
        ids, images = CASES[0]
        new = await server.generate(request_of("new", ids + going.token_ids[:num_old], images))
        await server.update_weights(FakeReceiver(weights, 2), 2)
        return going, num_old, new

    going, num_old, new = run(scenario())
    assert going.weight_versions == (0,) * num_old + (1,) * (200 - num_old)
    assert going.token_ids[num_old : num_old + 24] == new.token_ids[: 200 - num_old]


def test_through_router_and_http_the_images_arrive_as_they_were(served):
    run, server, url = served
    want = run(server.generate(request_of("want", *CASES[1])))

    async def scenario():
        router = Router([connect_server(url)])
        await router.start()
        assert router.capabilities.takes_images
        output = await router.generate(request_of("routed", *CASES[1]))
        await router.stop()
        return output

    assert run(scenario()).token_ids == want.token_ids


def test_a_chat_with_image_urls(served):
    import openai

    run, server, url = served
    ids, images = CASES[0]
    want = run(server.generate(request_of("want", (*PLACE, *ids[5:]), images)))

    async def ask(image_url):
        content = [{"type": "image_url", "image_url": {"url": image_url}}, {"type": "text", "text": "45"}]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240) as client:
            return await client.chat.completions.create(
                model=server.status()["model"],
                messages=[{"role": "user", "content": content}],
                max_tokens=24,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )

    answer = run(ask(images[0]))
    assert tuple(answer.choices[0].prompt_token_ids) == (*PLACE, 7, 8)
    assert tuple(answer.choices[0].token_ids) == want.token_ids
    with pytest.raises(openai.BadRequestError, match="nothing is downloaded"):
        run(ask("https://example.com/cat.png"))


@pytest.mark.process
def test_experts_of_image_prompts_are_those_of_a_forward_pass(tmp_path):
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    folder = write_tiny_vl_model(tmp_path / "model", family="qwen3_vl_moe", **MIXTURE)
    ids, images = CASES[1]
    asked = replace(request_of("asks", ids, images, max_new_tokens=6), returns_routed_experts=True)

    async def scenario():
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1))
        await server.start()
        try:
            return await asyncio.gather(server.generate(asked), server.generate(request_of("not", ids, images)))
        finally:
            await server.stop()

    output, _ = asyncio.run(scenario())
    files = [Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))) for url in images]
    inputs = dict(AutoImageProcessor.from_pretrained(folder)(images=files, return_tensors="pt"))
    counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
    row = torch.tensor([[*written_out(ids, counts), *output.token_ids[:-1]]])
    model, found = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval(), []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda *call: found.append(call[2][2]))
    with torch.inference_mode():
        model(row, mm_token_type_ids=(row == IMAGE).int(), **inputs)
    assert torch.tensor(output.routed_experts).equal(torch.stack(found, dim=1))


def test_images_that_do_not_fit_are_refused(served):
    run, server, _ = served
    ids, images = CASES[0]
    good = request_of("good", ids, images)
    for bad, message in (
        (replace(good, images=()), "the prompt has places for images .token 53. and the request none"),
        (replace(good, images=(WIDE, TALL)), "2 images and 1 places for them .token 53.; .* or all 7 of"),
        (replace(good, images=("https://x/y.png",)), "image 0 is 'https://x/y.png'..., and must be a data URL"),
        (replace(good, images=("data:image/png;base64,AAAA",)), "image 0 cannot be read"),
        (replace(good, images=("data:image/png;base64,A",)), "image 0 cannot be read"),
        (replace(good, prompt_token_ids=(5, IMAGE)), "the prompt ends with an image"),
        (
            replace(good, prompt_token_ids=(5,) * 248 + ids),
            "the prompt is too long. This model.s maximum context length is 256 tokens, .* has 257",
        ),
        (replace(good, returns_prompt_logprobs=True), "returns_prompt_logprobs"),
    ):
        with pytest.raises(RequestError, match=message):
            run(server.generate(bad))
    assert run(server.generate(good)).token_ids


def test_a_server_without_sight_refuses():
    async def scenario():
        server = FakeServer()
        await server.start()
        await server.generate(request_of("0", (5, 6), (WIDE,)))

    with pytest.raises(UnsupportedError, match="this server has no images; leave it out"):
        asyncio.run(scenario())


def test_placeholders_are_expanded_to_the_features_of_each_image():
    assert placeholder_repeats("r", (1, 9, 2, 9, 3), 9, [2, 3]) == [1, 2, 1, 3, 1]
    assert placeholder_repeats("r", (9, 9, 1, 9), 9, [2, 1]) == [1, 1, 1, 1]
    assert placeholder_repeats("r", (9, 1, 9), 9, [1, 1]) == [1, 1, 1]
    with pytest.raises(RequestError, match="2 images and 3 places .* all 4"):
        placeholder_repeats("r", (9, 9, 9), 9, [2, 2])
