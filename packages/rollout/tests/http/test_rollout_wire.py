"""What clients and servers say to one another: routed experts, packed and as lists, and from a server to a client."""

import asyncio
import base64
import json
import struct
from dataclasses import replace

import msgspec
import pytest
import torch

from rl_rollout import (
    FinishReason,
    GenerateRequest,
    GenerationError,
    RequestError,
    RolloutError,
    SamplingParams,
    ServerConfig,
    TokenChunk,
    TokenOutput,
    connect_server,
    create_server,
)
from rl_rollout.http.messages import (
    capabilities_from_json,
    chunk_from_body,
    chunk_to_body,
    error_from_body,
    error_to_body,
    output_from_body,
    output_to_body,
)
from rl_rollout.testing import write_tiny_model
from rl_rollout.validation import check_answer

EXPERTS = (((0, 1), (2, 3)), ((4, 5), (6, 7)), ((8, 9), (10, 255)))
WIDE = tuple(tuple(tuple(expert + 256 for expert in layer) for layer in token) for token in EXPERTS)
OUTPUT = TokenOutput(
    request_id="r",
    token_ids=(5, 6),
    logprobs=(-0.5, -1.0),
    weight_versions=(3, 3),
    finish_reason=FinishReason.LENGTH,
    routed_experts=EXPERTS,
)


def told(output):
    """As it comes out of JSON, read as the standard allows."""
    return json.loads(output_to_body(output), parse_constant=pytest.fail)


def test_experts_are_one_byte_where_they_fit_or_two_low_first():
    data = base64.b64encode(bytes([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 255])).decode()
    assert told(OUTPUT)["routed_experts"] == {"shape": [3, 2, 2], "dtype": "uint8", "data": data}
    wide = told(replace(OUTPUT, routed_experts=WIDE))["routed_experts"]
    assert (wide["dtype"], base64.b64decode(wide["data"])[-2:]) == ("int16", struct.pack("<h", 511))


@pytest.mark.parametrize("experts", [EXPERTS, WIDE, (((255,),),), (((256,),),), (((-1,),),), ()])
def test_an_output_comes_back_as_it_was(experts):
    output = replace(OUTPUT, routed_experts=experts)
    assert output_from_body(output_to_body(output)) == output


def test_an_output_keeps_every_bit_and_tells_nan_as_null():
    logprobs = (-0.1, -1e-45, -(2.0**-149), float("nan"), -3.4028234663852886e38)
    output = replace(OUTPUT, logprobs=logprobs)
    assert output_to_body(output).count(b"null") == 1
    # repr tells one NaN from a number, and not from another NaN
    assert repr(output_from_body(output_to_body(output))) == repr(output)
    chunk = TokenChunk(token_ids=(1,) * 5, logprobs=logprobs, weight_versions=(2,) * 5, finish_reason=None)
    assert repr(chunk_from_body(chunk_to_body(chunk, "r"))) == repr(("r", chunk))
    last = replace(chunk, finish_reason=FinishReason.ABORT)
    assert repr(chunk_from_body(chunk_to_body(last))) == repr(("", last))


def test_chunks_make_up_their_output():
    first = TokenChunk(token_ids=(5,), logprobs=(-0.5,), weight_versions=(3,), finish_reason=None)
    last = TokenChunk(token_ids=(6, 7), logprobs=(-1.0, -2.0), weight_versions=(3, 4), finish_reason=FinishReason.STOP)
    whole = replace(
        OUTPUT, token_ids=(5, 6, 7), logprobs=(-0.5, -1.0, -2.0), weight_versions=(3, 3, 4), routed_experts=()
    )
    assert TokenOutput.joined("r", [first, last]) == replace(whole, finish_reason=FinishReason.STOP)
    cut = TokenOutput.joined("r", [first])
    assert (cut.token_ids, cut.finish_reason) == ((5,), FinishReason.ABORT)


def test_an_output_separates_minus_infinity_from_nan_in_json():
    """A token that cannot be drawn may be in the prompt, or among the most likely ones."""
    top = (((5, -0.25), (6, float("nan")), (7, float("-inf"))), ())
    output = replace(OUTPUT, top_logprobs=top, prompt_logprobs=(0.0, float("-inf")))
    assert told(output)["top_logprobs"] == [[[5, -0.25], [6, None], [7, "-inf"]], []]
    assert repr(output_from_body(output_to_body(output))) == repr(output)


@pytest.mark.promise("An answer with an unknown field, or a field of another type, is refused")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"finished": True}, "unknown field `finished`"),
        ({"token_ids": ["5", "6"]}, "Expected `int`"),
        ({"finish_reason": "boredom"}, "boredom"),
        ({"weight_versions": None}, "Expected `array`"),
    ],
)
def test_an_answer_with_unknown_or_mistyped_fields_is_refused(changed, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        output_from_body(json.dumps(told(OUTPUT) | changed).encode())
    known = told(OUTPUT)
    del known["routed_experts"]
    with pytest.raises(msgspec.ValidationError, match=message):
        chunk_from_body(json.dumps(known | changed).encode())


def test_an_error_comes_back_as_its_class_with_the_request_id():
    body = error_to_body(RequestError("no prompt"), "r")
    assert json.loads(body) == {
        "error": {"type": "RequestError", "message": "no prompt", "code": 400},
        "request_id": "r",
    }
    request_id, error = error_from_body(body, "http://a")
    assert (request_id, type(error), str(error)) == ("r", RequestError, "no prompt")
    _, other = error_from_body(error_to_body(KeyError("x")), "http://a")
    assert (type(other), str(other)) == (RolloutError, "http://a: KeyError: 'x'")
    _, neither = error_from_body(b"<html>Bad Gateway", "http://a")
    assert str(neither) == "http://a answered with no known message: <html>Bad Gateway"


def test_capabilities_of_another_version_are_a_sentence():
    with pytest.raises(RolloutError, match="unknown field `flies`.*same rl-rollout at both ends"):
        capabilities_from_json({"flies": True}, "http://a")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shape": [3, 2, 3]}, r"12 numbers for the shape \(3, 2, 3\)"),
        ({"shape": [-3, -2, 2]}, r"12 numbers for the shape \(-3, -2, 2\)"),
        ({"dtype": "int64"}, "'int64'"),
        ({"data": "?"}, "base64"),
    ],
)
def test_what_is_no_packed_experts_is_a_sentence(changed, message):
    packed = told(OUTPUT)["routed_experts"] | changed
    with pytest.raises((RolloutError, msgspec.ValidationError), match=message):
        output_from_body(json.dumps({**told(OUTPUT), "routed_experts": packed}).encode())


COLUMNS = {"latents": torch.arange(12.0).view(3, 2, 2), "ids": torch.tensor([5, -1]), "pixels": torch.ones(1).byte()}
STEPS = replace(OUTPUT, token_ids=(), logprobs=(51.25, 2.0), routed_experts=(), columns=COLUMNS)


def test_columns_keep_every_bit_shape_and_dtype():
    found = output_from_body(output_to_body(STEPS))
    assert found == STEPS
    assert found.columns.keys() == COLUMNS.keys()
    for name, tensor in COLUMNS.items():
        assert found.columns[name].dtype == tensor.dtype
        assert torch.equal(found.columns[name], tensor)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shape": [3, 2, 3]}, r"column latents has 48 bytes for float32 of shape \(3, 2, 3\)"),
        ({"shape": [-3, -2, 2]}, r"of shape \(-3, -2, 2\)"),
        ({"dtype": "float64"}, "'float64'"),
    ],
)
def test_what_is_no_column_is_a_sentence(changed, message):
    packed = told(STEPS)["columns"]
    packed["latents"] |= changed
    with pytest.raises((RolloutError, msgspec.ValidationError), match=message):
        output_from_body(json.dumps({**told(STEPS), "columns": packed}).encode())


@pytest.mark.parametrize("changed", [{"logprobs": (1.0,)}, {"columns": {}}, {"token_ids": (5,)}])
def test_an_answer_of_steps_has_columns_and_no_tokens(changed):
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling_params=SamplingParams())
    check_answer(request, STEPS, "a server", vocab_size=10)
    with pytest.raises(GenerationError, match=r"log-probs and 2 versions of \d tokens"):
        check_answer(request, replace(STEPS, **changed), "a server", vocab_size=10)


def test_a_client_gets_the_experts_that_the_server_tells(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = write_tiny_model(tmp_path / "moe", family="qwen3_moe", **experts)

    async def scenario():
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1))
        client = connect_server((await server.start()).url)
        await client.start()
        asked = GenerateRequest(
            request_id="r",
            prompt_token_ids=(5, 6, 7),
            sampling_params=SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True),
            returns_routed_experts=True,
        )
        try:
            return await server.generate(asked), await client.generate(asked)
        finally:
            await client.stop()
            await server.stop()

    ours, theirs = asyncio.run(scenario())
    assert theirs == ours
    assert torch.tensor(theirs.routed_experts).shape == (3 + 6 - 1, 2, 2)
