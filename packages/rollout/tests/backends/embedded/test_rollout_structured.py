"""Structured outputs: every output matches, and log-probs are the model's own, whatever shares the batch."""

import asyncio
import json
import re
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_rollout import GenerateRequest, SamplingParams, ServerConfig, create_server
from rl_rollout.errors import RequestError, UnsupportedError
from rl_rollout.testing import write_tiny_model
from rl_rollout.types import structure_of

pytestmark = pytest.mark.process  # seconds of computation

LETTERS = "[a-f]{2,4}( [0-9]{1,3})?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("structured") / "model")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def request(name, **params):
    number = int(re.sub(r"\D", "", name) or 0)
    prompt = tuple(3 + (number + i) % 40 for i in range(3 + number % 4))
    sampling = SamplingParams(**{"max_new_tokens": 48, "seed": number, **params})
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling_params=sampling)


def serve(folder, work, **config):
    async def main():
        server = create_server("embedded", ServerConfig(model_path=str(folder), dtype="float32", **config))
        await server.start()
        try:
            return await work(server)
        finally:
            await server.stop()

    return asyncio.run(main())


def generate(folder, requests, **config):
    async def work(server):
        return await asyncio.gather(*(server.generate(each) for each in requests), return_exceptions=True)

    return serve(folder, work, **config)


def text_of(tokenizer, output):
    return tokenizer.decode(output.token_ids, skip_special_tokens=True)


def logprobs_of_model(folder, asked, output, temperature):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*asked.prompt_token_ids, *output.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(asked.prompt_token_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(asked.prompt_token_ids) :, None])[:, 0].tolist()


def test_every_output_is_of_its_structure(folder, tokenizer):
    requests = [request(f"r{i}", regex=LETTERS) for i in range(6)]
    requests += [request(f"c{i}", choice=("yes", "no", "perhaps")) for i in range(6)]
    requests += [request(f"g{i}", regex=LETTERS, temperature=0.0) for i in range(2)]
    outputs = generate(folder, requests)
    for asked, output in zip(requests, outputs, strict=True):
        text = text_of(tokenizer, output)
        wanted = asked.sampling_params
        assert re.fullmatch(wanted.regex, text) if wanted.regex else text in wanted.choice, text
        assert output.finish_reason.value == "stop"
    assert len({text_of(tokenizer, output) for output in outputs[:6]}) > 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_model_without_the_structure(folder, temperature):
    asked = request("r3", regex=LETTERS, temperature=temperature, top_k=7, top_p=0.9)
    (output,) = generate(folder, [asked])
    assert output.logprobs == pytest.approx(logprobs_of_model(folder, asked, output, temperature), abs=1e-4)


def test_min_p_compares_tokens_that_a_structure_allows(folder, tokenizer):
    """A least probability of the most likely token alone would leave none that the structure allows."""
    more = {"min_p": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    requests = [request(f"c{i}", choice=("yes", "no", "perhaps"), **more) for i in range(8)]
    for asked, output in zip(requests, generate(folder, requests), strict=True):
        assert text_of(tokenizer, output) in asked.sampling_params.choice
        assert output.logprobs == pytest.approx(logprobs_of_model(folder, asked, output, 1.0), abs=1e-4)


def test_the_ratio_of_an_unchanged_model_is_one(folder):
    requests = [request(f"r{i}", regex=LETTERS) for i in range(8)]
    ratios = [
        torch.tensor(logprobs_of_model(folder, asked, output, 1.0)) - torch.tensor(output.logprobs)
        for asked, output in zip(requests, generate(folder, requests), strict=True)
    ]
    assert torch.cat(ratios).exp().mean().item() == pytest.approx(1.0, abs=1e-3)


def test_neighbours_in_the_batch_change_nothing(folder):
    plain = [request(f"p{i}", ignore_eos=True) for i in range(4)]
    structured = [request(f"r{i}", regex=LETTERS) for i in range(4)]
    alone = generate(folder, plain)
    assert generate(folder, [*plain, *structured])[:4] == alone
    together = generate(folder, structured, max_num_seqs=2)
    assert together == [generate(folder, [each])[0] for each in structured]


def test_a_completion_goes_on_in_its_structure(folder, tokenizer):
    asked = request("r5", regex="[a-f]{12}")
    (whole,) = generate(folder, [asked])
    for length in (1, 5, 12):
        prompt = asked.prompt_token_ids + whole.token_ids[:length]
        span = (len(asked.prompt_token_ids), len(prompt))
        rest = GenerateRequest(
            request_id="rest", prompt_token_ids=prompt, sampled_spans=(span,), sampling_params=asked.sampling_params
        )
        (output,) = generate(folder, [rest])
        text = tokenizer.decode([*whole.token_ids[:length], *output.token_ids], skip_special_tokens=True)
        assert re.fullmatch("[a-f]{12}", text)


def test_tokens_of_another_structure_cannot_be_gone_on_from(folder, tokenizer):
    prompt = (3, 4, *tokenizer.encode("zzz", add_special_tokens=False))
    params = SamplingParams(regex="[a-f]{12}")
    asked = GenerateRequest(
        request_id="rest", prompt_token_ids=prompt, sampled_spans=((2, len(prompt)),), sampling_params=params
    )
    (error,) = generate(folder, [asked])
    assert isinstance(error, RequestError)
    assert "are not of the structure that the request asks for" in str(error)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"regex": "[a"}, "its structure cannot be used: .* unclosed character class"),
        ({"json_schema": "3"}, "json_schema is no JSON object"),
        ({"json_schema": "{"}, "json_schema is no JSON object"),
        ({"json_schema": '{"type": "thing"}'}, "its structure cannot be used: Invalid type: thing"),
        ({"regex": "a", "choice": ("b",)}, "regex and choice are set; an output has one structure"),
        ({"choice": ("a", "")}, "choice=.* must be texts that are not empty"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos with regex, whose output ends there"),
    ],
)
def test_a_structure_that_is_none_is_refused(folder, params, sentence):
    (error,) = generate(folder, [request("r1", **params)])
    assert isinstance(error, RequestError)
    assert re.search(sentence, str(error)), str(error)


def test_a_structure_that_no_token_can_spell_is_an_error(folder):
    (error,) = generate(folder, [request("r1", json_schema='{"type": "object"}')])
    assert "its structured output ended" in str(error)  # this tokenizer has no braces


def test_top_log_probs_are_of_the_model(folder):
    asked = request("r2", regex="[a-f]{3}")
    asked = GenerateRequest(
        request_id="top", prompt_token_ids=asked.prompt_token_ids, sampling_params=asked.sampling_params,
        num_top_logprobs=52,
    )  # fmt: skip
    (output,) = generate(folder, [asked])
    for token_id, logprob, top in zip(output.token_ids, output.logprobs, output.top_logprobs, strict=True):
        assert len(top) == 52
        assert dict(top)[token_id] == pytest.approx(logprob, abs=1e-5)


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        (({"type": "text"},), {}),
        (({"type": "json_object"},), {"json_schema": '{"type": "object"}'}),
        (({"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}},), {"json_schema": '{"a": 1}'}),
        ((None, {"json": {"a": 1}}), {"json_schema": '{"a": 1}'}),
        ((None, {"json": '{"a": 1}', "regex": None}), {"json_schema": '{"a": 1}'}),
        ((None, {"regex": "a+"}), {"regex": "a+"}),
        ((None, {"choice": ["a", "b"]}), {"choice": ("a", "b")}),
        ((), {}),
    ],
)
def test_formats_of_openai_and_vllm_are_read(asked, fields):
    assert structure_of(*asked) == fields


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (({"type": "xml"},), "asks for no structure"),
        (({"type": "json_schema"},), "asks for no structure"),
        (("json",), "asks for no structure"),
        ((None, {"choice": "ab"}), "asks for no structure"),
        ((None, {"regex": 3}), "asks for no structure"),
        ((None, {}), "asks for no structure"),
        ((None, {"json": {}, "regex": "a"}), "asks for no structure"),
        ((None, {"json": {}, "whitespace_pattern": " "}), "asks for no structure"),
        (({"type": "text"}, {"regex": "a"}), "are one setting; leave one of them out"),
    ],
)
def test_a_format_that_is_not_known_is_refused(asked, sentence):
    with pytest.raises(RequestError, match=sentence):
        structure_of(*asked)


def test_the_endpoint_takes_a_response_format(folder, tokenizer):
    openai = pytest.importorskip("openai")

    async def work(server):
        address = await server.start()
        async with openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key="none") as client:
            ask = partial(
                client.chat.completions.create,
                model=address.model, messages=[{"role": "user", "content": "a"}], max_tokens=30, seed=3,
            )  # fmt: skip
            with pytest.raises(openai.BadRequestError, match="asks for no structure that is known"):
                await ask(response_format={"type": "xml"})
            answers = [
                await ask(response_format={"type": "text"}),
                await ask(extra_body={"structured_outputs": {"regex": "[a-f]{3}"}}),
            ]
        return [answer.choices[0].message.content for answer in answers]

    _, forced = serve(folder, work)
    assert re.fullmatch("[a-f]{3}", forced)


def test_a_json_schema_of_a_real_vocabulary(tmp_path):
    """A tokenizer of bytes, whose tokens may spell anything."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = write_tiny_model(tmp_path / "bytes", vocab_size=258, eos_token_id=256, pad_token_id=257)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<eos>", "<pad>"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<eos>", "<pad>"])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    properties = {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}}
    schema = json.dumps({"type": "object", "properties": properties, "required": ["name", "age"],
                         "additionalProperties": False})  # fmt: skip
    outputs = generate(folder, [request(f"r{i}", json_schema=schema, max_new_tokens=200) for i in range(4)])
    for output in outputs:
        found = json.loads(made.decode(output.token_ids))
        assert set(found) == {"name", "age"}
        assert found["name"] in ("Ada", "Alan")
        assert 10 <= found["age"] <= 99


def test_a_server_without_structures_refuses_them(qwen3_folder):
    from rl_rollout.testing import FakeServer

    async def main():
        server = FakeServer(ServerConfig(model_path=str(qwen3_folder)))
        await server.start()
        try:
            await server.generate(request("r1", regex="a"))
        finally:
            await server.stop()

    with pytest.raises(UnsupportedError, match="this server has no structured output"):
        asyncio.run(main())
